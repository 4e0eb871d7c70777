"""Cases of the operations on rows: softmax and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.row_gradients import layer_norm_backward, log_softmax_backward, rms_norm_backward, softmax_backward
from opweave_conformance.case import FLOATS, LAYOUTS, STRIDED, Case, Operand, case

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
            yield case("softmax", x)
            yield case("softmax", x, scale=0.125, tag="scaled")
            for mask in dict.fromkeys((shape, shape[-2:], shape[-1:], (*shape[:-1], 1))):
                yield case("softmax", x, mask=Operand(mask, dtype, values="mask"), scale=0.5)
            yield case("softmax", x, mask=Operand(shape, dtype, values="mask"), tag="unscaled")
            yield case("softmax", x, mask=Operand(shape, dtype, values="hidden"), tag="hidden")
            yield case("layer_norm", x)
            yield case("layer_norm", x, row)
            yield case("layer_norm", x, row, row)
            yield case("rms_norm", x)
            yield case("rms_norm", x, row)
            yield case("log_softmax", x)
            yield case("l2_norm", x)
            yield from _gradients(x, row)
        for shape in HEADS:
            x, sinks = Operand(shape, dtype), Operand(shape[-3:-2], dtype)
            yield case("head_softmax", x, sinks, build=_sunk)
            for mask in (shape, shape[-2:]):
                m = Operand(mask, dtype, values="mask")
                yield case("head_softmax", x, sinks, m, build=_sunk)
                hidden = Operand(mask, dtype, values="hidden")
                yield case("head_softmax", x, sinks, hidden, build=_sunk, tag="hidden")
                yield case("head_softmax", x, sinks, Operand(mask, dtype), build=_sloped, tag="sloped")
            absent = Operand(sinks.shape, dtype, values="mask")
            yield case("head_softmax", x, absent, m, build=_sloped, tag="sloped")
        for shape, groups in GROUPS:
            x, each = Operand(shape, dtype), Operand(shape[1:2], dtype)
            yield case("group_norm", x, groups=groups, tag=f"groups{groups}")
            yield case("group_norm", x, weight=each, groups=groups, tag=f"groups{groups}")
            yield case("group_norm", x, weight=each, bias=each, groups=groups, tag=f"groups{groups}")
            yield case("group_norm", x, groups=groups, eps=0.5, tag=f"groups{groups}-eps")
        for layout in LAYOUTS:
            for shape in STRIDED:
                x = Operand(shape, dtype, layout)
                row = Operand(shape[-1:], dtype)
                yield case("softmax", x)
                yield case("softmax", x, mask=Operand(shape, dtype, layout, "mask"), scale=0.5)
                yield case("layer_norm", x, row, row)
                yield case("rms_norm", x, row)
                yield case("log_softmax", x)
                yield case("l2_norm", x)
                yield from _gradients(x, row)
            x, sinks = Operand((2, 3, 8), dtype, layout), Operand((2,), dtype)
            yield case("head_softmax", x, sinks, Operand((2, 3, 8), dtype), build=_sloped)
            yield case("head_softmax", Operand((2, 3, 8), dtype), sinks, x, build=_sloped, tag="mask")
            x, each = Operand((2, 6, 5), dtype, layout), Operand((6,), dtype)
            yield case("group_norm", x, weight=each, bias=each, groups=2)
        laid = Operand((3,), dtype, "sliced")
        yield case("head_softmax", Operand((3, 2, 5), dtype), laid, build=_sunk)
        laid = Operand((6,), dtype, "sliced")
        yield case("group_norm", Operand((2, 6, 5), dtype), weight=laid, bias=laid, groups=2)
        yield case("layer_norm", Operand((3, 5), dtype), eps=0.5, tag="eps")
        yield case("rms_norm", Operand((3, 5), dtype), eps=0.5, tag="eps")
        yield case("softmax", Operand((5, 17), dtype), axis=0, tag="axis0")
        special = Operand((9, 12), dtype, values="special")
        large = Operand((9, 12), dtype, values="large")
        yield case("softmax", large)
        yield case("log_softmax", large)
        yield case("softmax", special)
        yield case("log_softmax", special)
        yield case("l2_norm", special)
        yield case("l2_norm", Operand((3, 5), dtype), eps=100.0, tag="eps")
        yield case("l2_norm", Operand((5, 17), dtype), axis=0, tag="axis0")
        yield case("log_softmax", Operand((5, 17), dtype), axis=0, tag="axis0")


def _gradients(x: Operand, row: Operand) -> Iterator[Case]:
    for build in (layer_norm_backward, rms_norm_backward):
        yield case(build.__name__, x, x, build=build, eps=0.5)
        yield case(build.__name__, x, x, row, build=build, eps=0.5)
    yield case("softmax_backward", x, x, build=softmax_backward, scale=0.5)
    yield case("log_softmax_backward", x, x, build=log_softmax_backward)


def _sunk(x: Tensor, sinks: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.softmax(x, mask=mask, scale=0.5, sinks=sinks)


def _sloped(x: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    return ops.softmax(x, mask=mask, scale=0.5, max_bias=8.0, sinks=sinks)
