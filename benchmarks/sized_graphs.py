"""Graphs that are built again at other sizes over the same leaves: an encoder, a decoder with a cache, a stack.

Weights are random f32, and new in each `Sized`, so that nothing is remembered from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np

import opweave as ow

__all__ = ["SIZED", "Sized", "decoder", "encoder", "stack"]

_NAMES: Final = count()


class Sized(NamedTuple):
    """A graph of any size.

    Attributes:
        at: size -> the output.
        sizes: that of the first build, and those of later ones.
    """

    at: Callable[[int], ow.Tensor]
    sizes: tuple[int, ...]


def _matrices(rng: np.random.Generator, layers: int, columns: int, hidden: int) -> list[dict[str, ow.Tensor]]:
    def matrix(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    arrays = {}
    for i in range(layers):
        arrays.update({f"{i}.{name}": matrix(columns, columns) for name in "qkvo"})
        arrays.update({f"{i}.up": matrix(hidden, columns), f"{i}.down": matrix(columns, hidden)})
        arrays.update({f"{i}.n{k}": np.ones(columns, np.float32) for k in range(2)})
    leaves = ow.weights(arrays)
    names = (*"qkvo", "up", "down", "n0", "n1")
    return [{name: leaves[f"{i}.{name}"] for name in names} for i in range(layers)]


def _heads(h: ow.Tensor, heads: int) -> ow.Tensor:
    rows, columns = h.shape
    return h.reshape(rows, heads, columns // heads).transpose(1, 0, 2)


def _joined(h: ow.Tensor) -> ow.Tensor:
    heads, rows, head = h.shape
    return h.transpose(1, 0, 2).contiguous().reshape(rows, heads * head)


def encoder(layers: int = 6, columns: int = 384, heads: int = 12, hidden: int = 1536) -> Sized:
    """A sentence encoder of the size of MiniLM-L6, for 128 tokens and then for others."""
    weights, name = _matrices(np.random.default_rng(0), layers, columns, hidden), f"tokens{next(_NAMES)}"

    def at(rows: int) -> ow.Tensor:
        h = ow.input(name, (rows, columns))
        for w in weights:
            q, k, v = (_heads(ow.linear(h, w[key]), heads) for key in "qkv")
            scores = ow.softmax(q @ k.swapaxes(1, 2), scale=(columns // heads) ** -0.5)
            h = ow.rms_norm(h + ow.linear(_joined(scores @ v), w["o"]), w["n0"])
            h = ow.rms_norm(h + ow.linear(ow.gelu(ow.linear(h, w["up"])), w["down"]), w["n1"])
        return h

    return Sized(at, (128, 129, 130))


def decoder(layers: int = 6, columns: int = 384, heads: int = 12, hidden: int = 1536, longest: int = 512) -> Sized:
    """One token at a time against the part of a cache that is filled, which grows with each token."""
    weights, number = _matrices(np.random.default_rng(0), layers, columns, hidden), next(_NAMES)
    shape = (longest, columns)
    caches = [[ow.state(f"{key}{i}.{number}", shape) for key in "kv"] for i in range(layers)]
    ids, token = ow.input(f"at{number}", (1,), "i64"), ow.input(f"token{number}", (1, columns))

    def at(filled: int) -> ow.Tensor:
        h = token
        for w, states in zip(weights, caches, strict=True):
            y = ow.rms_norm(h, w["n0"])
            q = _heads(ow.linear(y, w["q"]), heads)
            k, v = (
                _heads(ow.index_copy(state, ids, ow.linear(y, w[key]))[:filled], heads)
                for key, state in zip("kv", states, strict=True)
            )
            scores = ow.softmax(q @ k.swapaxes(1, 2), scale=(columns // heads) ** -0.5)
            h = h + ow.linear(_joined(scores @ v), w["o"])
            y = ow.rms_norm(h, w["n1"])
            h = h + ow.linear(ow.silu(ow.linear(y, w["up"])), w["down"])
        return h

    return Sized(at, (128, 129, 130))


def stack(layers: int = 60, columns: int = 16, heads: int = 2) -> Sized:
    """1,000 steps of an encoder on small values, of which building is all that it costs."""
    made = encoder(layers, columns, heads, 2 * columns)
    return Sized(made.at, (4, 5, 6))


SIZED: Final[dict[str, Callable[[], Sized]]] = {"encoder": encoder, "decoder": decoder, "stack": stack}
"""Name -> a new graph."""
