"""`distance`: how far an array is from the correct one."""

from __future__ import annotations

import numpy as np
import pytest

from opweave.tools.distance import distance

F = np.float32


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        (np.ones(4, F), np.ones(4, F), (0, 0)),
        (np.array([1, np.nan]), np.array([1, np.nan]), (0, 0)),
        (np.array([1, np.inf]), np.array([1, -np.inf]), (np.inf, np.inf)),
        (np.array([1, 2]), np.array([1, 3]), (np.inf, np.inf)),
        (np.array([1.0, 3.0]), np.array([1.0, 2.0]), (0.2, 1 / (2 + 2.5**0.5))),
        (np.array([1.0]), np.array([0.0]), (np.inf, np.inf)),
    ],
)
def test_distance(got, want, expected):
    assert distance(got, want)[:2] == pytest.approx(expected)
