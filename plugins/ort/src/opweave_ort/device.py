"""`OrtDevice`: an execution provider of ONNX Runtime, in the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime

from opweave.contract import Limit, Step, Stream, flops
from opweave.errors import Unavailable
from opweave.graph.dtypes import f32
from opweave.graph.layout import nbytes
from opweave.graph.opdef import OPS
from opweave.runtime.host.memory import HostMemory
from opweave.runtime.host.processor import cpu_name
from opweave.runtime.host.threads import ThreadPool
from opweave_ort.kernels import KERNELS
from opweave_ort.limits import limit
from opweave_ort.model import computed
from opweave_ort.providers import Provider, features
from opweave_ort.runtime import PACK_VARIABLE, flag
from opweave_ort.stream import OrtStream
from opweave_ort.weights import form_of, packed_nbytes

__all__ = ["OrtDevice"]

SWITCH_FLOPS = 1 << 20
"""Floating-point operations from which on a step saves more than a session's call costs."""


class OrtDevice(HostMemory):
    """An execution provider. Operands are read and written where they lie in host memory; a provider with memory of its
    own copies what enters and leaves a group, and keeps weights.

    ``device.open(threads=2)`` gives the sessions of a stream threads of their own.

    Attributes:
        provider: the provider.
        options: the provider's options, by which ONNX Runtime chooses the hardware.
        packs: whether weights may be copied into another form.
    """

    survives_fork = False  # a child process does not have the threads of its pool
    kernels = KERNELS
    stream_class = OrtStream

    def __init__(self, provider: Provider, number: int = 0) -> None:
        self.provider = provider
        self.id = f"{provider.id}:{number}" if provider.numbered else provider.id
        self.kind = provider.kind
        self.threaded = provider.id == "cpu"
        self.options: Mapping[str, str] = {"device_id": str(number)} if provider.numbered else {}
        self.packs = flag(PACK_VARIABLE, True)
        where = cpu_name() if provider.id == "cpu" else provider.name.removesuffix("ExecutionProvider")
        self.description = f"ONNX Runtime {onnxruntime.__version__} on {where}"

    @property
    def limits(self) -> Sequence[Limit]:
        """The numbers by which sessions and emitters are chosen."""
        return tuple(limit)

    def features(self) -> Mapping[str, Any]:
        """ONNX Runtime's version and providers, the processor, and the bytes by which the arena has grown."""
        return features()

    def _open(self, threads: int | ThreadPool | None = None, **params: Any) -> Stream:
        if params:
            raise TypeError(f"unknown parameters {sorted(params)}; there is threads=")
        return OrtStream(self, threads)

    def _why_not(self, step: Step) -> str | None:
        if not self.packs and any(src.dtype.is_quantized for src in step.srcs):
            return f"quantized weights are repacked, which {PACK_VARIABLE}=0 declines"
        op = OPS.get(step.op)
        if self.provider.id != "cpu" and op is not None and op.indices and op.family not in ("rope", "random"):
            return f"{self.provider.name} does not report indices out of range"  # it gives zeros, or other rows
        return super()._why_not(step)

    def _packed_bytes(self, step: Step, source: int) -> int:
        weight, precision = step.srcs[source], self.precision(step)
        if step.op != "linear" or source != 1 or not self.packs:
            return 0
        if weight.dtype.is_quantized:
            return packed_nbytes(weight.dtype, weight.shape, form_of(weight.dtype, precision))
        return nbytes(weight.shape, f32) if computed(weight.dtype) is f32 else 0

    def _probe(self) -> None:
        from opweave_ort.sessions import probe

        error = probe(self.provider, self.options)
        if error is not None:
            raise Unavailable(
                f"{self.provider.name} makes no session: {error}",
                remedy="install the driver and libraries that this package of ONNX Runtime was built for",
            )

    def _wants(self, step: Step) -> bool:
        op = OPS.get(step.op)
        return op is not None and op.product and flops(step) >= SWITCH_FLOPS
