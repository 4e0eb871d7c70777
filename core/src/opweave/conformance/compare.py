"""Comparing a result with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.conformance.limits import Limits

__all__ = ["compare"]

Array = np.ndarray[Any, Any]


def compare(got: Array, want: Array, allowed: Limits) -> tuple[str, float, float]:
    """Why ``got`` is not ``want`` (or ``""``), the normalised mean square error and the largest relative error."""
    if got.tobytes() == want.tobytes():
        return "", 0.0, 0.0
    if got.dtype.kind in "iub":
        wrong = np.flatnonzero(got != want)
        if not wrong.size:
            return "", 0.0, 0.0
        return _first(got, want, int(wrong[0]), f"{wrong.size} of {got.size} elements differ"), np.inf, np.inf
    with np.errstate(all="ignore"):
        a, b = np.asarray(got, np.float64).reshape(-1), np.asarray(want, np.float64).reshape(-1)
        strange = ~np.isfinite(b) | ~np.isfinite(a)
        wrong = np.flatnonzero(strange & ~((a == b) | (np.isnan(a) & np.isnan(b))))
        if wrong.size:
            return _first(got, want, int(wrong[0]), "NaN or infinities differ"), np.inf, np.inf
        a, b = np.where(strange, 0, a), np.where(strange, 0, b)
        power = float(np.mean(b * b)) if b.size else 0.0
        miss = np.abs(a - b)
        if not miss.any():
            return "", 0.0, 0.0
        nmse = float(np.mean(miss * miss)) / power if power else np.inf
        relative = miss / (np.abs(b) + np.sqrt(power)) if power else np.full_like(miss, np.inf)
        worst = int(np.argmax(relative))
    error = float(relative[worst])
    if error > allowed.error:
        return _first(got, want, worst, f"largest error {error:.2e} exceeds {allowed.error:.2e}"), nmse, error
    # A mean of few squares says no more than the largest of them, which was judged above.
    if nmse > allowed.nmse and b.size >= 16:
        return f"normalised mean square error {nmse:.2e} exceeds {allowed.nmse:.2e}", nmse, error
    if got.itemsize == 2 and allowed.error:
        return _rounding(a, b), nmse, error
    return "", nmse, error


def _rounding(a: Array, b: Array) -> str:
    """What is wrong with the rounding of results of a half type: too little of an error to exceed a limit.

    Arithmetic in f32 falls on the other side of a rounding now and then, and on either side as often.
    """
    count = int(np.count_nonzero(a != b))
    if b.size < 64 or count < 0.2 * b.size:
        return ""
    if count > 0.5 * b.size:
        return f"{count} of {b.size} elements are not what f32 arithmetic rounds to"
    for where, side in (("toward zero", np.abs(a) - np.abs(b)), ("to one side", a - b)):
        if max(np.count_nonzero(side > 0), np.count_nonzero(side < 0)) > 0.95 * count:
            return f"{count} of {b.size} elements are rounded {where} and not to the nearest"
    return ""


def _first(got: Array, want: Array, flat: int, what: str) -> str:
    at = tuple(map(int, np.unravel_index(flat, want.shape)))
    return f"{what}: at {list(at)} it gives {got[at]!s}, not {want[at]!s}"
