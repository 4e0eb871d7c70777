"""Running one case on one device and comparing the result with the reference."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from opweave.conformance.case import Case
from opweave.conformance.result import Result
from opweave.conformance.trial import Trial, overwritable, step_of, the_node
from opweave.conformance.values import leaf_values
from opweave.errors import OpweaveError, UnsupportedOpError

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.graph.tensor import Tensor

__all__ = ["generator", "run_case"]


def generator(seed: int, name: str) -> np.random.Generator:
    """The random generator of the case or check ``name``, seeded by its name, so that each can be repeated alone."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def run_case(device: Device, case: Case, seed: int = 0) -> Result:
    """Try ``case`` on ``device``: ask whether it runs it, run it, and compare with the reference.

    An accepted case is run in every arrangement of memory that a scheduler may choose: each operand in a buffer of its
    own; all of them and the workspace in one buffer, compiled before the values are there, and run again; in place
    over each source that the operation and the kernel allow. Bytes around the output, the sources and everything
    around them have to stay as they were. A refused case has to be refused by the typed error when it is compiled all
    the same.

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
    try:
        if why is not None:
            lie = _not_refused(device, node, why)
            return Result("failed", lie, id=case.id) if lie else Result("refused", why, id=case.id)
        rng = generator(seed, case.id)
        leaves = leaf_values(rng, case.operands, tensors)
        with device.open() as stream, Trial(stream, node, leaves) as trial:
            apart = trial.apart()
            reason = apart.reason or trial.together()
            if not reason and device.inplace(step_of(node)):
                reason = next(filter(None, map(trial.together, overwritable(node))), "")
    except (OpweaveError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as failure:
        return Result("failed", f"{type(failure).__name__}: {failure}", id=case.id)
    return apart._replace(status="failed" if reason else "passed", reason=reason, id=case.id)


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
