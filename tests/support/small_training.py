"""A small perceptron and its examples, for tests of the loop and for processes that they start."""

from __future__ import annotations

import numpy as np

import opweave as ow
from opweave_training import AdamW, Trainer

_RNG = np.random.default_rng(3)
X = _RNG.standard_normal((96, 6)).astype(np.float32)
Y = (X[:, :3].argmax(1)).astype(np.int32)
DATA = {"x": X, "labels": Y}
FIRST = {
    "w0": _RNG.standard_normal((16, 6)).astype(np.float32) * 0.4, "b0": np.zeros(16, np.float32),
    "w1": _RNG.standard_normal((3, 16)).astype(np.float32) * 0.25, "b1": np.zeros(3, np.float32),
}  # fmt: skip


def parameters(dtype="f32"):
    """States with the values of ``FIRST``."""
    params = {name: ow.state(name, a.shape, dtype) for name, a in FIRST.items()}
    for name, param in params.items():
        ow.write(param, FIRST[name])
    return params


def network(x, params):
    h = ow.relu(ow.linear(x, params["w0"], params["b0"]))
    return ow.linear(h, params["w1"], params["b1"])


def trainer(make=AdamW, lr=0.01, dtype="f32", **options):
    params = parameters(dtype)

    def model(x):
        return network(x.astype(dtype), params)

    options = {"batch": 8, "devices": "cpu", **options}
    return Trainer(model, make(params), lr, **options)
