"""Cases of random numbers: keys and counters of both signs, and numbers of blocks that are not whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, SIZES, Case, Operand, case

WORD: Final = Operand((), "i64")
MANY: Final = (200_003,)
"""More than any tile holds."""


def cases() -> Iterator[Case]:
    for build in (ops.uniform, ops.normal):
        for dtype in FLOATS:
            for shape in (*SIZES, (2,), MANY):
                tag = f"{dtype}-{'x'.join(map(str, shape)) or 'scalar'}"
                numbers = partial(build, shape, dtype=dtype)
                yield case(build.__name__, WORD, WORD, build=numbers, tag=tag)
            yield case(
                build.__name__, Operand((2,), "i64"), build=partial(_of_views, build, dtype), tag=f"{dtype}-offset"
            )


def _of_views(build: Callable[..., Tensor], dtype: str, words: Tensor) -> Tensor:
    return build((9,), words[1], words[0], dtype)
