"""`seconds_of_step`: how long a device takes for one step, alone and in memory of its own."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Arg, Group
from opweave.errors import UnsupportedOpError
from opweave.graph.dtypes import u8
from opweave.graph.layout import span
from opweave.scheduler.place.support import unbound_step
from opweave.scheduler.place.target import Target

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.dtypes import DType
    from opweave.graph.tensor import Signature

__all__ = ["seconds_of_step"]

RUNS: Final = (3, 20)
"""Least and most runs; between them as many as take `SECONDS`."""
SECONDS: Final = 0.02


def seconds_of_step(device: Device, signature: Signature) -> float:
    """The least seconds from the start to the end of a plan of one step, after one run that does not count. Floats are
    1/2, ids 0.

    Raises:
        UnsupportedOpError: the device does not run such a step.
        AllocationError, ExecutionError: it has no room, or fails.
    """
    with ExitStack() as stack:
        stream = stack.enter_context(device.open())
        support = Target(0, stream, None, owned=True).support(signature)
        if support.reason is not None:
            raise UnsupportedOpError(f"{device.name} does not run {signature.op.name}: {support.reason}")
        step = unbound_step(signature, device, support)

        def bound(arg: Arg) -> Arg:
            buffer = stack.enter_context(device.alloc(max(span(arg.shape, arg.strides, arg.dtype), 1)))
            buffer.upload(0, _values(arg.dtype, buffer.size))
            return Arg(buffer, 0, arg.dtype, arg.shape, arg.strides, None, arg.value)

        step = step._replace(out=bound(step.out), srcs=tuple(map(bound, step.srcs)))
        size = support.workspace
        scratch = Arg(stack.enter_context(device.alloc(size)), 0, u8, (size,), (1,)) if size else None
        plan = stream.compile([Group((step,), size, scratch)])
        stack.callback(plan.close)
        times: list[float] = []
        while len(times) <= RUNS[0] or (len(times) <= RUNS[1] and sum(times) < SECONDS):
            start = perf_counter()
            plan.run()
            stream.synchronize()
            times.append(perf_counter() - start)
    return min(times[1:])


def _values(dtype: DType, size: int) -> np.ndarray[Any, Any]:
    """Bytes that are valid in every operation: 1/2, ids that exist, blocks of zeros."""
    if not dtype.is_float:
        return np.zeros(size, np.uint8)
    return np.full(size // dtype.itemsize, 0.5, dtype.numpy).view(np.uint8)
