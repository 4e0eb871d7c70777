"""`Case`: an operation with its operands, and how the node is built from them.

A case says nothing about devices. A device may refuse a case; if it accepts it, the result has to be correct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from opweave import ops
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import Tensor, input, new_leaf

__all__ = [
    "FLOATS", "INTS", "LAYOUTS", "SIZES", "STRIDED", "Case", "Layout", "Operand", "Values", "case", "tag_of",
]  # fmt: skip

Layout = Literal["contiguous", "offset", "rows", "sliced", "transposed", "broadcast"]
"""The layout of an operand, a view of its leaf: ``contiguous``, the leaf itself; ``offset``, a contiguous slice behind
the leaf's first element; ``rows``, contiguous rows with gaps between them; ``sliced``, gaps along every axis;
``transposed``; ``broadcast``, a first axis of length 1 that is repeated with stride 0."""

Values = Literal[
    "normal",
    "positive",
    "negative",
    "fraction",
    "large",
    "special",
    "ties",
    "alike",
    "ends",
    "halves",
    "ids",
    "mask",
    "hidden",
]
"""What a leaf is filled with: ``normal`` values around 0; ``positive`` and ``negative`` ones; ``fraction``: between 0
and 1; ``special``: normal ones with NaN, infinities and zeros among them, or quantized blocks with NaN and infinities
among their scales; ``large``: normal ones around 2^15, where types have few digits left; ``ties``: few different
values; ``alike``: few different ones, with NaN and both zeros among those of floats; ``ends``: integers of the whole
range of their type, its ends among them; ``halves``: multiples of 1/2; ``ids``: distinct integers below ``high`` as far
as there are enough; ``mask``: 0 and -inf, never all -inf in a row; ``hidden``: the
same, but for every other row, which is -inf as a whole: rows of NaN in what is masked so."""


class Operand(NamedTuple):
    """One operand of a case.

    Attributes:
        shape, dtype: of the operand.
        layout: its layout in memory.
        values: what the leaf is filled with.
        high: for ids, the number of rows that they index.
        state: the leaf is a state, which the node writes.
    """

    shape: Shape
    dtype: str = "f32"
    layout: Layout = "contiguous"
    values: Values = "normal"
    high: int = 0
    state: bool = False

    def tensor(self, name: str) -> Tensor:
        """The operand over a new leaf named ``name``."""
        shape = self.shape
        match self.layout:
            case "contiguous":
                return self._leaf(name, shape)
            case "offset":
                return self._leaf(name, (shape[0] + 2, *shape[1:]))[1:-1]
            case "rows":
                return self._leaf(name, (2 * shape[0] + 1, *shape[1:]))[1::2]
            case "sliced":
                root = self._leaf(name, (*[n + 2 for n in shape[:-1]], 2 * shape[-1] + 1))
                return root[(*[slice(1, n + 1) for n in shape[:-1]], slice(1, None, 2))]
            case "transposed":
                return self._leaf(name, shape[::-1]).T
            case "broadcast":
                return self._leaf(name, (1, *shape[1:])).broadcast_to(shape)

    def _leaf(self, name: str, shape: Shape) -> Tensor:
        if self.state:
            return new_leaf(Leaf("state", name), shape, as_dtype(self.dtype))
        return input(name, shape, self.dtype)


class Case(NamedTuple):
    """An operation on operands.

    Attributes:
        op: its name.
        id: unique; op, dtypes, layouts and shape in short.
        operands: its operands.
        build: makes the node from the operand tensors; exactly one node of its graph is not a view.
    """

    op: str
    id: str
    operands: tuple[Operand, ...]
    build: Callable[..., Tensor]

    def __str__(self) -> str:
        return self.id

    def tensors(self) -> tuple[Tensor, ...]:
        """The operands over new leaves ``x0``, ``x1``, ..."""
        return tuple([operand.tensor(f"x{i}") for i, operand in enumerate(self.operands)])


FLOATS: Final = ("f32", "f16", "bf16", "f64")
INTS: Final = ("i32", "i64", "i16", "i8", "u8")
SIZES: Final[tuple[Shape, ...]] = ((1,), (7,), (64,), (1025,), (), (3, 5), (16, 128), (2, 3, 33), (2, 3, 4, 5))
"""One element, odd, powers of two and beside them, no axis and several."""
LAYOUTS: Final[tuple[Layout, ...]] = ("offset", "rows", "sliced", "transposed", "broadcast")
STRIDED: Final[tuple[Shape, ...]] = ((5, 17), (2, 3, 8))


def _short(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def tag_of(options: dict[str, Any]) -> str:
    """Options as the end of an id."""
    return "-".join(f"{name}{value}".replace(" ", "") for name, value in options.items())


def case(
    op: str, *operands: Operand, build: Callable[..., Tensor] | None = None, tag: str = "", **options: Any
) -> Case:
    """A case whose id tells op, dtypes, layouts, shapes and kinds of values.

    Args:
        build: the function that makes the node; ``None``: the one of ``opweave.ops`` that is named like the op.
        tag: the end of the id.
        options: arguments of ``build`` by name; operands among them follow the others in `Case.operands`.
    """
    build = getattr(ops, op) if build is None else build
    named = {name: value for name, value in options.items() if isinstance(value, Operand)}
    if options:
        build = _with_options(build, len(operands), tuple(named), {k: v for k, v in options.items() if k not in named})
    operands += tuple(named.values())
    parts = [op, *dict.fromkeys(o.dtype for o in operands)]
    if any(o.layout != "contiguous" for o in operands):
        parts.append("+".join(o.layout for o in operands))
    told = ("large", "special", "ties", "alike", "ends", "halves", "mask")
    kinds = [v for v in dict.fromkeys(o.values for o in operands) if v in told]
    parts += [",".join(_short(o.shape) for o in operands), *kinds, tag]
    return Case(op, "-".join(filter(None, parts)), operands, build)


def _with_options(
    function: Callable[..., Tensor], count: int, names: tuple[str, ...], options: dict[str, Any]
) -> Callable[..., Tensor]:
    """``function`` of tensors, of which those behind the first ``count`` are passed by name, with further options."""
    return lambda *xs: function(*xs[:count], **dict(zip(names, xs[count:], strict=True)), **options)
