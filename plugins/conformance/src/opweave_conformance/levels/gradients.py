"""Level 6: backward graphs. The gradient of each operation, computed on the device, is that of the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from math import prod
from typing import Final

import numpy as np

from opweave.graph.graph import Graph
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor, constant
from opweave.leaf_memory import write_state
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave_conformance.case import Case
from opweave_conformance.cases import CASES
from opweave_conformance.checklist import Check, Mismatch, Subject, inapplicable
from opweave_conformance.comparison import compare
from opweave_conformance.tolerances import Limits, limits
from opweave_conformance.values import leaf_values

__all__ = ["CHECKS", "cases_with_gradients", "gradient_nodes", "some"]

LARGEST: Final = 700
"""Elements of all operands of a case that is tried."""

MOST: Final = 4
"""Cases of an operation that are tried: the first ones, and others evenly apart."""

PLAIN: Final = ("normal", "positive", "negative", "fraction", "ids", "mask")


@cache
def cases_with_gradients() -> dict[str, tuple[Case, ...]]:
    """Operation -> small cases of it in f32, of which some operand has a gradient."""
    import opweave.ops.gradients  # noqa: F401 - enters the gradients of opweave's own operations

    found: dict[str, list[Case]] = {}
    for case in CASES:
        types = {o.dtype for o in case.operands}
        values = (*PLAIN, "large") if case.op == "acosh" else PLAIN  # acosh begins at 1
        plain = all(o.values in values for o in case.operands) and "mixed" not in case.id
        small = sum(prod(o.shape) for o in case.operands) <= LARGEST
        if "f32" in types and not types & {"f16", "bf16", "f64"} and plain and small and OPS[case.op].gradient:
            found.setdefault(case.op, []).append(case)
    return {op: tuple(cases) for op, cases in found.items()}


def some(op: str) -> Iterator[Case]:
    """The cases of an operation that are tried."""
    cases = cases_with_gradients()[op]
    places = np.linspace(0, len(cases) - 1, min(MOST, len(cases))).astype(int)
    yield from (cases[i] for i in places)


def _gradients(case: Case, tensors: tuple[Tensor, ...], rng: np.random.Generator) -> tuple[Tensor, ...]:
    """The gradients of all leaves of floats, for a random gradient of the result; none if it is not of floats."""
    from opweave.backward import gradients

    out = case.build(*tensors)
    leaves = [t.memory for t in tensors if t.dtype.is_float and t.memory in Graph(out).leaves]
    if not out.dtype.is_float or not leaves:
        return ()
    return gradients(out, leaves, constant(rng.standard_normal(out.shape), out.dtype))


def gradient_nodes(case: Case) -> tuple[Tensor, ...]:
    """The nodes of the backward graph of a case that a device computes."""
    made = _gradients(case, case.tensors(), np.random.default_rng(0))
    return tuple([node for node in Graph(made).nodes if not node.is_view]) if made else ()


def _ask(op: str, subject: Subject) -> None:
    host, tried = HostDevice(), 0
    for case in some(op):
        tensors = case.tensors()
        outputs = _gradients(case, tensors, subject.rng)
        nodes = [node for node in Graph(outputs).nodes if not node.is_view] if outputs else []
        values = leaf_values(subject.rng, case.operands, tensors)
        for leaf, value in values.items():
            if leaf.leaf is not None and leaf.leaf.kind == "state":
                write_state(leaf, value)
        feeds = {leaf: v for leaf, v in values.items() if leaf in Graph(outputs).leaves} if outputs else {}
        feeds = {leaf: v for leaf, v in feeds.items() if leaf.leaf is not None and leaf.leaf.kind == "input"}
        with Scheduler([subject.device, host]) as scheduler:
            if not any(scheduler.supports(subject.device, node) for node in nodes):
                continue
            tried += 1
            got = scheduler.build(outputs).run(feeds)
        with Scheduler(host) as scheduler:
            want = scheduler.build(outputs).run(feeds)
        for leaf, a, b in zip([t for t in values if t.dtype.is_float], got, want, strict=False):
            reason = compare(a, b, _limit(nodes), exact=False).reason
            # Where all terms cancel, nothing is left but their rounding.
            if reason and not np.allclose(a, b, rtol=0, atol=1e-6):
                raise Mismatch(f"{case.id}, the gradient of {leaf.name}: {reason}")
    if not tried:
        inapplicable("it runs nothing of the backward graphs")


def _limit(nodes: list[Tensor]) -> Limits:
    """The limits of all nodes together: each may add its error, and sums that nearly cancel enlarge it."""
    each = [limits(node) for node in nodes]
    root = 10 * sum(limit.nmse**0.5 for limit in each) + 1e-6
    return Limits(root * root, 10 * sum(limit.error for limit in each) + 1e-5)


def _checks() -> Iterator[Check]:
    for op in cases_with_gradients():
        about = f"The gradient of {op}, computed on the device as far as it can, is that of the host."
        yield Check(f"gradient-{op}", 6, about, partial(_ask, op))


CHECKS: Final = tuple(_checks())
