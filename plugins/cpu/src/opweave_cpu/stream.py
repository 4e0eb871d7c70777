"""`CpuStream`: runs kernels in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from opweave.contract import Arg, Call, Device, Step, Stream
from opweave.runtime.host.threads import ThreadPool, pool_of
from opweave.tracing import TRACE
from opweave_cpu.threads import CURRENT, MOST, THREADS, set_up_numpy

if TYPE_CHECKING:
    from opweave_cpu.tiles import Array

__all__ = ["CpuStream"]


class CpuStream(Stream):
    """Runs kernels in the calling thread; big ones share their work with the threads of the process.

    Args:
        threads: how many threads its work uses, or the pool that they come from; ``None``: what the backend's
            ``set_threads`` says. The limit of BLAS belongs to the process: a run sets it when it begins, if it
            differs from that of the run before.
    """

    def __init__(self, device: Device, threads: int | ThreadPool | None = None) -> None:
        super().__init__(device)
        self._pool, self._threads = pool_of(threads)
        # Overflow gives infinities and 0/0 NaN on every device; NumPy alone would warn. Its error state is a context
        # variable, and entering a context that has it costs a tenth of what `np.errstate` does.
        self._context: Final = copy_context()
        self._context.run(set_up_numpy)
        self._entered = False
        self.foreign = False

    @property
    def threads(self) -> int:
        """How many threads its work uses."""
        return self._threads or THREADS.default or max(THREADS.cores, MOST.value)

    def keep_context(self) -> None:
        """From now on run calls with the caller's context variables, which a Python function among them may read."""
        self.foreign = True

    def decode_rows(self, w: Arg, rows: slice, values: Arg) -> Call | None:
        """The call that decodes rows of quantized weights, or converts those of a half type, into the first rows of
        ``values`` (f32, dense); ``None`` where NumPy is the fastest way."""
        return None

    def bind_rows(self, step: Step) -> Call | None:
        """The call for a bound step over rows (softmax, or its gradient) that is a part of a kernel; ``None`` where
        NumPy is the fastest way."""
        return None

    def cos_and_sin(self, positions: Arg, steps: Sequence[float], magnitude: float, cos: Arg, sin: Arg) -> Call | None:
        """The call that computes cosines and sines, times ``magnitude``, of the angles by which positions are rotated;
        ``None`` where NumPy is the fastest way.

        Args:
            positions: i32 or i64, of the shape of the others, repeated along the last axis.
            steps: for each element of the last axis the angle of position 1.
            cos, sin: what is computed, of one layout.
        """
        return None

    def rotate(self, args: Sequence[Arg]) -> Call | None:
        """The call that rotates pairs of elements; ``None`` where NumPy is the fastest way.

        Args:
            args: the first and the second elements of the pairs, the cosines and sines of their angles, and where the
                results go, all of one shape.
        """
        return None

    def transpose(self, out: Arg, x: Arg) -> Call | None:
        """The call that copies ``x`` to dense ``out`` of the same type, whose last axis is not the one along which the
        elements of ``x`` lie side by side; ``None`` where NumPy is the fastest way."""
        return None

    def join(self, out: Arg, srcs: Sequence[Arg], axis: int) -> Sequence[Call] | None:
        """The calls that put operands of one type side by side along an axis of ``out``; ``None`` where NumPy is the
        fastest way."""
        return None

    def pick(self, out: Arg, table: Arg, ids: Arg) -> Call | None:
        """The call that copies the rows of a table that ``ids`` names, all of them in range, to ``out``; ``None`` where
        NumPy is the fastest way."""
        return None

    def multiply(self, parts: Sequence[tuple[Array, Array, Array]]) -> Call | None:
        """The call that computes ``out = a @ b`` for each ``(a, b, out)``, arrays of one type, in a thread each;
        ``None`` where threads of Python do that."""
        return None

    def put(self, out: Arg, ids: Arg, rows: Arg) -> Call | None:
        """The call that copies ``rows`` to the rows of ``out`` that ``ids`` names, all of them in range, the last one
        where it names one twice; ``None`` where NumPy is the fastest way."""
        return None

    def _inlines(self, other: Stream) -> bool:
        return isinstance(other, CpuStream) and other.run_with == self.run_with and (self.foreign or not other.foreign)

    @property
    def run_with(self) -> tuple[Any, ...]:
        """What runs the calls of a plan: streams with the same can run each other's."""
        return cast(MethodType, self._run).__func__, self._threads, self._pool

    def _run(self, calls: Iterator[Call]) -> None:
        if self._pool is None:
            self._make(calls)
            return
        with self._in_pool():
            self._make(calls)

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        """Within, this thread uses the threads of the stream."""
        before = CURRENT.pool
        with self._pool or nullcontext():
            CURRENT.pool = self._pool or before
            try:
                yield
            finally:
                CURRENT.pool = before

    def _make(self, calls: Iterator[Call]) -> None:
        try:
            THREADS.begin_run()
            if self.foreign or self._entered or TRACE.listening:
                with np.errstate(all="ignore"):
                    _make(calls)
                return
            self._entered = True
            try:
                self._context.run(_make, calls)
            finally:
                self._entered = False
        finally:
            THREADS.end_run()


def _make(calls: Iterator[Call]) -> None:
    # A loop in Python, though there are faster ones: between two of its calls interrupts arrive and threads change.
    for call in calls:
        call()
