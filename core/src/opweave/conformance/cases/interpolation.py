"""Cases of resampling."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.conformance.case import FLOATS, LAYOUTS, Case, Operand, case, with_options


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for mode in ("nearest", "bilinear", "bicubic"):
            for shape, size in (
                ((1, 1, 1, 1), (3, 2)),
                ((2, 3, 5, 7), (10, 14)),
                ((1, 3, 9, 8), (4, 3)),
                ((1, 2, 6, 5), (6, 9)),
                ((1, 2, 6, 5), (6, 5)),
                ((1, 3, 65, 64), (130, 129)),
            ):
                tag = f"{mode}-{size[0]}x{size[1]}"
                x = Operand(shape, dtype)
                yield case("interpolate", with_options(ops.interpolate, size=size, mode=mode), x, tag=tag)
                if mode != "nearest":
                    aligned = with_options(ops.interpolate, size=size, mode=mode, align_corners=True)
                    yield case("interpolate", aligned, x, tag=f"{tag}-aligned")
            scaled = with_options(ops.interpolate, scale_factor=(1.7, 0.6), mode=mode)
            yield case("interpolate", scaled, Operand((1, 2, 9, 8), dtype), tag=f"{mode}-scaled")
            for layout in LAYOUTS:
                twice = with_options(ops.interpolate, scale_factor=2, mode=mode)
                yield case("interpolate", twice, Operand((3, 2, 5, 6), dtype, layout), tag=mode)
        line, cube = Operand((2, 3, 9), dtype), Operand((1, 2, 3, 4, 5), dtype)
        yield case("interpolate", with_options(ops.interpolate, size=13, mode="linear"), line)
        yield case("interpolate", with_options(ops.interpolate, size=13), line, tag="nearest")
        yield case("interpolate", with_options(ops.interpolate, size=(5, 3, 7), mode="trilinear"), cube)
        yield case("interpolate", with_options(ops.interpolate, size=(5, 3, 7)), cube, tag="nearest")
    for dtype in ("i32", "u8", "bool"):
        yield case("interpolate", with_options(ops.interpolate, size=(7, 9)), Operand((1, 2, 4, 5), dtype))
