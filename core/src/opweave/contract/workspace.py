"""Scratch memory of a kernel: a number of bytes, or named arrays whose types and shapes the kernel states once.

The core adds up their sizes, plans the memory, and hands the kernel one operand for each array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract.space import round_up
from opweave.contract.step import Arg
from opweave.errors import LifetimeError, OpweaveError
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides, nbytes

if TYPE_CHECKING:
    from opweave.graph.dtypes import DTypeLike

__all__ = ["Arrays", "Workspace", "array_args", "workspace_bytes"]

Arrays = Mapping[str, "tuple[DTypeLike, Sequence[int]]"]
"""name -> dtype and shape. The name is that of the kernel's keyword argument."""

Workspace = int | Arrays
"""What ``workspace=`` of a kernel gives for a step: bytes, or named arrays."""

ALIGNMENT: Final = 64
"""Bytes at which each array begins: a line of most caches."""


def workspace_bytes(wanted: Workspace, op: str) -> int:
    """Bytes of scratch memory that hold what a kernel of ``op`` wants.

    Raises:
        TypeError: neither a number of bytes nor names with dtypes and shapes.
    """
    if isinstance(wanted, (dict, Mapping)):  # a question to `Mapping` takes longer than all the rest
        try:
            total = 0
            for dtype, shape in wanted.values():
                if shape and min(shape) < 0:
                    raise ValueError(f"negative length in {tuple(shape)}")
                total += round_up(nbytes(tuple(shape), as_dtype(dtype)), ALIGNMENT)
            return total
        except (OpweaveError, TypeError, ValueError) as error:
            raise TypeError(f"workspace= of {op} gives name -> (dtype, shape), not {dict(wanted)!r}: {error}") from None
    if not isinstance(wanted, int) or wanted < 0:
        raise TypeError(f"workspace= of {op} gives a number of bytes or named arrays, not {wanted!r}")
    return wanted


def array_args(wanted: Arrays, scratch: Arg | None) -> dict[str, Arg]:
    """The named arrays as dense operands, one behind the other in ``scratch``, which has `workspace_bytes` bytes.

    Arrays without elements are left out, so that the kernel's parameter keeps its default.
    """
    args: dict[str, Arg] = {}
    buffer, at = (None, 0) if scratch is None else (scratch.buffer, scratch.offset)
    for name, (kind, lengths) in wanted.items():
        dtype, shape = as_dtype(kind), tuple(lengths)
        size = nbytes(shape, dtype)
        if size:
            if scratch is None:
                raise LifetimeError(f"the workspace {name!r} has no memory: the step was compiled without its scratch")
            args[name] = Arg(buffer, at, dtype, shape, dense_strides(shape, dtype))
            at += round_up(size, ALIGNMENT)
    return args
