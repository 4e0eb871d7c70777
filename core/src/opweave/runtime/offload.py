"""`Offloading`: whether copying weights from host memory to a device for each run pays off, by measured rates.

Also `flops`, the floating-point operations of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from math import inf
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

import numpy as np

from opweave.concurrency import Lock
from opweave.contract.memory import Usage
from opweave.contract.step import Arg, Step
from opweave.errors import OpweaveError
from opweave.graph.dtypes import DType, f32, u8
from opweave.graph.layout import dense_strides, nbytes
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.graph.layout import Shape
    from opweave.runtime.device import Device
    from opweave.runtime.stream import Stream

__all__ = ["Offloading", "Rates", "flops"]

ROWS: Final = 64
SIDE: Final = 1024
COUNT: Final = 2 * ROWS * SIDE * SIDE
"""Rates are measured with a product of `ROWS` x `SIDE` by `SIDE` x `SIDE`, large enough to keep either device busy;
`COUNT` is its number of floating-point operations."""

QUEUED: Final = 2
REPEATS: Final = 6
"""`REPEATS` times, `QUEUED` calls are queued and timed together; the shortest time counts."""


def flops(step: Step) -> int:
    """Floating-point operations of a step, by ``OpDef.flops`` of its operation."""
    op = OPS[step.op]
    written: tuple[Any, ...] = (step.out,) if op.writes else ()
    out = step.out
    node = SimpleNamespace(
        op=op, srcs=(*written, *step.srcs), attrs=step.attrs, dtype=out.dtype, shape=out.shape, ndim=len(out.shape),
        size=out.size, nbytes=out.nbytes,
    )  # fmt: skip
    return op.flops(node)  # type: ignore[arg-type]  # has the attributes that `flops` functions read


class Rates(NamedTuple):
    """Measured rates of a device and the host.

    Attributes:
        latency: seconds of a 64-byte transfer to the device.
        upload: bytes per second of large transfers to the device.
        device, host: floating-point operations per second of matrix products, on the device and by NumPy on the host.
    """

    latency: float
    upload: float
    device: float
    host: float


class Offloading:
    """Decides for which steps weights should be copied to a device for each run. For an author's ``_offload``.

    The scheduler calls ``_offload`` of a device only if the device comes before that of the weights in the caller's
    order. Copying pays off if it takes no longer than computing the step on the device, because copies overlap with the
    computation of other steps; or if copying and computing together take no longer than computing on the host.

    Rates are measured at the first step of each dtype of weights, with a product by a 1,024 x 1,024 matrix on the
    device and on the host, and the upload of that matrix. This takes some ten milliseconds, and the time to build the
    kernel.

    Args:
        device: a device that cannot address host memory.
    """

    def __init__(self, device: Device) -> None:
        self._device: Final = ref(device)  # weak, because the device refers to this object
        self._rates: Final[dict[DType, Rates | None]] = {}
        self._lock: Final = Lock()

    def pays(self, step: Step) -> bool:
        """Whether to copy the largest source of ``step`` for each run; ``False`` where that cannot be measured."""
        op = OPS.get(step.op)
        if op is None or not op.product or len(step.srcs) < 2:
            return False
        data = [src for i, src in enumerate(step.srcs) if i not in op.indices]
        weights = max(data, key=lambda src: src.nbytes)
        size = weights.nbytes
        if op.selects is not None and weights is step.srcs[op.selects[0]]:
            rows = weights.shape[0]  # only the selected rows are copied
            size = size // max(rows, 1) * min(rows, step.srcs[op.selects[1]].size)
        rates = self.rates(weights.dtype)
        if rates is None:
            return False
        work = flops(step)
        transfer, here, there = rates.latency + size / rates.upload, work / rates.device, work / rates.host
        return transfer <= here or transfer + here <= there

    def rates(self, dtype: DType) -> Rates | None:
        """The rates for weights of a dtype; ``None`` if the device has no product with such weights, or no memory."""
        with self._lock:
            if dtype not in self._rates:
                device = self._device()
                assert device is not None
                try:
                    self._rates[dtype] = _measured(device, dtype)
                except (MemoryError, OpweaveError):
                    self._rates[dtype] = None
            return self._rates[dtype]


def _measured(device: Device, dtype: DType) -> Rates:
    rows = f32 if dtype.is_quantized else dtype
    attrs = {"blocks": dtype} if dtype.is_quantized else {}
    values = count(1)

    def operand(shape: Shape, dtype: DType) -> Arg:
        # Discarded at the end instead of freed, because freeing waits for other work on the device.
        buffer = device.alloc(nbytes(shape, dtype), Usage.COMPUTE)
        buffer.upload(0, bytes(buffer.size))
        return Arg(buffer, 0, dtype, shape, dense_strides(shape, dtype), value=next(values))

    with device.open() as stream:
        x, w, out = operand((ROWS, SIDE), rows), operand((SIDE, SIDE), dtype), operand((ROWS, SIDE), rows)
        (group,) = stream.fuse([Step("linear", out, (x, w), attrs)])
        if group.workspace:
            group = group._replace(scratch=operand((group.workspace,), u8))
        plan = stream.compile([group])
        data, few = np.zeros(w.nbytes, np.uint8), np.zeros(64, np.uint8)
        target = w.buffer
        assert target is not None
        latency = _seconds(stream, lambda: stream.upload(target, 0, few))
        upload = _seconds(stream, lambda: stream.upload(target, 0, data))
        product = _seconds(stream, plan.run)
    return Rates(latency, w.nbytes / max(upload - latency, 1e-9), COUNT / product, _host_rate())


@cache
def _host_rate() -> float:
    """Floating-point operations per second of NumPy's matrix product, as an estimate for any backend on the host."""
    a, b = np.zeros((ROWS, SIDE), np.float32), np.zeros((SIDE, SIDE), np.float32)
    return COUNT / _seconds(None, lambda: np.matmul(a, b))


def _seconds(stream: Stream | None, call: Callable[[], object]) -> float:
    """The shortest measured time of ``call`` in seconds; see `REPEATS`."""
    least = inf
    for _ in range(REPEATS):
        start = perf_counter()
        for _ in range(QUEUED):
            call()
        if stream is not None:
            stream.synchronize()
        least = min(least, (perf_counter() - start) / QUEUED)
    return least
