"""Small graphs with operations of every family, for running them split over two devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave import ops
from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor
from opweave.graph.tensor import input as leaf
from opweave.leaves import state, weights

if TYPE_CHECKING:
    from opweave.contract import Device

__all__ = ["MODELS", "LeafDevices", "Model"]

Array = np.ndarray[Any, Any]


class LeafDevices(NamedTuple):
    """The devices that weights and states are placed on; ``None``: unplaced, programs upload them where they are
    used."""

    weights: Device | None
    states: Device | None


class Model(NamedTuple):
    """A graph to try.

    Attributes:
        build: makes its outputs, with new leaves.
        ids: input that holds indices -> the number of rows they index; all other inputs hold normal values.
        repeatable: each run gives the same bits; ``False`` if the order of a sum is not defined.
    """

    build: Callable[[LeafDevices], tuple[Tensor, ...]]
    ids: Mapping[str, int]
    repeatable: bool

    def feeds(self, outputs: tuple[Tensor, ...], rng: np.random.Generator) -> dict[str, Array]:
        """Random values for the inputs."""
        result = {}
        for x in Graph(outputs).leaves:
            if x.leaf is not None and x.leaf.kind == "input":
                high = self.ids.get(x.key)
                values = rng.standard_normal(x.shape) if high is None else rng.integers(0, high, x.shape)
                result[x.key] = values.astype(x.dtype.numpy)
        return result


MODELS: Final[dict[str, Model]] = {}


def _model(name: str, ids: Mapping[str, int] | None = None, *, repeatable: bool = True) -> Callable[[Any], None]:
    def enter(build: Callable[[LeafDevices], tuple[Tensor, ...]]) -> None:
        MODELS[name] = Model(build, ids or {}, repeatable)

    return enter


def _weights(devices: LeafDevices, **shapes: tuple[int, ...]) -> list[Tensor]:
    """Weights of the given shapes, always the same values."""
    rng = np.random.default_rng(1)
    arrays = {name: (rng.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in shapes.items()}
    return list(weights(arrays, device=devices.weights).values())


def _state(devices: LeafDevices, name: str, *shape: int) -> Tensor:
    return state(name, shape, device=devices.states)


@_model("pointwise")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x, y = leaf("x", (5, 33)), leaf("y", (33,))
    h = ops.relu(x * y + x)
    return (h - y,)


@_model("functions")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x = leaf("x", (3, 40))
    return (ops.exp(ops.tanh(ops.gelu(x))) * ops.sigmoid(x),)


@_model("inplace-chain")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x, y = leaf("x", (64,)), leaf("y", (64,))
    h = x + y
    for _ in range(3):
        h = ops.neg(ops.relu(h)) + x
    return (h,)


@_model("diamond")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x = leaf("x", (4, 16))
    h = x + 1
    left, right = ops.relu(h), ops.neg(h)
    return (left * right + h,)


@_model("views")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x = leaf("x", (6, 8))
    h = ops.neg(x)
    turned = ops.relu(h.T)
    part = turned[1:7:2] + h[:, 2:5].T
    return (part.reshape(3, 2, 3) * part[:, :1].reshape(3, 1, 1).broadcast_to((3, 2, 3)),)


@_model("reduction")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x = leaf("x", (7, 19))
    centred = x - ops.mean(x, axis=-1, keepdims=True)
    return ops.sum(centred * centred, axis=-1), ops.max(centred, axis=0)


@_model("products")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    w, b, v = _weights(devices, w=(24, 16), b=(24,), v=(24, 12))
    h = ops.relu(ops.linear(leaf("x", (6, 16)), w, b))
    return (ops.matmul(h, v),)


@_model("norms")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    w, b = _weights(devices, w=(32,), b=(32,))
    h = ops.layer_norm(leaf("x", (5, 32)), w, b)
    return (ops.softmax(ops.rms_norm(h, w) + h),)


@_model("attention")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    wq, wk, wv, wo = _weights(devices, q=(16, 16), k=(16, 16), v=(16, 16), o=(16, 16))
    x = leaf("x", (6, 16))
    q, k, v = (ops.linear(x, w).reshape(1, 6, 2, 8).transpose((0, 2, 1, 3)) for w in (wq, wk, wv))
    h = ops.attention(q, k, v, causal=True)
    return (x + ops.linear(h.transpose((0, 2, 1, 3)).reshape(6, 16), wo),)


@_model("indexing", {"ids": 11, "columns": 8})
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    (table,) = _weights(devices, table=(11, 8))
    rows = ops.embedding(table, leaf("ids", (5,), "i32"))
    picked = ops.take_along_axis(ops.neg(rows), leaf("columns", (5, 3), "i64"))
    return (ops.concat([picked, rows], axis=1),)


@_model("scatter", {"ids": 6}, repeatable=False)
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    rows = ops.relu(leaf("x", (9, 4)))
    return (ops.index_add(leaf("ids", (9,), "i32"), rows, 6) + 1,)


@_model("experts", {"ids": 4})
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    (w,) = _weights(devices, w=(4, 12, 8))
    return (ops.relu(ops.expert_linear(leaf("x", (5, 8)), w, leaf("ids", (5, 2), "i32"))),)


@_model("convolution")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    w, b = _weights(devices, w=(4, 3, 3, 3), b=(4,))
    h = ops.relu(ops.conv2d(leaf("x", (1, 3, 8, 8)), w, b, padding=1))
    return (ops.max_pool2d(h, 2),)


@_model("types")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x = leaf("x", (4, 9))
    return ops.cast(ops.cast(x * 8, "i32") + 3, "f32") + ops.cast(ops.cast(x, "f16"), "f32"), ops.cast(x, "bf16")


@_model("choosing")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x = leaf("x", (5, 12))
    order = ops.argsort(x, stable=True)
    return ops.take_along_axis(x, order) + ops.maximum(x, ops.neg(x)), ops.argmax(x, axis=1)


@_model("outputs")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    x, y = leaf("x", (3, 5)), leaf("y", (3, 5))
    h = x + y
    g = ops.neg(h)
    return g, h, ops.relu(g).T, x, h


@_model("state-written")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    total, x = _state(devices, "total", 4, 6), leaf("x", (4, 6))
    new = ops.assign(total, total + ops.relu(x))
    return ops.neg(new) + x, new


@_model("state-read-before")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    kept, x = _state(devices, "kept", 4, 6), leaf("x", (4, 6))
    before = ops.neg(kept) + 1
    new = ops.assign(kept[1:3], ops.relu(x)[1:3])
    return before, new * 2


@_model("state-rows", {"ids": 8})
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    cache, x = _state(devices, "cache", 8, 5), leaf("x", (1, 5))
    new = ops.index_copy(cache, leaf("ids", (1,), "i64"), ops.neg(x))
    return (ops.matmul(new, x.T),)


@_model("layers")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    h = leaf("x", (64, 64))
    for w in _weights(devices, a=(64, 64), b=(64, 64), c=(64, 64), d=(64, 64)):
        h = ops.relu(ops.linear(h, w) * 0.25)
    return (h,)


@_model("quantized-weights")
def _(devices: LeafDevices) -> tuple[Tensor, ...]:
    values = np.arange(24 * 256, dtype=np.float32).reshape(24, 256) % 251 - 125
    w = weights({"w": ops.quantize(values, "mxfp4")}, device=devices.weights)["w"]
    return (ops.relu(ops.linear(leaf("x", (3, 256)), w)),)
