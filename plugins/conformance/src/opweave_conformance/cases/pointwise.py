"""Cases of the operations that work element by element on operands of one type, made of the examples in their
definitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, get_args

from opweave.errors import UnknownNameError
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS, OpDef
from opweave.graph.tensor import Tensor, node
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, SIZES, STRIDED, Case, Operand, Values, case

_TYPES: Final = (*FLOATS, *INTS, "bool")


def elementwise(
    op: str, sources: int, dtypes: Iterable[str], values: Values = "normal", **given: Any
) -> Iterator[Case]:
    """Every dtype in all sizes, and in all layouts: of all operands at once, and of each alone.

    Args:
        given: further arguments of `case`.
    """
    for dtype in dtypes:
        for shape in SIZES:
            yield case(op, *[Operand(shape, dtype, values=values)] * sources, **given)
        for shape in STRIDED:
            for layout in LAYOUTS:
                odd = Operand(shape, dtype, layout, values)
                even = Operand(shape, dtype, values=values)
                yield case(op, *[odd] * sources, **given)
                if sources == 2:
                    yield case(op, odd, even, **given)
                    yield case(op, even, odd, **given)
        if as_dtype(dtype).is_float:
            yield case(op, *[Operand((67,), dtype, values="special")] * sources, **given)


def _node(op: OpDef, *sources: Tensor) -> Tensor:
    return node(op, sources, {})


def of_examples(op: OpDef) -> Iterator[Case]:
    """The cases of an operation that has examples; of the others none.

    Raises:
        UnknownNameError: an example with values of no known kind.
    """
    build = op.build or partial(_node, op)
    for example in op.examples:
        values: Any = example.values
        if values not in get_args(Values):
            raise UnknownNameError(f"kind of values in an example of {op.name}", values, get_args(Values))
        dtypes = [t for t in _TYPES if t in example.dtypes.split()]
        yield from elementwise(op.name, op.sources, dtypes, values, build=build, tag=example.tag, **example.attrs)


def cases() -> Iterator[Case]:
    for op in OPS.values():
        if op.family != "third-party":
            yield from of_examples(op)
