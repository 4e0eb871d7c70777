"""`Operators`: Python's operators on tensors, as NumPy's, and the most used operations as methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn

from opweave.errors import BoundsError, DTypeError, ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DTypeLike
from opweave.graph.foreign import Symbolic
from opweave.graph.layout import normalize_axis

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor

__all__ = ["Operators"]


Operator = Callable[[Any, Any], "Tensor"]


def _both_ways(op: str) -> tuple[Operator, Operator]:
    """An operator that builds the operation ``op``, and the one with its operands exchanged."""
    return lambda self, other: opdef.build(op, self, other), lambda self, other: opdef.build(op, other, self)


class Operators(Symbolic):
    """The operators and methods of `Tensor`. Each calls the builder that the table of operations has by its name, so
    that this module need not import ``opweave.ops``."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def ndim(self) -> int: ...

        def describe(self) -> str: ...

    __array_ufunc__ = None  # NumPy's operators then return NotImplemented, and Python calls those of the tensor

    __add__, __radd__ = _both_ways("add")
    __sub__, __rsub__ = _both_ways("sub")
    __mul__, __rmul__ = _both_ways("mul")
    __truediv__, __rtruediv__ = _both_ways("div")
    __matmul__, __rmatmul__ = _both_ways("matmul")
    __pow__, __rpow__ = _both_ways("pow")
    __lt__, __gt__ = _both_ways("less")
    __le__, __ge__ = _both_ways("less_equal")

    def __neg__(self) -> Tensor:
        return opdef.build("neg", self)

    def __abs__(self) -> Tensor:
        return opdef.build("abs", self)

    def __getitem__(self, key: Any) -> Tensor:
        return opdef.build("slice", self, key)

    # Tensors are keys of dictionaries: they are equal to themselves only. `!=` is the opposite, by Python's default.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Operators):
            return False
        if isinstance(other, Number) or hasattr(other, "__array__"):
            raise DTypeError(
                f"== and != tell which tensor something is, and {type(other).__name__} is none; to compare the values "
                f"of {self!r} use ow.equal and ow.not_equal"
            )
        return NotImplemented

    # --- views and the most used operations as methods --------------------------------------------------------------

    @property
    def T(self) -> Tensor:  # noqa: N802 - NumPy's name
        """All axes reversed."""
        return opdef.build("transpose", self)

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """The axes in the given order, reversed without one; NumPy's ``transpose``."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return opdef.build("transpose", self, order or None)

    def swapaxes(self, a: int, b: int) -> Tensor:
        """Two axes exchanged; NumPy's ``swapaxes``."""
        order = list(range(self.ndim))
        try:
            i, j = normalize_axis(a, self.ndim), normalize_axis(b, self.ndim)
        except BoundsError as error:
            raise BoundsError(f"swapaxes: {error}; the operand is {self.describe()}") from None
        except TypeError:
            raise ShapeError(f"swapaxes: axes are integers, not {a!r:.40} and {b!r:.40}; {self.describe()}") from None
        order[i], order[j] = j, i
        return opdef.build("transpose", self, order)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one length may be -1."""
        return opdef.build("reshape", self, shape[0] if len(shape) == 1 else shape)

    def broadcast_to(self, shape: Any) -> Tensor:
        """The value seen in a larger shape, as ``ow.broadcast_to``."""
        return opdef.build("broadcast_to", self, shape)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """The value converted to another type, as ``ow.cast``."""
        return opdef.build("cast", self, dtype)

    def contiguous(self) -> Tensor:
        """The value packed row-major; itself if it already is."""
        return opdef.build("contiguous", self)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The sum over one, several or all axes, as ``ow.sum``."""
        return opdef.build("sum", self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The mean over one, several or all axes, as ``ow.mean``."""
        return opdef.build("mean", self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The largest element over one, several or all axes, as ``ow.max``."""
        return opdef.build("max", self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The index of the largest element along an axis, or in the flattened tensor, as ``ow.argmax``."""
        return opdef.build("argmax", self, axis, keepdims)

    # --- what looks like Python but would mislead -------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise DTypeError(f"{self!r} is symbolic and has no truth value; run a program and test its result")

    def __iter__(self) -> Iterator[Tensor]:
        raise DTypeError(f"{self!r} is symbolic and does not iterate; use t[0], t[1], ... or ow.split(t, ...)")

    def __len__(self) -> NoReturn:
        raise DTypeError(f"use {self!r}.shape[0] for the length of its first axis")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DTypeError(f"{self!r} is symbolic and holds no values; run a program: ow.compile(tensor)(...)")

    def __float__(self) -> NoReturn:
        raise DTypeError(f"{self!r} is symbolic and holds no number; run a program: ow.compile(tensor)(...)")
