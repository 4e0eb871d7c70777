"""Cases of convolutions, transposed ones, and columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import input
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case, tag_of

Form = tuple[Shape, Shape, dict[str, Any]]

ONE: Final[tuple[Form, ...]] = (
    ((1, 1, 1), (1, 1, 1), {}),
    ((2, 3, 17), (4, 3, 3), {}),
    ((1, 4, 33), (6, 2, 5), {"stride": 2, "padding": 3, "dilation": 2, "groups": 2}),
    ((1, 5, 64), (5, 1, 4), {"padding": "same", "groups": 5}),
)
TWO: Final[tuple[Form, ...]] = (
    ((1, 1, 1, 1), (3, 1, 1, 1), {}),
    ((2, 3, 8, 9), (4, 3, 3, 3), {}),
    ((2, 3, 8, 9), (4, 3, 3, 3), {"padding": 1}),
    ((1, 3, 9, 12), (5, 3, 2, 3), {"stride": (2, 3), "padding": (1, 2)}),
    ((1, 2, 11, 10), (3, 2, 3, 2), {"dilation": (2, 3), "padding": (3, 0)}),
    ((1, 6, 7, 7), (4, 3, 3, 3), {"groups": 2, "padding": "same"}),
    ((2, 5, 7, 6), (5, 1, 3, 3), {"groups": 5, "padding": 1}),
    ((1, 3, 9, 9), (6, 1, 3, 3), {"groups": 3, "stride": 2, "padding": 1}),
    ((2, 8, 5, 5), (6, 8, 1, 1), {}),
    ((1, 8, 5, 6), (6, 4, 1, 1), {"groups": 2, "stride": 2}),
    ((1, 2, 3, 3), (2, 2, 5, 5), {"padding": 4}),
    ((1, 4, 130, 67), (3, 4, 3, 3), {"padding": 1}),
)
THREE: Final[tuple[Form, ...]] = (
    ((1, 2, 4, 5, 6), (3, 2, 2, 3, 3), {}),
    ((1, 4, 5, 4, 6), (4, 2, 3, 2, 2), {"stride": (2, 1, 2), "padding": (1, 0, 1), "dilation": (1, 2, 1), "groups": 2}),
)
TRANSPOSED: Final[tuple[Form, ...]] = (
    ((1, 1, 1, 1), (1, 2, 1, 1), {}),
    ((2, 3, 5, 6), (3, 4, 3, 3), {}),
    ((1, 3, 5, 6), (3, 4, 3, 2), {"stride": 2, "padding": 1, "output_padding": (1, 0)}),
    ((1, 4, 4, 3), (4, 3, 2, 3), {"stride": (3, 1), "padding": (0, 2), "dilation": (2, 3), "groups": 2}),
    ((1, 2, 40, 70), (2, 20, 4, 4), {"stride": 2, "padding": 1}),
)
TRANSPOSED_LINES: Final[tuple[Form, ...]] = tuple([
    (shape[:-1], kernel[:-1], {name: v[0] if isinstance(v, tuple) else v for name, v in options.items()})
    for shape, kernel, options in TRANSPOSED
])  # fmt: skip


def _convolutions(op: str, forms: tuple[Form, ...], dtype: str) -> Iterator[Case]:
    for shape, kernel, options in forms:
        channels = kernel[1] * options.get("groups", 1) if "transpose" in op else kernel[0]
        x, w = Operand(shape, dtype), Operand(kernel, dtype)
        yield case(op, x, w, **options, tag=tag_of(options))
        yield case(op, x, w, Operand((channels,), dtype), **options, tag=tag_of(options))


def _columns(x: Operand, kernel: Shape, **given: Any) -> Case:
    """A case of ``col2im``, whose columns have the shape that ``im2col`` of ``x`` gives."""
    columns = ops.im2col(input("x", x.shape, x.dtype), kernel, **given)
    tag = "x".join(map(str, kernel))
    return case(
        "col2im", Operand(columns.shape, x.dtype, x.layout), size=x.shape[2:], kernel_size=kernel, **given, tag=tag
    )


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield from _convolutions("conv1d", ONE, dtype)
        yield from _convolutions("conv2d", TWO, dtype)
        yield from _convolutions("conv3d", THREE, dtype)
        yield from _convolutions("conv_transpose1d", TRANSPOSED_LINES, dtype)
        yield from _convolutions("conv_transpose2d", TRANSPOSED, dtype)
        for layout in LAYOUTS:
            x, w = Operand((3, 4, 5, 6), dtype), Operand((4, 2, 3, 3), dtype)
            laid = Operand(x.shape, dtype, layout), Operand(w.shape, dtype, layout)
            yield case("conv2d", laid[0], w, groups=2, padding=1)
            yield case("conv2d", x, laid[1], groups=2, padding=1, tag="weight")
            yield case("conv2d", laid[0], Operand((4, 1, 3, 3), dtype, layout), groups=4, padding=1)
            yield case("conv2d", laid[0], Operand((2, 4, 1, 1), dtype), Operand((2,), dtype, layout))
            yield case("conv_transpose2d", laid[0], Operand((4, 2, 3, 3), dtype, layout))
    for dtype in (*FLOATS, "i32", "u8", "bool"):
        for shape, kernel, options in ((ONE[1]), (ONE[2]), (TWO[0]), (TWO[3]), (TWO[4]), (THREE[0])):
            given = {k: v for k, v in options.items() if k != "groups"}
            yield case(
                "im2col", Operand(shape, dtype), kernel_size=kernel[2:], **given, tag="x".join(map(str, kernel[2:]))
            )
            if dtype in FLOATS:
                yield _columns(Operand(shape, dtype), kernel[2:], **given)
        for layout in LAYOUTS:
            yield case("im2col", Operand((3, 4, 5, 6), dtype, layout), kernel_size=2, padding=1)
            if dtype in FLOATS:
                yield _columns(Operand((3, 4, 5, 6), dtype, layout), (2, 2), padding=1)
