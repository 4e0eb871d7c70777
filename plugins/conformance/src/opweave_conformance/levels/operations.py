"""Level 2: every case, long operands, whether listed kernels run at all, and tensors without elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from opweave import ops
from opweave.contract import Arg, Device, Kind, Step
from opweave.graph.dtypes import as_dtype, f32
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor
from opweave.graph.tensor import input as leaf
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave_conformance.case import Case
from opweave_conformance.cases import CASES, cases_for
from opweave_conformance.cases.long_operands import LONG_CASES
from opweave_conformance.check import run_case
from opweave_conformance.checklist import Check, Checklist, Subject, expect, inapplicable
from opweave_conformance.result import Result
from opweave_conformance.trial import step_of, the_node

__all__ = ["CHECKS", "column", "third_party_checks"]


# --- cases ----------------------------------------------------------------------------------------------------------


def column(case: Case) -> str:
    """The dtype under which the matrix shows a case: the quantized one, if any, else the first data operand's."""
    names = [o.dtype for o in case.operands if o.values != "ids"]
    quantized = [name for name in names if as_dtype(name).is_quantized]
    return (quantized or names or [o.dtype for o in case.operands] or [case.build().dtype.name])[0]


def _ask_case(case: Case, subject: Subject) -> Result:
    return run_case(subject.device, case, subject.seed)


def _check_of(case: Case) -> Check:
    return Check(case.id, 2, "", partial(_ask_case, case), op=case.op, dtype=column(case))


# --- listed kernels -------------------------------------------------------------------------------------------------


def _ask_listed(op: str, subject: Subject) -> None:
    table = getattr(subject.device, "kernels", None)
    if table is None or op not in table.ops():
        inapplicable("it lists no kernel")
    reasons: dict[str, None] = {}
    for case in cases_for(op):
        why = subject.device.why_not(step_of(the_node(case.build(*case.tensors()))))
        if why is None:
            return
        reasons[why] = None
    expect(not reasons, f"its kernel table lists {op}, but every case is refused: {next(iter(reasons), '')}")


def _listed(op: str) -> Check:
    about = f"A device that lists a kernel for {op} runs some case of it."
    return Check(f"listed-{op}", 2, about, partial(_ask_listed, op))


def third_party_checks(devices: Iterable[Device]) -> Iterator[Check]:
    """The checks of third parties' operations that one of ``devices`` lists a kernel for. A plugin may have defined
    them when it was loaded."""
    listed = set[str]().union(*[device.kernels.ops() for device in devices if hasattr(device, "kernels")])
    for name, op in list(OPS.items()):
        if op.family == "third-party" and name in listed and op.samples is not None:
            yield _listed(name)
            yield from map(_check_of, cases_for(name))


# --- tensors without elements ---------------------------------------------------------------------------------------

empty = Checklist(2, "empty")

EMPTY: Final[dict[str, Callable[[], Tensor]]] = {
    "elementwise": lambda: ops.exp(ops.mul(leaf("a", (0, 5)), leaf("b", (5,)))),
    "sum-of-nothing": lambda: ops.sum(leaf("a", (3, 0)), axis=1),
    "sum-to-nothing": lambda: ops.sum(leaf("a", (0, 3)), axis=1),
    "rows": lambda: ops.softmax(leaf("a", (0, 7))),
    "product-over-nothing": lambda: ops.matmul(leaf("a", (2, 0)), leaf("b", (0, 3))),
    "product-of-nothing": lambda: ops.linear(leaf("a", (0, 4)), leaf("b", (3, 4))),
    "embedding": lambda: ops.embedding(leaf("a", (5, 3)), leaf("ids", (0,), "i64")),
    "concat": lambda: ops.concat([leaf("a", (0, 3)), leaf("b", (2, 3)), leaf("c", (0, 3))]),
}
"""Graphs in which a tensor has no elements."""


def _ask_empty(build: Callable[[], Tensor], subject: Subject) -> None:
    output = build()
    names = sorted({t.key for t in _leaves(output)}) if output.srcs else []
    values = {t.key: _value(subject, t) for t in _leaves(output)}
    host = HostDevice()
    with Scheduler(host) as alone:
        want = alone.build(output).run(**values)
    devices = [subject.device] if subject.device.kind is Kind.HOST else [subject.device, host]
    with Scheduler(devices) as scheduler:
        got = scheduler.build(output).run(**values)
    expect(got.shape == want.shape and got.dtype == want.dtype, f"of {names} it gives {got.dtype}{got.shape}")
    expect(np.allclose(got, want, 1e-4, 1e-5), f"it gives {got.tolist()}, not {want.tolist()}")


def _leaves(output: Tensor) -> list[Tensor]:
    from opweave.graph.graph import Graph

    return list(Graph(output).leaves)


def _value(subject: Subject, x: Tensor) -> np.ndarray[Any, Any]:
    if x.dtype.is_integer:
        return np.zeros(x.shape, x.dtype.numpy)
    return subject.rng.standard_normal(x.shape).astype(x.dtype.numpy)


@empty("step")
def _(subject: Subject) -> None:
    """A step whose result has no elements is left out; nothing is run and nothing written."""
    device = subject.device
    with device.alloc(64) as buffer, device.open() as stream:
        buffer.fill(0xA5)
        arg = Arg(buffer, 0, f32, (0, 4), (16, 4))
        stream.run([Step("exp", arg, (arg,), {})])
        stream.synchronize()
        expect((buffer.read() == 0xA5).all(), "a step without elements wrote something")


def _of_nothing(name: str, build: Callable[[], Tensor]) -> Check:
    return Check(
        f"empty-{name}", 2, "Graphs with tensors without elements give the host's result.", partial(_ask_empty, build)
    )


CHECKS: Final = (
    *(_listed(name) for name, op in OPS.items() if not op.is_view and op.family != "third-party"),
    *empty.checks,
    *(_of_nothing(name, build) for name, build in EMPTY.items()),
    *map(_check_of, CASES),
    *map(_check_of, LONG_CASES),
)
