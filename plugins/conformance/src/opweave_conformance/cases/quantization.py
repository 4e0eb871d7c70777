"""Cases of quantized values: encoded, decoded, moved, written into states."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.graph.dtypes import DTYPES
from opweave.graph.tensor import node
from opweave.ops.encoding import ENCODED, WEIGHED
from opweave.ops.quantization import QUANTIZE
from opweave_conformance.case import Case, Operand, case


def cases() -> Iterator[Case]:
    for name in ENCODED:
        yield from _encoding(name)
    for name, t in DTYPES.items():
        if t.is_quantized:
            yield from _decoding(name, t.block)
            yield from _moving(name, t.block)


def _encoding(name: str) -> Iterator[Case]:
    n = DTYPES[name].block
    for shape in ((n,), (1, n), (5, 3 * n), (2, 3, 2 * n)):
        yield case("quantize", Operand(shape), tag=name, dtype=name)
    for values in ("ties", "halves", "positive", "negative", "large"):
        yield case("quantize", Operand((4, 2 * n), values=values), tag=f"{name}-{values}", dtype=name)
    for layout in ("offset", "rows", "sliced", "transposed", "broadcast"):
        yield case("quantize", Operand((5, 2 * n), layout=layout), tag=name, dtype=name)
    if name in WEIGHED:
        for shape in ((n,), (3, 2 * n)):
            weights = Operand(shape, values="positive")
            attrs = {"dtype": DTYPES[name]}
            yield case("quantize", Operand(shape), weights, tag=f"{name}-weighted",
                       build=lambda x, w, attrs=attrs: node(QUANTIZE, (x, w), attrs))  # fmt: skip


def _decoding(name: str, n: int) -> Iterator[Case]:
    for shape in ((n,), (1, n), (5, 3 * n), (2, 3, 2 * n)):
        yield case("dequantize", Operand(shape, name))
    yield case("dequantize", Operand((5, 2 * n), name, values="special"))
    for layout in ("offset", "rows"):
        yield case("dequantize", Operand((5, 2 * n), name, layout))
    turned = Operand((3, 4, 2 * n), name)
    yield case("dequantize", turned, tag="turned", build=lambda x: ops.dequantize(x.transpose(1, 0, 2)))


def _moving(name: str, n: int) -> Iterator[Case]:
    one, two = Operand((3, 2 * n), name), Operand((5, 2 * n), name)
    yield case("concat", one, two, build=lambda *xs: ops.concat(xs, 0))
    yield case("concat", one, Operand((3, n), name), tag="last", build=lambda *xs: ops.concat(xs, 1))
    yield case("concat", one, Operand((4, 2 * n), name, "rows"), build=lambda *xs: ops.concat(xs, 0))
    for state in (Operand((7, 2 * n), name, state=True), Operand((7, 2 * n), name, "rows", state=True)):
        ids = Operand((5,), "i32", values="ids", high=7)
        yield case("index_copy", state, ids, two)
        yield case("assign", state, Operand((7, 2 * n), name))
    inner = Operand((4, 3, n), name, state=True)
    yield case("index_copy", inner, Operand((2,), "i64", values="ids", high=4), Operand((2, 3, n), name))
