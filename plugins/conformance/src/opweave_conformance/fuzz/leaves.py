"""`Leaves`: the leaves of a random graph with their values, which a seed and a few words repeat."""

from __future__ import annotations

from math import prod
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave_conformance.case import Operand, Values
from opweave_conformance.values import make_values

__all__ = ["Leaves", "leaf_array"]

Array = np.ndarray[Any, Any]


class Leaves:
    """The leaves of one graph. ``values`` holds the present value of each; inputs have others in each run."""

    def __init__(self) -> None:
        self.values: Final[dict[Tensor, Array]] = {}
        self._inputs: Final[dict[Tensor, tuple[Operand, int]]] = {}

    def input(self, name: str, shape: Shape, dtype: str = "f32", **kind: Any) -> Tensor:
        """An input; ``kind`` as for `_values`."""
        tensor = ow.input(name, shape, dtype)
        operand, seed = _operand(shape, dtype, **kind)
        self._inputs[tensor] = operand, seed
        self.values[tensor] = leaf_array(operand, operand.shape, seed)
        return tensor

    def weight(self, name: str, shape: Shape, dtype: str = "f32", *, device: str | None = None, **kind: Any) -> Tensor:
        """A weight, on ``device`` or where programs need it."""
        array = _values(shape, dtype, **kind)
        given = ow.Blocks(array, shape, as_dtype(dtype)) if as_dtype(dtype).is_quantized else array
        tensor = ow.weights({name: given}, device=device)[name]
        self.values[tensor] = array
        return tensor

    def constant(self, name: str, shape: Shape, dtype: str = "f32", **kind: Any) -> Tensor:
        """A constant."""
        array = _values(shape, dtype, **kind)
        tensor = ow.constant(array, dtype, name=name)
        self.values[tensor] = array
        return tensor

    def state(self, name: str, shape: Shape, dtype: str = "f32", *, device: str | None = None, **kind: Any) -> Tensor:
        """A state with values, on ``device`` or where the first program places it."""
        array = _values(shape, dtype, **kind)
        tensor = ow.state(name, shape, dtype, device=device)
        ow.write(tensor, ow.Blocks(array, shape, as_dtype(dtype)) if as_dtype(dtype).is_quantized else array)
        self.values[tensor] = array
        return tensor

    def number(self, value: Any, dtype: str) -> Tensor:
        """A constant of one number."""
        tensor = ow.constant(value, dtype)
        self.values[tensor] = np.array(value, as_dtype(dtype).numpy)
        return tensor

    def next_run(self) -> None:
        """Give the inputs new values."""
        for tensor, (operand, seed) in self._inputs.items():
            self._inputs[tensor] = operand, seed + 1
            self.values[tensor] = leaf_array(operand, operand.shape, seed + 1)

    def feeds(self) -> dict[str, Any]:
        """Copies of the inputs' values by name."""
        return {t.name: self.values[t].copy() for t in self._inputs}


def _operand(shape: Shape, dtype: str, values: Values = "normal", high: int = 0, seed: int = 0) -> tuple[Operand, int]:
    return Operand(shape, dtype, values=values, high=high), seed


def leaf_array(operand: Operand, shape: Shape, seed: int) -> Array:
    """The values of the leaf of an operand; the seed repeats them."""
    if not prod(shape):
        dtype = as_dtype(operand.dtype)
        last = dtype.row_bytes(shape[-1]) if dtype.is_quantized else shape[-1]
        return np.empty((*shape[:-1], last), dtype.numpy)
    return make_values(np.random.default_rng(seed), operand, shape, as_dtype(operand.dtype))


def _values(shape: Shape, dtype: str, **kind: Any) -> Array:
    operand, seed = _operand(shape, dtype, **kind)
    return leaf_array(operand, shape, seed)
