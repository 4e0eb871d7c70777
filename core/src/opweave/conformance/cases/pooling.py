"""Cases of pooling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case, with_options
from opweave.graph.layout import Shape

FORMS: Final[tuple[tuple[Shape, dict[str, Any]], ...]] = (
    ((1, 1, 1, 1), {"kernel_size": 1}),
    ((2, 3, 8, 9), {"kernel_size": 2}),
    ((1, 3, 9, 12), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((1, 3, 10, 11), {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True}),
    ((1, 2, 130, 300), {"kernel_size": 3, "stride": 1, "padding": 1}),
)


def _one_axis(value: Any) -> Any:
    return value[-1] if isinstance(value, tuple) else value


def _tag(options: dict[str, Any]) -> str:
    return "-".join(f"{name}{value}".replace(" ", "") for name, value in options.items())


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape, options in FORMS:
            line = {name: _one_axis(value) for name, value in options.items()}
            for kind in ("max", "avg"):
                one, two = f"{kind}_pool1d", f"{kind}_pool2d"
                yield case(one, with_options(getattr(ops, one), **line), Operand(shape[:-1], dtype), tag=_tag(line))
                yield case(two, with_options(getattr(ops, two), **options), Operand(shape, dtype), tag=_tag(options))
        dilated = with_options(ops.max_pool2d, kernel_size=3, dilation=(2, 1), stride=1, padding=1)
        yield case("max_pool2d", dilated, Operand((1, 2, 9, 8), dtype), tag="dilated")
        inner = with_options(ops.avg_pool2d, kernel_size=3, stride=2, padding=1, count_include_pad=False)
        yield case("avg_pool2d", inner, Operand((1, 2, 9, 8), dtype), tag="inner")
        divided = with_options(ops.avg_pool2d, kernel_size=2, divisor_override=3)
        yield case("avg_pool2d", divided, Operand((1, 2, 9, 8), dtype), tag="divided")
        for layout in LAYOUTS:
            x = Operand((3, 4, 5, 6), dtype, layout)
            yield case("max_pool2d", with_options(ops.max_pool2d, kernel_size=2, padding=1), x)
            yield case("avg_pool2d", with_options(ops.avg_pool2d, kernel_size=2, padding=1), x)
        special = Operand((1, 2, 9, 12), dtype, values="special")
        yield case("max_pool2d", with_options(ops.max_pool2d, kernel_size=3, padding=1), special)
        yield case("avg_pool2d", with_options(ops.avg_pool2d, kernel_size=3, padding=1), special)
    for dtype in INTS:
        yield case("max_pool2d", with_options(ops.max_pool2d, kernel_size=3, padding=1), Operand((1, 2, 8, 9), dtype))
