"""Level 5, third part: an index out of range raises BoundsError."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.errors import BoundsError, OpweaveError, chain_of
from opweave.graph.opdef import OPS
from opweave_conformance.cases import cases_for
from opweave_conformance.checklist import Check, Mismatch, Subject, expect, inapplicable
from opweave_conformance.trial import Trial, step_of, the_node
from opweave_conformance.values import leaf_values

if TYPE_CHECKING:
    from opweave.contract import Device, Step, Stream
    from opweave.graph.tensor import Tensor
    from opweave_conformance.case import Case

__all__ = ["CHECKS"]

Array = np.ndarray[Any, Any]


def _ask(op: str, subject: Subject) -> None:
    device = subject.device
    if not device.raises_index_errors:
        inapplicable("an index out of range makes the device unusable (raises_index_errors = False)")
    case, tensors, node, which = _find(op, device)
    leaves = leaf_values(subject.rng, case.operands, tensors)
    ids, rows = tensors[which].memory, case.operands[which].high
    with device.open() as stream:
        for wrong in (rows, -1, rows + (1 << 20)):
            _expect_right(stream, node, leaves)
            spoiled = leaves[ids].copy()
            spoiled.reshape(-1)[-1] = wrong
            with Trial(stream, node, {**leaves, ids: spoiled}) as trial:
                error = _run(stream, trial.place()[0])
            what = f"an index of {wrong} for {rows} rows"
            if error is None:
                raise Mismatch(f"{what} raises nothing, neither at once nor at the next wait")
            expect(any(isinstance(e, BoundsError) for e in chain_of(error)), f"{what} is no BoundsError: {error!r}")
            stream.recover()
        _expect_right(stream, node, leaves)


def _find(op: str, device: Device) -> tuple[Case, tuple[Tensor, ...], Tensor, int]:
    """A case that the device runs, its operands, its node, and the number of the operand that holds the indices."""
    for case in cases_for(op):
        which = [i for i, o in enumerate(case.operands) if o.values == "ids" and o.high and 0 not in o.shape]
        tensors = case.tensors()
        node = the_node(case.build(*tensors))
        if which and device.why_not(step_of(node)) is None:
            return case, tensors, node, which[0]
    inapplicable(f"it does not run {op}")


def _run(stream: Stream, step: Step) -> OpweaveError | None:
    """The error that is raised at once, or by waiting for an event behind the step."""
    try:
        stream.run([step])
        stream.record().synchronize()
    except OpweaveError as error:
        return error
    return None


def _expect_right(stream: Stream, node: Tensor, leaves: Mapping[Tensor, Array]) -> None:
    with Trial(stream, node, leaves) as trial:
        reason = trial.apart().reason
    expect(not reason, f"with indices that exist: {reason}")


INDEXING: Final = [name for name, op in OPS.items() if op.indices and op.family not in ("rope", "random")]
"""The operations that read or write by index; positions of rope and keys of random numbers are no indices."""

CHECKS: Final = [
    Check(f"fault-index-{op}", 5, "An index out of range raises BoundsError, and the stream can recover.",
          partial(_ask, op))
    for op in INDEXING
]  # fmt: skip
