"""Running one case on one device and judging the result by the reference."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from opweave.conformance.case import Case
from opweave.conformance.trial import Trial, overwritable, step_of, the_node
from opweave.conformance.values import make_values
from opweave.errors import OpweaveError, UnsupportedOpError

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.graph.tensor import Tensor

__all__ = ["Verdict", "generator", "run_case"]


class Verdict(NamedTuple):
    """What came out of a case.

    Attributes:
        case: which one.
        status: ``"passed"``, ``"refused"`` (the device says that it does not run it) or ``"failed"``.
        reason: why it was refused or failed, else ``""``.
        nmse: normalised mean square error, ``nan`` where nothing was computed.
        error: the largest error of an element, relative to the element plus the root mean square of all.
    """

    case: Case
    status: Literal["passed", "refused", "failed"]
    reason: str = ""
    nmse: float = float("nan")
    error: float = float("nan")

    def __bool__(self) -> bool:
        """Whether the device keeps its word: it refused the case, or got it right."""
        return self.status != "failed"


def generator(seed: int, name: str) -> np.random.Generator:
    """The random numbers of the case or check called ``name``: its own, so that it can be repeated alone."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def run_case(device: Device, case: Case, seed: int = 0) -> Verdict:
    """Try ``case`` on ``device``: ask whether it runs it, run it, and compare with the reference.

    An accepted case is run in every arrangement of memory that a scheduler may choose: each operand in a buffer of its
    own; all of them and the workspace in one buffer, compiled before the values are there, and run again; in place
    over each source that the operation and the kernel allow. Bytes around the output, the sources and everything
    around them have to stay as they were. A refused case has to be refused by the typed error when it is compiled all
    the same.

    Args:
        device: it, or its class, need not be registered.
        case: one of `CASES`.
        seed: of the random values; each case draws its own.
    """
    tensors = case.tensors()
    node = the_node(case.build(*tensors))
    why = device.why_not(step_of(node))
    try:
        if why is not None:
            lie = _not_refused(device, node, why)
            return Verdict(case, "failed", lie) if lie else Verdict(case, "refused", why)
        rng = generator(seed, case.id)
        leaves = {
            x.memory: make_values(rng, operand, x.memory.shape, x.dtype)
            for x, operand in zip(tensors, case.operands, strict=True)
        }
        with device.open() as stream, Trial(stream, node, leaves) as trial:
            reason, nmse, error = trial.apart()
            reason = reason or trial.together()
            if not reason and device.inplace(step_of(node)):
                reason = next(filter(None, map(trial.together, overwritable(node))), "")
    except (OpweaveError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as failure:
        return Verdict(case, "failed", f"{type(failure).__name__}: {failure}")
    return Verdict(case, "failed" if reason else "passed", reason, nmse, error)


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
