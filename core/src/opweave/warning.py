"""`OpweaveWarning`, and the warning that values are computed in f64 though nobody may have meant it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["OpweaveWarning", "warn_caller", "warn_of_f64"]

_PACKAGE = str(Path(__file__).parent)
_told = False


class OpweaveWarning(UserWarning):
    """Something works, but perhaps not as it was meant. ``warnings.filterwarnings("ignore", category=...)`` ends it."""


def warn_caller(text: str) -> None:
    """Warn at the caller's line outside of opweave."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, OpweaveWarning, stacklevel=level)


def warn_of_f64(what: str) -> None:
    """Warn once in the life of the process, at the caller's line outside of opweave, that ``what`` is float64."""
    global _told
    if _told:
        return
    _told = True
    warn_caller(
        f"{what} is float64, NumPy's default, and so values are computed in f64, which is slow on most devices and "
        "missing on some. Convert with .astype(np.float32), or give the dtype: ow.constant(values, dtype='f64'), "
        "ow.input(name, shape, 'f64'). This is said once."
    )
