"""A small perceptron of integers, whose results are exact on any number of devices."""

from __future__ import annotations

from typing import Any

import numpy as np

import opweave as ow

__all__ = ["DOWN", "UP", "VALUE", "WANT", "mlp"]

UP = np.random.default_rng(0).integers(-3, 4, (96, 48)).astype(np.float32)
DOWN = np.random.default_rng(1).integers(-3, 4, (48, 96)).astype(np.float32)
VALUE = np.random.default_rng(2).integers(-3, 4, (5, 48)).astype(np.float32)
WANT = np.maximum(VALUE @ UP.T, 0) @ DOWN.T


def mlp(name: str, device: Any) -> ow.Tensor:
    """Its output for the input ``name`` of shape (5, 48), with weights placed on ``device``: `WANT` for `VALUE`."""
    w = ow.weights({"up": UP, "down": DOWN}, device=device)
    return ow.linear(ow.relu(ow.linear(ow.input(name, (5, 48)), w["up"])), w["down"])
