"""Comparing a result with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.tools.distance import distance
from opweave_conformance.result import Result
from opweave_conformance.tolerances import Limits

__all__ = ["compare"]

Array = np.ndarray[Any, Any]


def compare(got: Array, want: Array, allowed: Limits, *, exact: bool = True) -> Result:
    """Whether ``got`` is ``want`` within limits, and if not, why. Of results that are not ``exact`` it is not asked how
    half types were rounded."""
    reason, nmse, error = _compare(got, want, allowed, exact)
    return Result("failed" if reason else "passed", reason, nmse, error)


def _compare(got: Array, want: Array, allowed: Limits, exact: bool) -> tuple[str, float, float]:
    found = distance(got, want)
    if found.wrong:
        what = "NaN or infinities differ"
        if got.dtype.kind in "iub":
            what = f"{found.wrong} of {got.size} elements differ"
        return _first(got, want, found.at, what), found.nmse, found.largest
    nmse, error = found.nmse, found.largest
    if error > allowed.error:
        return _first(got, want, found.at, f"largest error {error:.2e} exceeds {allowed.error:.2e}"), nmse, error
    # The mean of a few squares adds nothing to the largest error, which was checked above.
    if nmse > allowed.nmse and want.size >= 16:
        return f"normalised mean square error {nmse:.2e} exceeds {allowed.nmse:.2e}", nmse, error
    if exact and error and got.dtype.kind not in "iub" and got.itemsize == 2 and allowed.error:
        return _rounding(got, want), nmse, error
    return "", nmse, error


def _rounding(got: Array, want: Array) -> str:
    """Why a half type's results are rounded wrongly, or ``""``; a wrong rounding mode is too small an error to exceed
    the limits.

    Results of f32 arithmetic round to the neighbouring value now and then, up as often as down. Many such results, or
    all of them in one direction, show another rounding mode or accumulation in the half type.
    """
    a, b = (np.nan_to_num(np.asarray(x, np.float64).reshape(-1), posinf=0, neginf=0) for x in (got, want))
    count = int(np.count_nonzero(a != b))
    if b.size < 64 or count < 0.2 * b.size:
        return ""
    if count > 0.5 * b.size:
        return f"{count} of {b.size} elements are not what f32 arithmetic rounds to"
    for where, side in (("toward zero", np.abs(a) - np.abs(b)), ("to one side", a - b)):
        if max(np.count_nonzero(side > 0), np.count_nonzero(side < 0)) > 0.95 * count:
            return f"{count} of {b.size} elements are rounded {where}, not to the nearest value"
    return ""


def _first(got: Array, want: Array, flat: int, what: str) -> str:
    at = tuple(map(int, np.unravel_index(flat, want.shape)))
    return f"{what}: at {list(at)} it gives {got[at]!s}, not {want[at]!s}"
