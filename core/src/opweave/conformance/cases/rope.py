"""Cases of rotary position embedding and of waves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from opweave import ops
from opweave.conformance.case import FLOATS, LAYOUTS, Case, Operand, case, with_options
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor

YARN: Final[dict[str, Any]] = {"scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9, "original_context": 128}
SHAPES: Final[tuple[Shape, ...]] = ((1, 2), (3, 8), (2, 5, 16), (2, 3, 7, 64), (1, 8, 300, 128))


def _with_factors(
    x: Tensor, positions: Tensor, factors: Tensor, pairing: Literal["adjacent", "half"] = "half"
) -> Tensor:
    return ops.rope(x, positions, factors, pairing=pairing)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in SHAPES:
            tokens = Operand(shape[-2:-1], "i32", values="ids", high=1000)
            for pairing in ("adjacent", "half"):
                yield case("rope", with_options(ops.rope, pairing=pairing), Operand(shape, dtype), tokens, tag=pairing)
        x = Operand((2, 3, 7, 16), dtype)
        tokens = Operand((7,), "i64", values="ids", high=4000)
        for pairing in ("adjacent", "half"):
            for tag, options in (
                ("dims", {"dims": 10}),
                ("base", {"base": 1e6, "scale": 0.5}),
                ("yarn", YARN),
                ("attn", {"attn_factor": 1.5}),
            ):
                build = with_options(ops.rope, pairing=pairing, **options)
                yield case("rope", build, x, tokens, tag=f"{pairing}-{tag}")
            own = Operand((2, 1, 7), "i32", values="ids", high=100)
            yield case("rope", with_options(ops.rope, pairing=pairing), x, own, tag=f"{pairing}-batch")
            sections = Operand((3, 7), "i32", values="ids", high=100)
            parts = with_options(ops.rope, pairing=pairing, sections=(2, 3, 3))
            yield case("rope", parts, x, sections, tag=f"{pairing}-sections")
            yield case(
                "rope", parts, x, Operand((3, 2, 1, 7), "i64", values="ids", high=100), tag=f"{pairing}-sections"
            )
        # Factors keep their precision beside a half type: angles of late positions show every lost bit.
        factors = Operand((8,), "f64" if dtype == "f64" else "f32", values="positive")
        for pairing in ("adjacent", "half"):
            yield case(
                "rope", with_options(_with_factors, pairing=pairing), x, tokens, factors, tag=f"{pairing}-factors"
            )
        yield case("rope", _with_factors, x, tokens, factors._replace(layout="sliced"), tag="factors")
        for layout in LAYOUTS:
            for pairing in ("adjacent", "half"):
                build = with_options(ops.rope, pairing=pairing, dims=12)
                yield case("rope", build, Operand((2, 3, 7, 16), dtype, layout), tokens, tag=pairing)
        laid = Operand((7,), "i64", "sliced", "ids", 50)
        yield case("rope", ops.rope, x, laid, tag="positions")
        for count, dim in ((1, 2), (3, 7), (5, 64), (2, 320)):
            build = with_options(ops.timestep_embedding, dim=dim)
            yield case("timestep_embedding", build, Operand((count,), dtype), tag=f"dim{dim}")
        slow = with_options(ops.timestep_embedding, dim=8, max_period=100.0)
        yield case("timestep_embedding", slow, Operand((9,), dtype, "sliced"), tag="period")
