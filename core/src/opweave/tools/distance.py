"""`distance`: the error of an array relative to the correct one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Distance", "distance"]

Array = np.ndarray[Any, Any]


class Distance(NamedTuple):
    """The error of an array; all zero if nothing differs.

    Attributes:
        nmse: mean square error over the mean square of the correct values.
        largest: largest error of an element, relative to the element plus the root mean square of all.
        at: flat index of that element, or of the first wrong one if ``wrong`` is not 0.
        wrong: the number of differing integers, NaN and infinities. If it is not 0, both errors are infinite.
    """

    nmse: float
    largest: float
    at: int = 0
    wrong: int = 0


def distance(got: Array, want: Array) -> Distance:
    """Measure ``got``, of any dtype, against ``want`` of the same shape. Where both are NaN they are equal."""
    if got.tobytes() == want.tobytes():
        return Distance(0.0, 0.0)
    if got.dtype.kind in "iub":
        return _beyond(got != want)
    with np.errstate(all="ignore"):
        a, b = np.asarray(got, np.float64).reshape(-1), np.asarray(want, np.float64).reshape(-1)
        strange = ~(np.isfinite(a) & np.isfinite(b))
        beyond = _beyond(strange & ~((a == b) | (np.isnan(a) & np.isnan(b))))
        if beyond.wrong:
            return beyond
        a, b = np.where(strange, 0, a), np.where(strange, 0, b)
        miss = np.abs(a - b)
        if not miss.any():
            return Distance(0.0, 0.0)
        scale = float(np.max(np.abs(b)))
        if not scale:
            return Distance(np.inf, np.inf, int(np.argmax(miss)))
        b, miss = b / scale, miss / scale  # squares of f64 may be too large for it, or too small
        power = float(np.mean(b * b))
        relative = miss / (np.abs(b) + np.sqrt(power))
        worst = int(np.argmax(relative))
        return Distance(float(np.mean(miss * miss)) / power, float(relative[worst]), worst)


def _beyond(differ: Array) -> Distance:
    wrong = np.flatnonzero(differ)
    return Distance(np.inf, np.inf, int(wrong[0]), wrong.size) if wrong.size else Distance(0.0, 0.0)
