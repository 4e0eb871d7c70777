"""`IntegerRates`: whether a driver's code for products at ``int8`` is faster than that for exact ones, as measured."""

from __future__ import annotations

import json
import os
from itertools import count
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import ref

from opweave.concurrency import Lock
from opweave.contract import Arg, Group, Step, Usage
from opweave.errors import AllocationError
from opweave.graph.dtypes import DType, f32, u8
from opweave.graph.layout import dense_strides, nbytes
from opweave_opencl.caching import BinaryCache
from opweave_opencl.errors import KernelBuildError
from opweave_opencl.health import processor
from opweave_opencl.kernels.lane_products import rows_of
from opweave_opencl.program import source
from opweave_opencl.properties import identity
from opweave_opencl.tuning import processor_limit

if TYPE_CHECKING:
    from opweave.contract import Plan
    from opweave.contract.kernels import Kernel
    from opweave.graph.layout import Shape
    from opweave.graph.precision import Precision
    from opweave_opencl.device import OpenCLDevice

__all__ = ["VARIABLE", "IntegerRates"]

VARIABLE: Final = "OPWEAVE_OPENCL_INT8"
"""Environment variable: ``1`` for products at ``int8`` wherever there is a kernel, ``0`` for none; else as measured."""

SIDE: Final = 2048
"""Rows and columns of the weights with which it is measured."""

WEIGHTS: Final = processor_limit("integer_weights", 1 << 18, 1, 1 << 22)
"""Elements of weights below which rounding the rows takes longer than it saves."""

MOST_ROWS: Final = 64
"""The most rows that are measured; what holds for them is taken to hold for more."""

SAMPLES: Final = 7

_SOURCES: Final = ("integer_products.cl", "unpacking.cl", "products.cl", "lane_products.cl", "blocks.cl")


class Seconds(NamedTuple):
    """The shortest times of one product."""

    integer: float
    exact: float


class IntegerRates:
    """Decides for which products a device computes in integers, where a program allows it.

    Times are measured when the first product of a type of blocks and a number of rows (1, 2, 4, ... 64 and more) is
    planned, with weights of 2048 x 2048, the two kernels alternately. They are kept in the folder of built programs, by
    driver, processor and the kernels' sources. This takes at most some hundred milliseconds, and the building of the
    kernels.

    Args:
        device: whose streams measure.
        answers: where times are kept; ``None``: in the user's cache folder.
    """

    def __init__(self, device: OpenCLDevice, answers: BinaryCache | None = None) -> None:
        self._device: Final = ref(device)  # weak, because the device refers to this object
        self._answers: Final = answers
        self._known: Final[dict[tuple[DType, int], Seconds | None]] = {}
        self._lock: Final = Lock()

    def why_not(self, step: Step) -> str | None:
        """Why ``step`` should be computed exactly, or ``None``."""
        wish = os.environ.get(VARIABLE, "")
        if wish in ("0", "1"):
            return None if wish == "1" else f"{VARIABLE}=0"
        rows, w = rows_of(step), step.srcs[1]
        if w.size < WEIGHTS.value:
            return "the weights are too small for what rounding the rows takes"
        rows = min(1 << (rows.bit_length() - 1), MOST_ROWS)
        seconds = self.seconds(w.dtype, rows)
        if seconds is None:
            return "how long its product takes in int8 could not be measured"
        if seconds.integer < seconds.exact:
            return None
        return (
            f"products of {w.dtype} in int8 were measured to take {seconds.integer / seconds.exact:.2f} times as long"
            f" as exact ones, at {rows} row{'s' if rows > 1 else ''}"
        )

    def seconds(self, dtype: DType, rows: int) -> Seconds | None:
        """The times of ``rows`` rows with weights of a type; ``None`` where the device has no memory or kernels."""
        with self._lock:
            if (dtype, rows) not in self._known:
                device = self._device()
                assert device is not None
                answers = BinaryCache() if self._answers is None else self._answers
                parts = (f"int8 {dtype} {rows}", *identity(device.cl_device), str(device.tuning), *processor())
                key = answers.key((*parts, *map(repr, device.limits), *map(source, _SOURCES)))
                found = _recalled(answers.load(key))
                if found is None:
                    try:
                        found = _measured(device, dtype, rows)
                    except (AllocationError, KernelBuildError):
                        found = None
                    else:
                        answers.store(key, json.dumps(found._asdict()).encode())
                self._known[dtype, rows] = found
            return self._known[dtype, rows]


def _recalled(answer: bytes | None) -> Seconds | None:
    try:
        found = json.loads(answer or b"null")
        return Seconds(float(found["integer"]), float(found["exact"]))
    except (ValueError, TypeError, KeyError):
        return None


def _measured(device: OpenCLDevice, dtype: DType, rows: int) -> Seconds:
    values, kept = count(1), []

    def operand(shape: Shape, dtype: DType) -> Arg:
        # Discarded at the end instead of freed, because freeing waits for other work on the device.
        buffer = device.alloc(nbytes(shape, dtype), Usage.COMPUTE)
        buffer.upload(0, bytes(buffer.size))
        kept.append(buffer)
        return Arg(buffer, 0, dtype, shape, dense_strides(shape, dtype), value=next(values))

    candidates = device.kernels.candidates("linear")
    with device.open() as stream:
        x, w, out = operand((rows, SIDE), f32), operand((SIDE, SIDE), dtype), operand((rows, SIDE), f32)

        def plan(precision: Precision) -> Plan:
            step = Step("linear", out, (x, w), {"blocks": dtype}, precision=precision)
            # Named here, because the table would ask for the times.
            kernel = next(k for k in candidates if k.precision == precision and _takes(k, step))
            size = kernel.scratch(step).size
            return stream.compile([Group((step,), size, operand((size,), u8) if size else None, kernel=kernel)])

        plans = [plan("int8"), plan("exact")]
        best = [inf, inf]
        for _ in range(SAMPLES):
            for i, each in enumerate(plans):
                start = perf_counter()
                each.run()
                stream.synchronize()
                best[i] = min(best[i], perf_counter() - start)
    return Seconds(*best)


def _takes(kernel: Kernel, step: Step) -> bool:
    return kernel.precision == "int8" or kernel.why_not(step) is None
