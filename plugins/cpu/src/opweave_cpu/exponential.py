"""Powers of e for activations: by way of powers of 2 where NumPy makes those in half the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import e, log2
from typing import Any

import numpy as np

from opweave.graph.dtypes import DType
from opweave_cpu.hardware import has_avx512

__all__ = ["exponential"]


@cache
def exponential(dtype: DType) -> tuple[Callable[..., Any], float]:
    """A ufunc ``f`` and a factor ``c`` with f(c x) = e**x, for kernels that multiply by a constant anyway.

    The rounded product makes the relative error as many times as large as x is: 4e-6 in f32 where e**x is about to
    become 0 or infinite. Powers of 2 beyond that take ten times as long as those of e, and more where they are not
    normal numbers: nothing for a softmax, whose hidden elements are all of them 0.
    """
    if dtype.name == "f32" and has_avx512():
        return np.exp2, log2(e)
    return np.exp, 1.0
