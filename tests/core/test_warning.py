"""The warning that an array of float64, NumPy's default, has turned values into f64."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import opweave as ow

WIDE = np.ones(3)
X = ow.input("x", (3,))


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr("opweave.warning._told", False)


def scaled(x):
    return x * 2.0


def quiet(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build()


def test_an_array_of_float64_that_is_fed_is_told_once_at_the_line_of_the_call():
    function = ow.compile(scaled, devices="host")
    with pytest.warns(ow.OpweaveWarning, match="the array for 'x' of .*float64") as told:
        function(WIDE)
    assert [warning.filename for warning in told] == [__file__]
    quiet(lambda: function(np.ones(4)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: X * WIDE,
        lambda: WIDE + X,
        lambda: X - ow.constant(WIDE),
        lambda: ow.linear(X.astype("f16"), ow.constant(np.ones((2, 3)))[:1]),
        lambda: ow.where(X > 0, X, WIDE),
    ],
    ids=["operand", "left", "constant", "view", "where"],
)
def test_an_array_of_float64_that_meets_narrower_floats_is_told_once(build):
    with pytest.warns(ow.OpweaveWarning, match=r"constant.*float64.*astype\(np.float32\)") as told:
        assert build().dtype.name == "f64"
    assert [warning.filename for warning in told] == [__file__]
    quiet(build)


@pytest.mark.parametrize(
    "build",
    [
        lambda: X * ow.constant(WIDE, "f64"),
        lambda: X * np.float64(2),
        lambda: X * 2.5,
        lambda: ow.input("y", (3,), "f64") * WIDE,
        lambda: ow.constant(WIDE) * 2.0,
        lambda: ow.input("i", (3,), "i32") * WIDE,
        lambda: ow.compile(scaled, devices="host")(np.ones(3, np.float32)),
        lambda: ow.compile(scaled, devices="host")([1.0, 2.0]),
        lambda: ow.compile(scaled(ow.input("z", (3,), "f64")), devices="host")(WIDE),
    ],
    ids=["given", "scalar", "number", "input", "alone", "integers", "f32", "list", "outputs"],
)
def test_what_is_meant_or_changes_nothing_is_not_told(build):
    quiet(build)
