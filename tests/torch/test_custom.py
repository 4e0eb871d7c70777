"""Python functions as nodes, on torch's devices."""

from __future__ import annotations

import numpy as np
import torch

import opweave as ow


def test_functions_may_ask_for_gradients():
    layer = torch.nn.Linear(4, 4)

    def gradient(array: np.ndarray) -> np.ndarray:
        x = torch.tensor(array, requires_grad=True)
        (layer(x) ** 2).sum().backward()
        assert x.grad is not None
        return x.grad.numpy()

    x = ow.input("x", (4,))
    program = ow.Scheduler("torch:cpu").build(ow.custom(gradient, -x, like=x) * 2.0)
    value = np.arange(4, dtype=np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(program.run(x=value), 2 * gradient(-value))
