"""Cases of resampling."""

from __future__ import annotations

from collections.abc import Iterator

from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case


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
                yield case("interpolate", x, size=size, mode=mode, tag=tag)
                if mode != "nearest":
                    yield case("interpolate", x, size=size, mode=mode, align_corners=True, tag=f"{tag}-aligned")
            yield case(
                "interpolate", Operand((1, 2, 9, 8), dtype), scale_factor=(1.7, 0.6), mode=mode, tag=f"{mode}-scaled"
            )
            x = Operand((1, 2, 3, 4), dtype)  # an axis that keeps its length, and is stretched nevertheless
            yield case("interpolate", x, scale_factor=(1.2, 1.7), mode=mode, tag=f"{mode}-stretched")
            for layout in LAYOUTS:
                yield case("interpolate", Operand((3, 2, 5, 6), dtype, layout), scale_factor=2, mode=mode, tag=mode)
        line, cube = Operand((2, 3, 9), dtype), Operand((1, 2, 3, 4, 5), dtype)
        yield case("interpolate", line, size=13, mode="linear")
        yield case("interpolate", line, size=13, tag="nearest")
        yield case("interpolate", line, scale_factor=1.1, mode="linear", tag="stretched")
        yield case("interpolate", line, scale_factor=1.1, tag="nearest-stretched")
        yield case("interpolate", cube, scale_factor=(1.2, 1.2, 1.7), mode="trilinear", tag="stretched")
        yield case("interpolate", cube, size=(5, 3, 7), mode="trilinear")
        yield case("interpolate", cube, size=(5, 3, 7), tag="nearest")
    for dtype in ("i32", "u8", "bool"):
        yield case("interpolate", Operand((1, 2, 4, 5), dtype), size=(7, 9))
