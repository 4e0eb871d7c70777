"""Cases of rotary position embedding and of embeddings of time steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

YARN: Final[dict[str, Any]] = {"scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9, "original_context": 128}
SHAPES: Final[tuple[Shape, ...]] = ((1, 2), (3, 8), (2, 5, 16), (2, 3, 7, 64), (1, 8, 300, 128))


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in SHAPES:
            tokens = Operand(shape[-2:-1], "i32", values="ids", high=1000)
            for pairing in ("adjacent", "half"):
                yield case("rope", Operand(shape, dtype), tokens, pairing=pairing, tag=pairing)
        x = Operand((2, 3, 7, 16), dtype)
        tokens = Operand((7,), "i64", values="ids", high=4000)
        for pairing in ("adjacent", "half"):
            for tag, options in (
                ("dims", {"dims": 10}),
                ("base", {"base": 1e6, "scale": 0.5}),
                ("yarn", YARN),
                ("betas", {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}),
                ("attn", {"attn_factor": 1.5}),
            ):
                yield case("rope", x, tokens, pairing=pairing, **options, tag=f"{pairing}-{tag}")
            own = Operand((2, 1, 7), "i32", values="ids", high=100)
            yield case("rope", x, own, pairing=pairing, tag=f"{pairing}-batch")
            sections = Operand((3, 7), "i32", values="ids", high=100)
            for several in (sections, Operand((3, 2, 1, 7), "i64", values="ids", high=100)):
                yield case("rope", x, several, pairing=pairing, sections=(2, 3, 3), tag=f"{pairing}-sections")
            turns: dict[str, Any] = {"sections": (5, 2, 1), "interleaved": True}
            yield case("rope", x, sections, pairing=pairing, **turns, tag=f"{pairing}-interleaved")
        # Factors keep their precision beside a half type: angles of late positions show every lost bit.
        factors = Operand((8,), "f64" if dtype == "f64" else "f32", values="positive")
        for pairing in ("adjacent", "half"):
            yield case("rope", x, tokens, factors, pairing=pairing, tag=f"{pairing}-factors")
            both: dict[str, Any] = {"base": 500.0, **YARN, "beta_fast": 8.0, "beta_slow": 0.5}
            yield case("rope", x, tokens, factors, pairing=pairing, **both, tag=f"{pairing}-factors-yarn")
            yield case("rope", x, sections, factors, pairing=pairing, **turns, tag=f"{pairing}-factors-interleaved")
        yield case("rope", x, tokens, factors._replace(layout="sliced"), pairing="half", tag="factors")
        for layout in LAYOUTS:
            for pairing in ("adjacent", "half"):
                yield case("rope", Operand((2, 3, 7, 16), dtype, layout), tokens, pairing=pairing, dims=12, tag=pairing)
        laid = Operand((7,), "i64", "sliced", "ids", 50)
        yield case("rope", x, laid, tag="positions")
        for count, dim in ((1, 2), (3, 7), (5, 64), (2, 320)):
            yield case("timestep_embedding", Operand((count,), dtype), dim=dim, tag=f"dim{dim}")
        yield case("timestep_embedding", Operand((9,), dtype, "sliced"), dim=8, max_period=100.0, tag="period")
