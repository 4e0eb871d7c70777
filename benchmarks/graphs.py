"""What planning is measured on: chains, diamonds, U's and transformers of any number of nodes, one device and three.

Leaves are new in each call, so that nothing is remembered from one call to the next. Values have ``rows`` rows and
``columns`` columns of f32; ``place`` says on which device the weights of each part of the graph lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

import opweave as ow
from opweave_cpu.device import IsolatedCpuDevice

__all__ = [
    "GRAPHS", "MIXED", "PLACED", "Built", "Place", "chain", "configurations", "diamond", "separate_branches",
    "transformer", "u",
]  # fmt: skip

Place = Callable[[float], Any]
"""How far into the graph (0 .. 1) -> the device for weights there, or ``None``."""

_NAMES: Final = count()


def _nowhere(share: float) -> None:
    return None


def configurations() -> dict[int, tuple[list[ow.Device], Place]]:
    """Number of devices -> the devices and where weights lie.

    One is ``cpu``, with weights that are placed nowhere; three are CPU devices with separate memories, with a third of
    the weights on each.
    """
    os.environ.pop("OPWEAVE_CPU_DEVICES", None)  # or `cpu` would be three devices already
    one = [ow.device("cpu")]
    three = [ow.register_device(IsolatedCpuDevice(n), "cpu") for n in range(3)]
    return {1: (one, _nowhere), 3: (three, lambda share: three[int(share * 3)])}


class Built(NamedTuple):
    """A graph to be planned.

    Attributes:
        output: what is computed.
        again: makes the same output again by the same calls over the same leaves.
        feeds: input name -> array.
    """

    output: ow.Tensor
    again: Callable[[], ow.Tensor]
    feeds: dict[str, np.ndarray[Any, Any]]


def _input(shape: tuple[int, ...]) -> tuple[ow.Tensor, dict[str, np.ndarray[Any, Any]]]:
    x = ow.input(f"x{next(_NAMES)}", shape)
    return x, {x.name: np.full(shape, 0.5, np.float32)}


def _weights(arrays: Sequence[np.ndarray[Any, Any]], place: Place) -> list[ow.Tensor]:
    """One leaf for each array, the k-th of n on ``place(k / n)``."""
    where: dict[Any, dict[str, np.ndarray[Any, Any]]] = {}
    for k, array in enumerate(arrays):
        where.setdefault(place(k / len(arrays)), {})[str(k)] = array
    leaves: dict[str, ow.Tensor] = {}
    for device, group in where.items():
        leaves.update(ow.weights(group, device=device))
    return [leaves[str(k)] for k in range(len(arrays))]


def chain(nodes: int, rows: int = 4, columns: int = 4, place: Place = _nowhere) -> Built:
    """``x + w + w + ...``; the weights are those of tenths of the chain."""
    x, feeds = _input((rows, columns))
    weights = _weights([np.full((rows, columns), 1e-3, np.float32)] * 10, place)

    def build() -> ow.Tensor:
        h = x
        for i in range(nodes):
            h = h + weights[i * len(weights) // nodes]
        return h

    return Built(build(), build, feeds)


def diamond(nodes: int, rows: int = 4, columns: int = 4, place: Place = _nowhere) -> Built:
    """Each value is read by two branches of one and two nodes that meet again."""
    x, feeds = _input((rows, columns))
    weights = _weights([np.full((rows, columns), 1e-3, np.float32)] * 10, place)
    blocks = max(1, nodes // 4)

    def build() -> ow.Tensor:
        h = x
        for i in range(blocks):
            w = weights[i * len(weights) // blocks]
            h = ow.relu(h) + ow.tanh(h * w)
        return h

    return Built(build(), build, feeds)


def u(nodes: int, rows: int = 4, columns: int = 8, place: Place = _nowhere) -> Built:
    """A U with skips: each block on the way down is kept for the block of its level on the way up.

    Four levels; each has half the columns of the level above it. A block down is ``silu(linear)`` (2 nodes), a block up
    ``silu(linear(concat(h, skip)))`` (3 nodes), as in diffusion models.
    """
    x, feeds = _input((rows, columns))
    levels = [max(1, columns >> k) for k in range(4)]
    per_level = max(1, nodes // 20)
    widths = [level for level in levels for _ in range(per_level)]
    before = [columns, *widths]
    down = [np.full((n, m), 1e-2, np.float32) for m, n in zip(before[:-1], widths, strict=True)]
    up = [
        np.full((m, n + w), 1e-2, np.float32)
        for m, n, w in zip(reversed(before[:-1]), reversed(before[1:]), reversed(widths), strict=True)
    ]
    weights = _weights(_shared(down + up), place)

    def build() -> ow.Tensor:
        h, skips = x, []
        for w in weights[: len(down)]:
            h = ow.silu(ow.linear(h, w))
            skips.append(h)
        for w in weights[len(down) :]:
            h = ow.silu(ow.linear(ow.concat([h, skips.pop()], axis=-1), w))
        return h

    return Built(build(), build, feeds)


def transformer(nodes: int, rows: int = 4, columns: int = 16, heads: int = 2, place: Place = _nowhere) -> Built:
    """Decoder layers as in today's language models: RMS norms, attention, a gated MLP; 25 nodes, 8 of them views."""
    x, feeds = _input((rows, columns))
    layers, hidden, head = max(1, nodes // 25), 2 * columns, columns // heads
    square = np.full((columns, columns), 1e-2, np.float32)
    tall, wide = np.full((hidden, columns), 1e-2, np.float32), np.full((columns, hidden), 1e-2, np.float32)
    norm = np.ones(columns, np.float32)
    layer = [norm, square, square, square, square, norm, tall, tall, wide]
    weights = _weights(_shared(layer * layers), place)

    def split(h: ow.Tensor) -> ow.Tensor:
        return h.reshape(rows, heads, head).transpose(1, 0, 2)

    def build() -> ow.Tensor:
        h = x
        for i in range(layers):
            n1, wq, wk, wv, wo, n2, wg, wu, wd = weights[9 * i : 9 * i + 9]
            y = ow.rms_norm(h, n1)
            q, k, v = (split(ow.linear(y, w)) for w in (wq, wk, wv))
            scores = ow.softmax(q @ k.swapaxes(1, 2), scale=head**-0.5)
            mixed = (scores @ v).transpose(1, 0, 2).contiguous().reshape(rows, columns)
            h = h + ow.linear(mixed, wo)
            y = ow.rms_norm(h, n2)
            h = h + ow.linear(ow.silu(ow.linear(y, wg)) * ow.linear(y, wu), wd)
        return h

    return Built(build(), build, feeds)


def _shared(arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """The same arrays, one for each shape: a hundred thousand leaves need no bytes of their own to be planned with."""
    one: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}
    return [one.setdefault(a.shape, a) for a in arrays]


GRAPHS: Final[dict[str, Callable[..., Built]]] = {
    "chain": chain,
    "diamond": diamond,
    "u": u,
    "transformer": transformer,
}
"""Name -> ``(nodes, rows, columns, place=...)``."""


# --- what placement is measured on ----------------------------------------------------------------------------------


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


def digits_net(size: int = 1) -> Built:
    """As in ``examples/digits.py``: images of 64 pixels, two hidden layers, probabilities of ten digits."""
    rng = np.random.default_rng(0)
    x, feeds = _input((64 * size, 64))
    widths = (64, 256, 256, 10)
    weights = ow.weights({str(i): _random(rng, n, m) for i, (m, n) in enumerate(pairwise(widths))})

    def build() -> ow.Tensor:
        h = ow.relu(ow.linear(x, weights["0"]))
        h = ow.relu(ow.linear(h, weights["1"]))
        return ow.softmax(ow.linear(h, weights["2"]))

    return Built(build(), build, feeds)


def transformer_stack(size: int = 1) -> Built:
    """Four decoder layers of 128 columns over 64 rows."""
    return transformer(100, rows=64 * size, columns=128, heads=4)


def u_net(size: int = 1) -> Built:
    """Convolutions over 32 × 32 pixels, two levels down and up again, with skips."""
    rng = np.random.default_rng(0)
    x, feeds = _input((1, 8, 32 * size, 32 * size))
    channels = ((8, 8), (8, 16), (16, 32), (48, 16), (24, 8))
    weights = ow.weights({str(i): _random(rng, n, m, 3, 3) for i, (m, n) in enumerate(channels)})

    def block(h: ow.Tensor, i: int) -> ow.Tensor:
        return ow.silu(ow.conv2d(h, weights[str(i)], padding=1))

    def build() -> ow.Tensor:
        top = block(x, 0)
        middle = block(ow.avg_pool2d(top, 2), 1)
        low = block(ow.avg_pool2d(middle, 2), 2)
        h = block(ow.concat([ow.interpolate(low, scale_factor=2), middle], axis=1), 3)
        return block(ow.concat([ow.interpolate(h, scale_factor=2), top], axis=1), 4)

    return Built(build(), build, feeds)


def _expert_weights(
    rng: np.random.Generator, columns: int, hidden: int, make: Callable[..., Any], experts: int = 8
) -> dict[str, Any]:
    router = {"router": _random(rng, experts, columns)}
    return router | {
        name: make(rng, experts, *shape)
        for name, shape in (("up", (hidden, columns)), ("gate", (hidden, columns)), ("down", (columns, hidden)))
    }


def _to_experts(x: ow.Tensor, weights: Mapping[str, ow.Tensor]) -> ow.Tensor:
    """Each row, plus the weighed results of the two experts that it goes to."""
    share, ids = ow.top_k(ow.softmax(ow.linear(x, weights["router"])), 2)
    up, gate = ow.expert_linear(x, weights["up"], ids), ow.expert_linear(x, weights["gate"], ids)
    down = ow.expert_linear(ow.swiglu(up, gate), weights["down"], ids)
    return x + ow.sum(down * share.reshape(x.shape[0], 2, 1), axis=1)


def expert_block(size: int = 1) -> Built:
    """Each row goes to two of eight experts, whose results are weighed and added."""
    rng = np.random.default_rng(0)
    columns = 128
    x, feeds = _input((32 * size, columns))
    feeds = {name: _random(rng, *array.shape) for name, array in feeds.items()}
    weights = ow.weights(_expert_weights(rng, columns, 256, _random))

    def build() -> ow.Tensor:
        return _to_experts(x, weights)

    return Built(build(), build, feeds)


def wide_branches(size: int = 1) -> Built:
    """Eight branches of three nodes, some of products and some of elementary functions, added up."""
    rng = np.random.default_rng(0)
    x, feeds = _input((64 * size, 128))
    weights = ow.weights({str(i): _random(rng, 128, 128) for i in range(8)})

    def build() -> ow.Tensor:
        total = x
        for i in range(8):
            if i % 2:
                branch = ow.gelu(ow.linear(ow.tanh(x * (1.0 + i)), weights[str(i)]))
            else:
                branch = ow.softmax(ow.exp(ow.tanh(x * (1.0 + i))))
            total = total + branch
        return total

    return Built(build(), build, feeds)


PLACED: Final[dict[str, Callable[..., Built]]] = {
    "digits net": digits_net,
    "transformer stack": transformer_stack,
    "U-shaped net": u_net,
    "expert-routed block": expert_block,
    "wide branches": wide_branches,
}
"""Name -> ``(size)``: graphs of tens of nodes with weights that are placed nowhere."""


def strengths(size: int = 1) -> Built:
    """A product in bf16, then the largest eight of the values in each row: five nodes that are computed."""
    rng = np.random.default_rng(0)
    x, feeds = _input((256 * size, 512))
    feeds = {name: _random(rng, *array.shape) for name, array in feeds.items()}
    w = ow.weights({"w": _random(rng, 1024, 512).astype(ow.as_dtype("bf16").numpy)})["w"]

    def build() -> ow.Tensor:
        return ow.top_k(ow.cast(ow.linear(ow.cast(x, "bf16"), w), "f32"), 8)[0]

    return Built(build(), build, feeds)


def attention_and_experts(size: int = 1) -> Built:
    """Attention over 512 rows with f32 weights, then experts in bf16."""
    rng = np.random.default_rng(0)
    rows, columns, hidden, experts = 512 * size, 512, 1024, 8
    x, feeds = _input((rows, columns))
    feeds = {name: _random(rng, *array.shape) for name, array in feeds.items()}
    square = {name: _random(rng, columns, columns) for name in "qkvo"}
    expert = {
        "router": _random(rng, experts, columns),
        "up": _bf16(rng, experts, hidden, columns),
        "gate": _bf16(rng, experts, hidden, columns),
        "down": _bf16(rng, experts, columns, hidden),
    }
    weights = ow.weights(square | expert)

    def build() -> ow.Tensor:
        q, k, v = (ow.linear(x, weights[n]).reshape(1, rows, 8, 64).transpose(0, 2, 1, 3) for n in "qkv")
        mixed = ow.attention(q, k, v).transpose(0, 2, 1, 3).contiguous().reshape(rows, columns)
        h = x + ow.linear(mixed, weights["o"])
        share, ids = ow.top_k(ow.softmax(ow.linear(h, weights["router"])), 2)
        y = ow.cast(h, "bf16")
        up, gate = ow.expert_linear(y, weights["up"], ids), ow.expert_linear(y, weights["gate"], ids)
        down = ow.cast(ow.expert_linear(ow.swiglu(up, gate), weights["down"], ids), "f32")
        return h + ow.sum(down * share.reshape(rows, 2, 1), axis=1)

    return Built(build(), build, feeds)


def _bf16(rng: np.random.Generator, *shape: int) -> Any:
    return _random(rng, *shape).astype(ow.as_dtype("bf16").numpy)


def separate_branches(size: int = 1) -> Built:
    """Eight branches of two products, whose sums of rows meet at the end: devices that work at once can divide them."""
    rng = np.random.default_rng(0)
    x, feeds = _input((64 * size, 512))
    feeds = {name: _random(rng, *array.shape) for name, array in feeds.items()}
    weights = ow.weights({str(i): _random(rng, 512, 512) for i in range(8)})

    def build() -> ow.Tensor:
        branches = [ow.linear(ow.gelu(ow.linear(x, w)), w) for w in weights.values()]
        return ow.concat([ow.sum(branch, axis=1) for branch in branches])

    return Built(build(), build, feeds)


MIXED: Final[dict[str, Callable[..., Built]]] = {
    "strengths": strengths,
    "attention and experts": attention_and_experts,
}
"""Name -> ``(size)``: graphs whose parts are fastest on different devices."""
