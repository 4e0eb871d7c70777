"""Cases of random numbers: keys and counters of both signs, and numbers of blocks that are not whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, SIZES, Case, Operand, case

WORD: Final = Operand((), "i64")
MANY: Final = (200_003,)
"""More than any tile holds."""


def cases() -> Iterator[Case]:
    for build in (ops.uniform, ops.normal):
        for dtype in FLOATS:
            for shape in (*SIZES, (2,), MANY):
                tag = f"{dtype}-{'x'.join(map(str, shape)) or 'scalar'}"
                yield case(build.__name__, lambda k, c, b=build, s=shape, t=dtype: b(s, k, c, t), WORD, WORD, tag=tag)
            yield case(build.__name__, lambda k, b=build, t=dtype: b((9,), k[1], k[0], t), Operand((2,), "i64"),
                       tag=f"{dtype}-offset")  # fmt: skip
