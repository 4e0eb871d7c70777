"""Cases of functions as nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from opweave import ops
from opweave.conformance.case import Case, Operand, case


def _outer(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.outer(a, b)


def cases() -> Iterator[Case]:
    yield case("custom", lambda a, b: ops.custom(_outer, a, b, like=((3, 5), "f32")), Operand((3,)), Operand((5,)))
