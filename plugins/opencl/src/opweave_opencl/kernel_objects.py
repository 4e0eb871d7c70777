"""Making pyopencl's kernel objects and setting their arguments, without the cost of what opweave does not use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["KNOWN", "new_kernel", "set_bytes"]

KNOWN: Final = (2025, 1), (2026, 1)
"""First and last release of pyopencl with which the faster way of `new_kernel` was tried."""

_MAKING: Final = Lock()


def new_kernel(program: cl.Program, name: str) -> cl.Kernel:
    """A kernel object of its own, to which arguments can be bound.

    For each kernel object, pyopencl reads from a database on disk a function that sets arguments when the kernel is
    called: ``cl.Kernel`` takes 186 µs, ``Kernel.clone`` 164 µs, ``Program.all_kernels`` 312 µs (pyopencl 2026.1, an AMD
    EPYC with Intel's driver). Opweave never calls kernels, it enqueues them. So in the `KNOWN` releases pyopencl's
    generator of these functions is replaced, while a kernel is made, by one that remembers them: 4.6 µs. In other
    releases kernels are made by ``cl.Kernel``.
    """
    return _maker()(program, name)


@cache
def _maker() -> Callable[[cl.Program, str], cl.Kernel]:
    import pyopencl as cl

    if not KNOWN[0] <= cl.VERSION[:2] <= KNOWN[1]:
        return cl.Kernel
    invoker: Any = import_module("pyopencl.invoker")
    with _MAKING:
        generate = invoker.generate_enqueue_and_set_args
    known: dict[tuple[str, int, int], Any] = {}

    def remembered(name: str, passed: int, args: int, types: Any, *rest: Any, **named: Any) -> Any:
        if types is not None:  # of a kernel that another thread makes, not opweave
            return generate(name, passed, args, types, *rest, **named)
        key = (name, passed, args)
        if key not in known:
            known[key] = generate(name, passed, args, types, *rest, **named)
        return known[key]

    def make(program: cl.Program, name: str) -> cl.Kernel:
        with _MAKING:
            invoker.generate_enqueue_and_set_args = remembered
            try:
                return cl.Kernel(program, name)
            finally:
                invoker.generate_enqueue_and_set_args = generate

    return make


def set_bytes(kernel: cl.Kernel, index: int, value: bytes) -> None:
    """Set an argument that is passed by value."""
    # ``set_arg`` tries other sorts of arguments first, by exceptions: 6 µs instead of 0.1.
    getattr(kernel, "_set_arg_buf", kernel.set_arg)(index, value)
