"""Cases of pooling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import input
from opweave.ops.pooling import avg_pool_backward, max_pool_backward
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case, tag_of

FORMS: Final[tuple[tuple[Shape, dict[str, Any]], ...]] = (
    ((1, 1, 1, 1), {"kernel_size": 1}),
    ((2, 3, 8, 9), {"kernel_size": 2}),
    ((1, 3, 9, 12), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((1, 3, 10, 11), {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True}),
    ((1, 2, 130, 300), {"kernel_size": 3, "stride": 1, "padding": 1}),
)


def _one_axis(value: Any) -> Any:
    return value[-1] if isinstance(value, tuple) else value


def _backward(kind: str, x: Operand, tag: str, **options: Any) -> Case:
    """The gradient of a pooling, for that of its result in the layout of ``x``."""
    pooled = getattr(ops, f"{kind}_pool{len(x.shape) - 2}d")(input("x", x.shape, x.dtype), **options)
    grad = Operand(pooled.shape, x.dtype, x.layout)
    if kind == "max":
        return case("max_pool_backward", grad, x, build=max_pool_backward, tag=tag, **pooled.attrs)
    return case("avg_pool_backward", grad, build=avg_pool_backward, tag=tag, size=x.shape[2:], **pooled.attrs)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape, options in FORMS:
            line = {name: _one_axis(value) for name, value in options.items()}
            for kind in ("max", "avg"):
                one, two = f"{kind}_pool1d", f"{kind}_pool2d"
                yield case(one, Operand(shape[:-1], dtype), **line, tag=tag_of(line))
                yield case(two, Operand(shape, dtype), **options, tag=tag_of(options))
        x = Operand((1, 2, 9, 8), dtype)
        yield case("max_pool2d", x, kernel_size=3, dilation=(2, 1), stride=1, padding=1, tag="dilated")
        yield case("avg_pool2d", x, kernel_size=3, stride=2, padding=1, count_include_pad=False, tag="inner")
        row = Operand((2, 3, 17), dtype)
        yield case("max_pool1d", row, kernel_size=3, dilation=2, stride=1, padding=1, tag="dilated")
        yield case("avg_pool1d", row, kernel_size=3, stride=2, padding=1, count_include_pad=False, tag="inner")
        yield case("avg_pool2d", x, kernel_size=2, divisor_override=3, tag="divided")
        for name in ("max_pool2d", "avg_pool2d"):
            for layout in LAYOUTS:
                yield case(name, Operand((3, 4, 5, 6), dtype, layout), kernel_size=2, padding=1)
            yield case(name, Operand((1, 2, 9, 12), dtype, values="special"), kernel_size=3, padding=1)
        for shape in ((2, 9, 12), (1, 2, 9, 12)):  # windows of -inf only
            masked = Operand(shape, dtype, values="hidden")
            yield case(f"max_pool{len(shape) - 2}d", masked, kernel_size=2, stride=1, padding=1, tag="hidden")
        for kind in ("max", "avg"):
            for shape, options in (*[(s[:-1], {k: _one_axis(v) for k, v in o.items()}) for s, o in FORMS[:4]], *FORMS):
                yield _backward(kind, Operand(shape, dtype), tag_of(options), **options)
            for layout in LAYOUTS:
                yield _backward(kind, Operand((3, 4, 5, 6), dtype, layout), layout, kernel_size=2, padding=1)
        yield _backward("max", x, "dilated", kernel_size=3, dilation=(2, 1), stride=1, padding=1)
        yield _backward("max", x._replace(values="ties"), "ties", kernel_size=3, stride=2, padding=1)
        yield _backward("avg", x, "inner", kernel_size=3, stride=2, padding=1, count_include_pad=False)
        yield _backward("avg", x, "divided", kernel_size=2, stride=1, divisor_override=3)
    for dtype in INTS:
        yield case("max_pool2d", Operand((1, 2, 8, 9), dtype), kernel_size=3, padding=1)
