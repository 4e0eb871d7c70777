"""Cases of the operations on rows: softmax and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, LAYOUTS, STRIDED, Case, Operand, case, with_options
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor

ROWS: Final[tuple[Shape, ...]] = ((1,), (7,), (1, 1), (3, 5), (4, 64), (2, 257), (129, 3), (2, 3, 33))
HEADS: Final[tuple[Shape, ...]] = ((1, 1, 1), (4, 5, 7), (3, 2, 65), (2, 6, 3, 8), (12, 1, 33))
GROUPS: Final[tuple[tuple[Shape, int], ...]] = (
    ((1, 1), 1), ((3, 8), 4), ((2, 6, 5), 1), ((2, 6, 5), 3), ((2, 6, 5), 6), ((1, 32, 9, 7), 8), ((2, 4, 3, 5, 2), 2),
)  # fmt: skip


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ROWS:
            x = Operand(shape, dtype)
            row = Operand(shape[-1:], dtype)
            yield case("softmax", ops.softmax, x)
            yield case("softmax", with_options(ops.softmax, scale=0.125), x, tag="scaled")
            for mask in dict.fromkeys((shape, shape[-2:], shape[-1:], (*shape[:-1], 1))):
                yield case("softmax", _masked, x, Operand(mask, dtype, values="mask"))
            yield case("layer_norm", ops.layer_norm, x)
            yield case("layer_norm", ops.layer_norm, x, row)
            yield case("layer_norm", ops.layer_norm, x, row, row)
            yield case("rms_norm", ops.rms_norm, x)
            yield case("rms_norm", ops.rms_norm, x, row)
            yield case("log_softmax", ops.log_softmax, x)
            yield case("l2_norm", ops.l2_norm, x)
        for shape in HEADS:
            x, sinks = Operand(shape, dtype), Operand(shape[-3:-2], dtype)
            yield case("head_softmax", _sunk, x, sinks)
            for mask in (shape, shape[-2:]):
                m = Operand(mask, dtype, values="mask")
                yield case("head_softmax", _sunk, x, sinks, m)
                yield case("head_softmax", _sloped, x, sinks, Operand(mask, dtype), tag="sloped")
            absent = Operand(sinks.shape, dtype, values="mask")
            yield case("head_softmax", _sloped, x, absent, m, tag="sloped")
        for shape, groups in GROUPS:
            x, each = Operand(shape, dtype), Operand(shape[1:2], dtype)
            build = with_options(ops.group_norm, groups=groups)
            yield case("group_norm", build, x, tag=f"groups{groups}")
            build = with_options(_weighted, groups=groups)
            yield case("group_norm", build, x, each, tag=f"groups{groups}")
            yield case("group_norm", build, x, each, each, tag=f"groups{groups}")
        for layout in LAYOUTS:
            for shape in STRIDED:
                x = Operand(shape, dtype, layout)
                row = Operand(shape[-1:], dtype)
                yield case("softmax", ops.softmax, x)
                yield case("softmax", _masked, x, Operand(shape, dtype, layout, "mask"))
                yield case("layer_norm", ops.layer_norm, x, row, row)
                yield case("rms_norm", ops.rms_norm, x, row)
                yield case("log_softmax", ops.log_softmax, x)
                yield case("l2_norm", ops.l2_norm, x)
            x, sinks = Operand((2, 3, 8), dtype, layout), Operand((2,), dtype)
            yield case("head_softmax", _sloped, x, sinks, Operand((2, 3, 8), dtype))
            yield case("head_softmax", _sloped, Operand((2, 3, 8), dtype), sinks, x, tag="mask")
            x, each = Operand((2, 6, 5), dtype, layout), Operand((6,), dtype)
            yield case("group_norm", with_options(_weighted, groups=2), x, each, each)
        laid = Operand((3,), dtype, "sliced")
        yield case("head_softmax", _sunk, Operand((3, 2, 5), dtype), laid)
        laid = Operand((6,), dtype, "sliced")
        yield case("group_norm", with_options(_weighted, groups=2), Operand((2, 6, 5), dtype), laid, laid)
        yield case("layer_norm", with_options(ops.layer_norm, eps=0.5), Operand((3, 5), dtype), tag="eps")
        yield case("rms_norm", with_options(ops.rms_norm, eps=0.5), Operand((3, 5), dtype), tag="eps")
        yield case("softmax", with_options(ops.softmax, axis=0), Operand((5, 17), dtype), tag="axis0")
        special = Operand((9, 12), dtype, values="special")
        large = Operand((9, 12), dtype, values="large")
        yield case("softmax", ops.softmax, large)
        yield case("log_softmax", ops.log_softmax, large)
        yield case("softmax", ops.softmax, special)
        yield case("log_softmax", ops.log_softmax, special)
        yield case("l2_norm", ops.l2_norm, special)
        yield case("l2_norm", with_options(ops.l2_norm, eps=100.0), Operand((3, 5), dtype), tag="eps")
        yield case("l2_norm", with_options(ops.l2_norm, axis=0), Operand((5, 17), dtype), tag="axis0")
        yield case("log_softmax", with_options(ops.log_softmax, axis=0), Operand((5, 17), dtype), tag="axis0")


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return ops.softmax(x, mask=mask, scale=0.5)


def _sunk(x: Tensor, sinks: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.softmax(x, mask=mask, scale=0.5, sinks=sinks)


def _sloped(x: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    return ops.softmax(x, mask=mask, scale=0.5, max_bias=8.0, sinks=sinks)


def _weighted(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, groups: int) -> Tensor:
    return ops.group_norm(x, groups, weight, bias)
