"""Work that takes long shows a bar of progress on a terminal."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.progress import shown
from tests.support.devices import Separate


@pytest.mark.parametrize("patience", [-1.0, 1e9])
def test_all_items_are_given_in_order_with_a_bar_or_without(monkeypatch, capsys, patience):
    monkeypatch.setattr("opweave.progress.PATIENCE", patience)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(shown(range(5), "counting")) == [0, 1, 2, 3, 4]
    assert ("counting" in capsys.readouterr().err) is (patience < 0)


def test_uploading_weights_that_takes_long_says_where_to(monkeypatch, capsys):
    monkeypatch.setattr("opweave.progress.PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    arrays = {name: np.full(3, i, "f4") for i, name in enumerate("abc")}
    weights = ow.weights(arrays, device=Separate("card"))
    assert "uploading to card" in capsys.readouterr().err
    for name, array in arrays.items():
        np.testing.assert_array_equal(ow.read(weights[name]), array)


def test_nothing_is_shown_where_standard_error_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr("opweave.progress.PATIENCE", -1.0)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert list(shown(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
