"""`Offloading`: whether weights in host memory are worth bringing to a device on each run, by measured rates.

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
from opweave.contract.space import Usage
from opweave.contract.step import Arg, Step
from opweave.errors import OpweaveError
from opweave.graph.dtypes import DType, f32, u8
from opweave.graph.layout import dense_strides, nbytes
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.contract.execution import Stream
    from opweave.graph.layout import Shape

__all__ = ["Offloading", "Rates", "flops"]

ROWS: Final = 64
SIDE: Final = 1024
COUNT: Final = 2 * ROWS * SIDE * SIDE
"""What rates are measured with: so many rows times a square of weights, large enough for either side to be busy,
and the floating-point operations of that."""

QUEUED: Final = 2
REPEATS: Final = 6
"""So many are queued at a time, and so often: the least counts."""


def flops(step: Step) -> int:
    """Floating-point operations of a step, by the operation's definition."""
    op = OPS[step.op]
    written: tuple[Any, ...] = (step.out,) if op.writes else ()
    node = SimpleNamespace(
        op=op, srcs=(*written, *step.srcs), attrs=step.attrs, shape=step.out.shape, size=step.out.size
    )
    return op.flops(node)  # type: ignore[arg-type]  # what costs are told by, without a graph


class Rates(NamedTuple):
    """What a device and the host were measured at.

    Attributes:
        latency: seconds of the smallest transfer to the device.
        upload: bytes per second of large ones.
        device, host: floating-point operations per second in products, by the device and by NumPy on the host.
    """

    latency: float
    upload: float
    device: float
    host: float


class Offloading:
    """Which steps are worth bringing weights to a device for: what an author's ``_offload`` may ask.

    A device is asked where it comes before the one at the weights, so the caller prefers it. Bringing the weights is
    worth it where that takes no longer than the device computes with them, since it happens beside the work on others;
    or where both together take less than the host would. Rates are measured when the first step asks, once for each
    type of weights: products with a 1,024 x 1,024 matrix here and there, and its upload; some ten milliseconds, and
    what building the kernel takes.

    Args:
        device: its weights come from memory that it does not reach.
    """

    def __init__(self, device: Device) -> None:
        self._device: Final = ref(device)  # which has this object
        self._rates: Final[dict[DType, Rates | None]] = {}
        self._lock: Final = Lock()

    def pays(self, step: Step) -> bool:
        """Whether to bring the largest source of ``step`` for each run; ``False`` where that cannot be measured."""
        op = OPS.get(step.op)
        if op is None or not op.product or len(step.srcs) < 2:
            return False
        data = [src for i, src in enumerate(step.srcs) if i not in op.indices]
        weights = max(data, key=lambda src: src.nbytes)
        size = weights.nbytes
        if op.selects is not None and weights is step.srcs[op.selects[0]]:
            rows = weights.shape[0]  # of which only those in use are brought
            size = size // max(rows, 1) * min(rows, step.srcs[op.selects[1]].size)
        rates = self.rates(weights.dtype)
        if rates is None:
            return False
        work = flops(step)
        transfer, here, there = rates.latency + size / rates.upload, work / rates.device, work / rates.host
        return transfer <= here or transfer + here <= there

    def rates(self, dtype: DType) -> Rates | None:
        """What was measured with weights of a type; ``None`` where the device does not multiply by them."""
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
        # Dropped at the end, not freed, which would wait for other work on the device.
        buffer = device.alloc(nbytes(shape, dtype), Usage.COMPUTE)
        buffer.upload(0, bytes(buffer.size))
        return Arg(buffer, 0, dtype, shape, dense_strides(shape, dtype), value=next(values))

    with device.open() as stream:
        x, w, out = operand((ROWS, SIDE), rows), operand((SIDE, SIDE), dtype), operand((ROWS, SIDE), rows)
        (group,) = stream.fuse([Step("linear", out, (x, w), attrs)])
        if group.workspace:
            group = group._replace(scratch=operand((group.workspace,), u8))
        plan = stream.compile([group])
        data, piece = np.zeros(w.nbytes, np.uint8), np.zeros(64, np.uint8)
        target = w.buffer
        assert target is not None
        latency = _seconds(stream, lambda: stream.upload(target, 0, piece))
        upload = _seconds(stream, lambda: stream.upload(target, 0, data))
        product = _seconds(stream, plan.run)
    return Rates(latency, w.nbytes / max(upload - latency, 1e-9), COUNT / product, _host_rate())


@cache
def _host_rate() -> float:
    """Floating-point operations per second of NumPy's products: what the host could do best, whoever computes there."""
    a, b = np.zeros((ROWS, SIDE), np.float32), np.zeros((SIDE, SIDE), np.float32)
    return COUNT / _seconds(None, lambda: np.matmul(a, b))


def _seconds(stream: Stream | None, call: Callable[[], object]) -> float:
    """The least time of a call, of some queued in a row."""
    least = inf
    for _ in range(REPEATS):
        start = perf_counter()
        for _ in range(QUEUED):
            call()
        if stream is not None:
            stream.synchronize()
        least = min(least, (perf_counter() - start) / QUEUED)
    return least
