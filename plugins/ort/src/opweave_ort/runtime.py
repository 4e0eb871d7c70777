"""What the sessions of the process share: settings, their threads, and one arena for what they need while they run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, Final

import onnxruntime

from opweave.contract import check_threads
from opweave.errors import Unavailable
from opweave.runtime.host.cores import usable_cores
from opweave.runtime.host.threads import ThreadPool, pool_of

__all__ = ["PACK_VARIABLE", "POOL_VARIABLE", "RUNTIME", "Runtime", "allocated", "flag"]


PACK_VARIABLE: Final = "OPWEAVE_ORT_PACK"
"""Environment variable: ``0`` forbids copies of weights in another form, which make products faster."""

POOL_VARIABLE: Final = "OPWEAVE_ORT_SHARED_POOL"
"""Environment variable: ``1`` lets all sessions share one pool of threads."""


def flag(variable: str, default: bool) -> bool:
    """An environment variable that is 0 or 1; raises `Unavailable` for anything else."""
    value = os.environ.get(variable) or str(int(default))
    if value not in ("0", "1"):
        raise Unavailable(f"{variable} is 0 or 1, not {value!r}", remedy=f"set {variable} to 0 or 1, or unset it")
    return value == "1"


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    )


def allocated() -> int:
    """Bytes in use that this process has allocated with ``malloc``; 0 where the C library does not tell."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    ask.restype = _MallocInfo
    found = ask()
    return int(found.hblkhd + found.uordblks)


def _end_without_destructors() -> None:
    """In a forked child: let the process end before ONNX Runtime's own objects are destroyed.

    At exit, ONNX Runtime would wait forever for threads which the child does not have. Functions that are registered
    last with the C library are called first; this one ends the process with its status.
    """
    library = ctypes.CDLL(None)
    with suppress(AttributeError):  # only the GNU C library has it
        library.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.on_exit(ctypes.cast(library["_exit"], ctypes.c_void_p), None)


class Runtime:
    """ONNX Runtime's environment in this process.

    Attributes:
        threads: how many threads sessions get that are made from now on; ``None``: one for each usable core.
        shared: whether all sessions share one pool of threads (``OPWEAVE_ORT_SHARED_POOL=1``). ONNX Runtime then
            refuses to make any session of this process that wants a pool of its own, also those of other libraries,
            which is why it is off by default.
        arena: bytes by which the arena has grown, as far as the C library tells.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self.shared = False
        self.arena = 0
        self._started = False
        self._lock = Lock()

    def set_threads(self, n: int | None) -> None:
        """See `OrtBackend.set_threads`."""
        self.threads = None if n is None else check_threads(n)

    def measured(self, run: Callable[[], object]) -> int:
        """Run a session, and count by how many bytes the arena grows. A session takes from it when it first runs, and
        keeps nothing for itself: later sessions use the same memory."""
        before = allocated()
        run()
        grown = max(0, allocated() - before)
        with self._lock:
            self.arena += grown
        return grown

    @property
    def most_threads(self) -> int:
        """Threads of a session that has use for them."""
        return self.threads or usable_cores().usable

    def options(self, threads: int | ThreadPool) -> Any:
        """Session options, for sessions of so many threads, or as many as a pool has, on its processors.

        Threads spin between the operators of a run, which hands over work in less than a microsecond, and stop when the
        run ends: if they went on, they would take cores that the threads of other libraries need.
        """
        self._start()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.use_env_allocators", "1")
        if not flag(PACK_VARIABLE, True):
            options.add_session_config_entry("session.disable_prepacking", "1")
        if self.shared:
            options.use_per_session_threads = False
        else:
            pool, count = pool_of(threads)
            options.intra_op_num_threads = count or self.most_threads
            if pool is not None and pool.affinity is not None and pool.size > 1:
                # One list for each thread that a session starts, counted from 1.
                processors = ",".join([str(n + 1) for n in sorted(pool.affinity)])
                lists = ";".join([processors] * (pool.size - 1))
                options.add_session_config_entry("session.intra_op_thread_affinities", lists)
            options.inter_op_num_threads = 1
        return options

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self.shared = flag(POOL_VARIABLE, False)
            if self.shared:
                onnxruntime.set_global_thread_pool_sizes(self.most_threads, 1)
            memory = onnxruntime.OrtMemoryInfo(
                "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
            )
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_end_without_destructors)
            onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(0, -1, -1, -1))
            self._started = True


RUNTIME: Final = Runtime()
