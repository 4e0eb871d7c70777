"""Operations that exporters write as several nodes."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu

import opweave_onnx
from tests.support.onnx_models import model, node, value

X = np.linspace(-4, 4, 33, dtype=np.float32)
CONSTANTS = {"root": np.array(2**0.5, np.float32), "one": np.array(1, np.float32), "half": np.array([0.5], np.float32),
             "third": np.array(1 / 3, np.float32), "other": np.array(0.5**0.5, np.float32)}  # fmt: skip


def operations(nodes, constants=CONSTANTS):
    proto = model(nodes, [value("x", np.float32, [33])], ["y"], constants, version=17)
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        return [row.op for row in loaded.program({"x": X}).explain().nodes], loaded(x=X)


ERF = [node("Div", "x root", "u"), node("Erf", "u", "e"), node("Add", "e one", "f")]
OTHER = [node("Mul", "other x", "u"), node("Erf", "u", "e"), node("Add", "one e", "f")]


@pytest.mark.parametrize("erf", [ERF, OTHER])
@pytest.mark.parametrize("order", list(permutations(["x", "f", "half"])), ids="-".join)
def test_gelu_of_five_nodes_is_one_operation(erf, order):
    first, second, third = order
    for nodes in (
        [node("Mul", f"{first} {second}", "z"), node("Mul", f"z {third}", "y")],
        [node("Mul", f"{first} {second}", "z"), node("Mul", f"{third} z", "y")],
    ):
        found, y = operations([*erf, *nodes])
        assert found == ["gelu"]
        np.testing.assert_allclose(y, gelu(torch.from_numpy(X)).numpy(), atol=1e-6)


def test_what_only_looks_like_gelu_is_computed_as_it_stands():
    e = torch.special.erf(torch.from_numpy(X) / 2**0.5).numpy()
    for tail, want in (
        ([node("Mul", "x f", "z"), node("Mul", "z third", "y")], X * (1 + e) / 3),
        ([node("Mul", "x e", "z"), node("Mul", "z half", "y")], X * e / 2),
        ([node("Mul", "u f", "z"), node("Mul", "z half", "y")], X * 0.5**0.5 * (1 + e) / 2),
    ):
        found, y = operations([*ERF, *tail])
        assert "gelu" not in found
        np.testing.assert_allclose(y, want, atol=1e-6)
