"""Random graphs: all families of operations, views, several outputs, states written and read, aliasing leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

import opweave as ow
from opweave.graph.opdef import OPS

__all__ = ["ALL_OPS", "FAMILIES", "Case"]

ALL_OPS = tuple(name for name, op in OPS.items() if not op.is_view and name != "custom")
"""What a device may be given kernels for. (`custom` runs on the host.)"""

N = 6


def random_view(rng: random.Random, t: ow.Tensor) -> ow.Tensor:
    choice = rng.randrange(4)
    if choice == 0:
        return t.T
    if choice == 1:
        return t.reshape(N * N).reshape(N, N)
    if choice == 2:
        half = t[: N // 2]
        return ow.concat([half, t[N // 2 :]], axis=0)
    return t[0:1].broadcast_to((N, N))


Make = Callable[[random.Random, ow.Tensor, ow.Tensor], ow.Tensor]


def ids(rng: random.Random, *shape: int, below: int = N) -> ow.Tensor:
    return ow.constant(np.random.default_rng(rng.randrange(1 << 30)).integers(0, below, shape))


def image(t: ow.Tensor) -> ow.Tensor:
    return t.reshape(1, 1, N, N)


def flat(t: ow.Tensor) -> ow.Tensor:
    return t.reshape(N, N)


def kernel(rng: random.Random, *shape: int) -> ow.Tensor:
    values = np.random.default_rng(rng.randrange(1 << 30)).integers(-1, 2, shape)
    return ow.constant(values.astype(np.float32))


def scanned(rng: random.Random, t: ow.Tensor, u: ow.Tensor) -> ow.Tensor:
    step = ow.clamp(u.reshape(1, N, N), 0, 1)
    y = ow.selective_scan(t.reshape(1, N, N), step, -1 + kernel(rng, N, 2), kernel(rng, 1, 2, N), kernel(rng, 1, 2, N))
    return flat(y)


FAMILIES: dict[str, list[Make]] = {
    "elementwise": [
        lambda rng, t, u: t + u,
        lambda rng, t, u: t - u,
        lambda rng, t, u: t * u,
        lambda rng, t, u: t + u[:, 0:1],
        lambda rng, t, u: ow.neg(t),
        lambda rng, t, u: ow.scale(t, rng.choice([0.5, -1.0, 0.25]), 1.0),
        lambda rng, t, u: ow.maximum(t, u),
        lambda rng, t, u: ow.minimum(t, ow.abs(u)),
        lambda rng, t, u: ow.clamp(t, -3, 3),
    ],
    "activation": [
        lambda rng, t, u: ow.relu(t),
        lambda rng, t, u: ow.silu(t),
        lambda rng, t, u: ow.tanh(t),
        lambda rng, t, u: ow.hardswish(t),
    ],
    "gated": [lambda rng, t, u: ow.swiglu(t, u), lambda rng, t, u: ow.reglu(t, u)],
    "rounding": [lambda rng, t, u: ow.floor(t), lambda rng, t, u: ow.round(t * 0.5), lambda rng, t, u: ow.sign(t)],
    "selection": [lambda rng, t, u: ow.where(ow.cast(ow.step(t), "bool"), t, u), lambda rng, t, u: ow.tril(t)],
    "reduction": [
        lambda rng, t, u: u + ow.sum(t, axis=rng.randrange(2), keepdims=True),
        lambda rng, t, u: u - ow.max(t, axis=1, keepdims=True),
        lambda rng, t, u: ow.cumsum(t, axis=rng.randrange(2)),
    ],
    "normalization": [
        lambda rng, t, u: ow.softmax(t, axis=rng.randrange(2)),
        lambda rng, t, u: ow.rms_norm(t),
        lambda rng, t, u: ow.layer_norm(t),
    ],
    "matmul": [
        lambda rng, t, u: ow.clamp(t, -2, 2) @ ow.clamp(u, -2, 2),
        lambda rng, t, u: ow.linear(ow.clamp(t, -2, 2), kernel(rng, N, N)),
    ],
    "attention": [
        lambda rng, t, u: flat(ow.attention(image(t), image(u), image(t))),
        lambda rng, t, u: flat(ow.attention(image(t), image(t), image(u), causal=True)),
    ],
    "convolution": [lambda rng, t, u: flat(ow.conv2d(image(ow.clamp(t, -3, 3)), kernel(rng, 1, 1, 3, 3), padding=1))],
    "pooling": [lambda rng, t, u: flat(ow.interpolate(ow.max_pool2d(image(t), 2), (N, N)))],
    "movement": [
        lambda rng, t, u: ow.concat([t[: N // 2], u[N // 2 :]], axis=0),
        lambda rng, t, u: ow.roll(t, rng.randrange(N), axis=rng.randrange(2)),
        lambda rng, t, u: ow.flip(t, axis=rng.randrange(2)),
        lambda rng, t, u: ow.pad(t[1:, 1:], ((1, 0), (0, 1))),
        lambda rng, t, u: ow.cast(ow.cast(t, "f16"), "f32"),
    ],
    "indexing": [
        lambda rng, t, u: ow.embedding(t, ids(rng, N)),
        lambda rng, t, u: ow.take_along_axis(t, ids(rng, N, N), 1),
    ],
    "sorting": [lambda rng, t, u: ow.take_along_axis(t, ow.argsort(u), -1), lambda rng, t, u: ow.top_k(t, N)[0]],
    "rope": [lambda rng, t, u: flat(ow.rope(image(t), ids(rng, N, below=20)))],
    "experts": [
        lambda rng, t, u: ow.expert_linear(ow.clamp(t, -2, 2), kernel(rng, 3, N, N), ids(rng, N, 1, below=3)).reshape(
            N, N
        )
    ],
    "state_space": [scanned],
    "custom": [lambda rng, t, u: ow.custom(np.abs, t, like=t)],
}


def random_node(rng: random.Random, t: ow.Tensor, u: ow.Tensor) -> ow.Tensor:
    """Half of the nodes are the cheap ones of which chains are made."""
    family = "elementwise" if rng.random() < 0.4 else rng.choice(list(FAMILIES))
    return rng.choice(FAMILIES[family])(rng, t, u)


class Case:
    """A random graph with its leaves' values."""

    def __init__(self, rng: random.Random, devices: Sequence[ow.Device] = ()) -> None:
        """``devices``: where weights are placed at random, vectors too; without, there are only unplaced matrices."""
        self.rng = rng
        values = np.random.default_rng(rng.randrange(1 << 30))
        self.leaves: dict[ow.Tensor, np.ndarray] = {}
        self.feeds: dict[str, np.ndarray] = {}
        pool: list[ow.Tensor] = []
        for i in range(rng.randint(1, 3)):
            x = ow.input(f"x{i}", (N, N))
            self.feeds[x.name] = self.leaves[x] = values.integers(-4, 5, (N, N)).astype(np.float32)
            pool.append(x)
        shared = values.integers(-4, 5, (2 * N, N)).astype(np.float32)
        weights = ow.weights({"a": shared[:N], "b": shared[N:], "all": shared})
        pool += [weights["a"], weights["b"], weights["all"][3 : 3 + N]]
        self.vectors: list[tuple[ow.Tensor, ow.Tensor]] = []
        for i, device in enumerate(devices):
            arrays = {f"{name}{i}": values.integers(-2, 3, (N, N)).astype(np.float32) for name in "mn"}
            arrays |= {f"{name}{i}": values.integers(-2, 3, N).astype(np.float32) for name in "gh"}
            placed = ow.weights(arrays, device=device)
            pool += [placed[f"m{i}"], placed[f"n{i}"]]
            self.vectors.append((placed[f"g{i}"], placed[f"h{i}"]))
        self.states: list[ow.Tensor] = []
        self.latest: list[ow.Tensor] = []
        for i in range(rng.randrange(3)):
            state = ow.state(f"s{i}", (N, N), fill=i + 1)
            self.leaves[state] = np.full((N, N), i + 1, np.float32)
            self.states.append(state)
            self.latest.append(state)
            pool.append(state)
        self.nodes: list[ow.Tensor] = []
        for _ in range(rng.randint(3, 25)):
            t, u = rng.choice(pool), rng.choice(pool)
            if rng.random() < 0.25:
                t = random_view(rng, t)
            if self.latest and rng.random() < 0.15:
                self.write(t, pool)
                continue
            if self.vectors and rng.random() < 0.2:
                node = ow.layer_norm(t, *rng.choice(self.vectors))
            else:
                node = random_node(rng, t, u)
            self.nodes.append(node)
            pool.append(node)
        computed = [t for t in pool if t.op is not None and t.memory is t.root]
        count = min(len(computed), rng.randint(1, 3))
        self.outputs = [*rng.sample(computed, count), *[v for v in self.latest if v.op is not None]]

    def write(self, value: ow.Tensor, pool: list[ow.Tensor]) -> None:
        i = self.rng.randrange(len(self.latest))
        old = self.latest[i]
        rows = self.rng.choice([slice(0, N), slice(1, 3), slice(N - 2, N)])
        if value.memory is old.memory:
            value = ow.neg(value)
        new = ow.assign(old[rows], value[rows])
        self.latest[i] = new
        self.nodes.append(new)
        # Old versions stay in the pool: their readers must come before the writer, or the graph is refused.
        if self.rng.random() < 0.8:
            pool[:] = [t for t in pool if t.root is not old]
        pool.append(new)
