"""Every case, by family as in ``opweave.ops``."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from opweave.graph.opdef import OPS
from opweave_conformance.case import Case
from opweave_conformance.cases.derived import derived
from opweave_conformance.cases.pointwise import of_examples
from opweave_conformance.cases.samples import sampled

__all__ = ["CASES", "CASES_OF", "cases_for"]

FAMILIES: Final = (
    "pointwise", "elementwise", "activation", "gated", "rounding", "selection", "creation", "random", "movement",
    "arrangement", "reduction", "sorting", "normalization", "matmul", "experts", "quantization", "indexing",
    "attention", "convolution", "interpolation", "pooling", "rope", "state_space", "linear_attention", "linalg",
    "sparse_attention", "custom", "types",
)  # fmt: skip
"""The modules with cases, in the order of these."""


def _all() -> tuple[Case, ...]:
    cases = [case for family in FAMILIES for case in import_module(f"{__name__}.{family}").cases()]
    cases += derived(cases)
    assert len({case.id for case in cases}) == len(cases), "two cases share an id"
    return tuple(cases)


CASES: Final = _all()
"""Every case; use them as ``@pytest.mark.parametrize("case", CASES, ids=str)``."""


def _by_operation() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in CASES:
        found.setdefault(case.op, []).append(case)
    return found


CASES_OF: Final = _by_operation()
"""By operation."""


def cases_for(*names: str) -> list[Case]:
    """The cases of the named operations; of third parties' those that are made of their examples and samples."""
    known = [case for op, cases in CASES_OF.items() if op in names for case in cases]
    for name in dict.fromkeys(names):
        op = OPS.get(name)
        if op is not None and op.family == "third-party":
            known += [*of_examples(op), *sampled(op)]
    return known
