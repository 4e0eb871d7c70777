"""Parameters of a stream, and torch's settings while it runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from opweave.errors import PluginError
from opweave.runtime.host.threads import ThreadPool, pool_of

__all__ = ["THREADS", "DefaultThreads", "Options", "modes"]


class Options(NamedTuple):
    """Parameters of a stream.

    Attributes:
        threads: of torch's kernels for the CPU; ``None``: as the backend's ``set_threads`` says, else as torch is set.
        pool: the thread pool given as ``threads``: runs begin on its processors, and none begins while it is paused.
        deterministic: only algorithms that give the same bits each time; an operation without one fails.
        compile: runs of pointwise operations become one kernel each, by ``torch.compile``.
        graphs: plans are captured as CUDA graphs.
    """

    threads: int | None = None
    deterministic: bool = False
    compile: bool = False
    graphs: bool = True
    pool: ThreadPool | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any], known: Collection[str]) -> Options:
        """Checked parameters.

        Raises:
            TypeError: a name that is not among ``known``.
            PluginError: a value that makes no sense.
        """
        unknown = sorted(set(params) - set(known))
        if unknown:
            raise TypeError(f"unknown parameters {unknown}; there are {sorted(known)}")
        given = {name: value for name, value in params.items() if value is not None}
        pool, count = pool_of(given.pop("threads", None))
        for name, value in given.items():
            if value not in (True, False):
                raise PluginError(f"{name} must be true or false, not {value!r}")
        return cls(threads=count, pool=pool, **{name: bool(value) for name, value in given.items()})


class DefaultThreads:
    """Threads of streams that were opened without ``threads``; ``None``: torch's own setting is left alone."""

    default: int | None = None


THREADS: Final = DefaultThreads()


@contextmanager
def modes(threads: int | None, deterministic: bool) -> Iterator[None]:
    """Set torch's threads and determinism, and afterwards restore what was found. Both are settings of the process."""
    found = torch.get_num_threads()
    if threads not in (None, found):
        torch.set_num_threads(threads)
    try:
        if deterministic:
            with _deterministic():
                yield
        else:
            yield
    finally:
        if threads not in (None, found):
            torch.set_num_threads(found)


@contextmanager
def _deterministic() -> Iterator[None]:
    utils, cudnn = torch.utils.deterministic, torch.backends.cudnn
    found, fill, benchmark = torch.get_deterministic_debug_mode(), utils.fill_uninitialized_memory, cudnn.benchmark
    # `use_deterministic_algorithms` means the same, but first loads torch's compiler, which takes seconds.
    torch.set_deterministic_debug_mode("error")
    # Kernels write whole results: filling memory before would cost a pass and change nothing.
    utils.fill_uninitialized_memory, cudnn.benchmark = False, False
    try:
        yield
    finally:
        utils.fill_uninitialized_memory, cudnn.benchmark = fill, benchmark
        torch.set_deterministic_debug_mode(found)


CUBLAS_VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"


def check_cublas() -> None:
    """Check that cuBLAS was set to be deterministic, which is only possible before its first use.

    Raises:
        PluginError: it was not.
    """
    if os.environ.get(CUBLAS_VARIABLE) not in (":4096:8", ":16:8"):
        raise PluginError(
            "deterministic products on CUDA need cuBLAS to have a workspace of fixed size",
            remedy=f"set {CUBLAS_VARIABLE}=:4096:8 before the process starts",
        )
