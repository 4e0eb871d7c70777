"""Running one case on one device and comparing the result with the reference."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from opweave.errors import OpweaveError, UnsupportedOpError
from opweave.graph.dtypes import f32
from opweave.graph.opdef import takes_precision
from opweave.scheduler.place.precision import rounded_sources
from opweave_conformance.case import Case
from opweave_conformance.result import Result
from opweave_conformance.trial import Trial, overwritable, step_of, the_node
from opweave_conformance.values import leaf_values

if TYPE_CHECKING:
    from opweave.contract import Device, Step
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor

__all__ = ["generator", "run_case"]

FEW: Final = 16
"""Smaller results are only judged where they are computed exactly."""


def generator(seed: int, name: str) -> np.random.Generator:
    """The random generator of the case or check ``name``, seeded by its name, so that each can be repeated alone."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def run_case(device: Device, case: Case, seed: int = 0) -> Result:
    """Try ``case`` on ``device``: ask whether it runs it, run it, and compare with the reference.

    An accepted case is run in every arrangement of memory that a scheduler may choose: each operand in a buffer of its
    own; all of them and the workspace in one buffer, compiled before the values are there, and run again; in place
    over each source that the operation and the kernel allow. Bytes around the output, the sources and everything
    around them have to stay as they were. A refused case has to be refused by the typed error when it is compiled all
    the same. Where the device has kernels of other precisions for it, each is run too, also with read-only sources that
    were rounded beforehand, and judged by the limits of its precision.

    Args:
        device: the device to test; it need not be registered.
        case: one of `CASES`.
        seed: of the random values; each case draws its own.

    Returns:
        ``"passed"``, ``"refused"`` or ``"failed"``, with the case's ``id``, the reason and the errors.
    """
    tensors = case.tensors()
    node = the_node(case.build(*tensors))
    why = device.why_not(step_of(node))
    result: Result | None = None
    try:
        if why is not None and (lie := _not_refused(device, node, why)):
            return Result("failed", lie, id=case.id)
        leaves = leaf_values(generator(seed, case.id), case.operands, tensors)
        with device.open() as stream:
            for precision, rounded in _ways(device, case, node):
                with Trial(stream, node, leaves, precision, rounded) as trial:
                    found = _tried(trial)
                if not found and precision != "exact":
                    found = found._replace(reason=f"in {precision}: {found.reason}")
                if not found or result is None:
                    result = found
                if not found:
                    break
    except (OpweaveError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as failure:
        return Result("failed", f"{type(failure).__name__}: {failure}", id=case.id)
    if result is None:
        result = Result("refused", str(why))
    return result._replace(id=case.id)


def _ways(device: Device, case: Case, node: Tensor) -> Iterator[tuple[Precision, Collection[int]]]:
    """The precisions in which the device computes a node, each with the positions of sources that may come rounded."""
    if device.why_not(step_of(node)) is None:
        yield "exact", ()
    # In a few sums terms may cancel, so that nothing but the rounding of operands is left.
    judged = node.size >= FEW and not any(operand.values == "special" for operand in case.operands)
    for precision in node.op.rough if judged and node.op is not None and takes_precision(node) else ():
        if not _computes(device, step_of(node, precision=precision), precision):
            continue
        yield precision, ()
        leaves = [source.memory for source in node.srcs]
        plain = {i for i, source in enumerate(node.srcs) if i and source.dtype is f32 and leaves.count(leaves[i]) == 1}
        if precision == "bf16" and plain:
            rounded = step_of(node, precision=precision, sources=rounded_sources(node, plain))
            if _computes(device, rounded, precision):
                yield precision, plain


def _computes(device: Device, step: Step, precision: Precision) -> bool:
    """Whether a device runs a step, and does so in just this precision."""
    return device.why_not(step) is None and device.precision(step) == precision


def _tried(trial: Trial) -> Result:
    """The result of a trial in every arrangement of memory."""
    apart = trial.apart()
    reason = apart.reason or trial.together()
    node = trial.node
    inplace = trial.device.inplace(step_of(node, precision=trial.precision, sources=trial.sources))
    if not reason and inplace:
        reason = next(filter(None, map(trial.together, overwritable(node))), "")
    return apart._replace(status="failed" if reason else "passed", reason=reason)


def _not_refused(device: Device, node: Tensor, why: str) -> str:
    """What is wrong with how the device refuses ``node``, or ``""``."""
    if not why.strip():
        return "it is refused without a reason"
    with device.open() as stream, Trial(stream, node, {}) as trial:
        try:
            trial.compile()
        except UnsupportedOpError:
            return ""
        except Exception as error:
            return f"it is refused ({why}), but compiling it raises {type(error).__name__}: {error}"
    return f"it is refused ({why}), but compiling it raises no UnsupportedOpError"
