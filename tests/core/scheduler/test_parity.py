"""The rows of ``docs/coming-from-ggml.md`` that no other test covers: operations against their definition in NumPy, and
the less used functions of schedulers, registries and devices.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_models
from opweave.contract.kernels import KernelTable
from opweave.runtime.host.device import HostDevice
from opweave_training import SGD, AdamW
from tests.support.devices import Plain, Separate

F = np.float32
Array = np.ndarray[Any, Any]


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


# --- operations -------------------------------------------------------------------------------------------------------

DATA: dict[str, Array] = {
    "a": array(4, 6),
    "b": array(4, 6, seed=1),
    "w": array(5, 6, seed=2),
    "row": array(1, 6, seed=3),
    "ids": np.array([3, 0, 3]),
    "mask": np.where(np.tril(np.ones((4, 6))), 0, -np.inf).astype(F),
    "routes": np.array([[2, 0], [1, 1], [0, 2], [2, 1]]),
    "experts": array(3, 5, 6, seed=4),
    "rows": array(2, 4, 6, seed=5),
    "heads": array(1, 4, 3, 6, seed=6),
    "image": array(2, 4, 5, 6, seed=7),
    "kernel": array(3, 4, 3, 2, seed=8),
    "steps": np.abs(array(2, 4, 6, seed=9)),
    "decay": -np.abs(array(4, 3, seed=10)),
    "maps": array(2, 3, 6, seed=11),
    "volume": array(2, 4, 3, 5, 6, seed=12),
}
"""Operands by name. ``positive`` and ``state`` are made of ``a``."""


def changed(state: Array, key: Any, value: Array) -> Array:
    state[key] = value
    return state


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(a: Array) -> Array:
    return 1 / (1 + np.exp(-a))


def erf(a: Array) -> Array:
    return np.vectorize(math.erf)(a)


def gelu_tanh(a: Array) -> Array:
    return a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) / 2


def windows(x: Array, *lengths: int) -> Array:
    """Every window of the last axes: their places, then the elements of each."""
    return np.lib.stride_tricks.sliding_window_view(x, lengths, tuple(range(-len(lengths), 0)))


def spread_out(x: Array, kernel: Array, stride: int) -> Array:
    """The transposed convolution, as its definition says: each element of ``x`` adds a multiple of the kernel."""
    places, lengths = x.shape[2:], kernel.shape[2:]
    sizes = ((n - 1) * stride + k for n, k in zip(places, lengths, strict=True))
    out = np.zeros((len(x), kernel.shape[1], *sizes))
    for place in np.ndindex(*places):
        here = (slice(i * stride, i * stride + k) for i, k in zip(place, lengths, strict=True))
        out[:, :, *here] += np.tensordot(x[:, :, *place], kernel, 1)
    return out


def turned(x: Array) -> Array:
    """Neighbours as complex numbers, turned by an angle that grows with the position (the axis before the last)."""
    angle = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def repeated_back(a: ow.Tensor) -> ow.Tensor:
    """What a tile gets from all of its copies."""
    tile = ow.constant(np.zeros((2, 3), np.float32))
    return ow.gradients(ow.tile(tile, (2, 2)), tile, a)


def normed_back(x: Array, grad: Array) -> Array:
    size = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return (grad - x / size * (grad * x / size).mean(-1, keepdims=True)) / size


def recurred(q, k, v, w, bonus=None, removal=None, insertion=None):
    y = np.empty(v.shape, np.float32)
    for n, h in np.ndindex(q.shape[:2]):
        s = np.zeros((q.shape[3], v.shape[3]))
        for t in range(q.shape[2]):
            added = np.outer(k[n, h, t], v[n, h, t])
            read = s if bonus is None else s + bonus[h][:, None] * added
            if removal is not None:
                added = added + np.outer(insertion[n, h, t], removal[n, h, t] @ s)
            s = w[n, h, t][:, None] * s + added
            y[n, h, t] = q[n, h, t] @ (s if bonus is None else read)
    return y


def scanned(u: Array, delta: Array, decay: Array, into: Array, out_of: Array) -> Array:
    """A state for each channel, token by token."""
    h, y = np.zeros((len(u), *decay.shape)), np.empty(u.shape)
    for t in range(u.shape[-1]):
        h = np.exp(delta[..., t, None] * decay) * h + (delta * u)[..., t, None] * into[:, None, :, t]
        y[..., t] = (h * out_of[:, None, :, t]).sum(-1)
    return y


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "NEG": (lambda a: -a, lambda a: -a),
    "TANH": (lambda a: ow.tanh(a), lambda a: np.tanh(a)),
    "RELU": (lambda a: ow.relu(a), lambda a: np.maximum(a, 0)),
    "ABS": (lambda a: ow.abs(a), lambda a: np.abs(a)),
    "SGN": (lambda a: ow.sign(a), lambda a: np.sign(a)),
    "STEP": (lambda a: ow.step(a), lambda a: a > 0),
    "FLOOR": (lambda a: ow.floor(a), lambda a: np.floor(a)),
    "CEIL": (lambda a: ow.ceil(a), lambda a: np.ceil(a)),
    "ROUND": (lambda a: ow.round(a), lambda a: np.round(a)),
    "TRUNC": (lambda a: ow.trunc(a), lambda a: np.trunc(a)),
    "CLAMP": (lambda a: ow.clamp(a, -0.5, 1), lambda a: np.clip(a, -0.5, 1)),
    "LEAKY_RELU": (lambda a: ow.leaky_relu(a, 0.1), lambda a: np.where(a > 0, a, 0.1 * a)),
    "XIELU": (
        lambda a: ow.xielu(a, 0.7, 1.25, 0.25),
        lambda a: np.where(a > 0, 0.7 * a * a + 0.25 * a, 1.25 * (np.expm1(np.minimum(a, -1e-6)) - a) + 0.25 * a),
    ),
    "ELU": (lambda a: ow.elu(a), lambda a: np.where(a > 0, a, np.expm1(a))),
    "SOFTPLUS": (lambda a: ow.softplus(a), lambda a: np.log1p(np.exp(a))),
    "SIGMOID": (lambda a: ow.sigmoid(a), lambda a: sigmoid(a)),
    "HARDSIGMOID": (lambda a: ow.hardsigmoid(a), lambda a: np.clip(a / 6 + 0.5, 0, 1)),
    "HARDSWISH": (lambda a: ow.hardswish(a), lambda a: a * np.clip(a / 6 + 0.5, 0, 1)),
    "SILU": (lambda a: ow.silu(a), lambda a: a * sigmoid(a)),
    "GELU": (lambda a: ow.gelu_tanh(a), lambda a: gelu_tanh(a)),
    "GELU_QUICK": (lambda a: ow.gelu_quick(a), lambda a: a * sigmoid(1.702 * a)),
    "GELU_ERF": (lambda a: ow.gelu(a), lambda a: a * (1 + erf(a / math.sqrt(2))) / 2),
    "REGLU": (lambda a, b: ow.reglu(a, b), lambda a, b: a * np.maximum(b, 0)),
    "GEGLU": (lambda a, b: ow.geglu(a, b, "tanh"), lambda a, b: a * gelu_tanh(b)),
    "GEGLU_QUICK": (lambda a, b: ow.geglu(a, b, "quick"), lambda a, b: a * b * sigmoid(1.702 * b)),
    "GEGLU_ERF": (lambda a, b: ow.geglu(a, b), lambda a, b: a * b * (1 + erf(b / math.sqrt(2))) / 2),
    "SWIGLU": (lambda a: ow.swiglu(a), lambda a: a[:, 3:] * a[:, :3] * sigmoid(a[:, :3])),
    "SWIGLU_OAI": (
        lambda a, b: ow.swiglu_oai(a, b, limit=1),
        lambda a, b: (np.clip(a, -1, 1) + 1) * np.minimum(b, 1) * sigmoid(1.702 * np.minimum(b, 1)),
    ),
    "EXP": (lambda a: ow.exp(a), lambda a: np.exp(a)),
    "EXPM1": (lambda a: ow.expm1(a), lambda a: np.expm1(a)),
    "SIN": (lambda a: ow.sin(a), lambda a: np.sin(a)),
    "COS": (lambda a: ow.cos(a), lambda a: np.cos(a)),
    "SQRT": (lambda positive: ow.sqrt(positive), lambda positive: np.sqrt(positive)),
    "LOG": (lambda positive: ow.log(positive), lambda positive: np.log(positive)),
    "SQR": (lambda a: ow.square(a), lambda a: np.square(a)),
    "ADD": (lambda a, row: a + row, lambda a, row: a + row),
    "SUB": (lambda a, row: a - row, lambda a, row: a - row),
    "MUL": (lambda a, row: a * row, lambda a, row: a * row),
    "DIV": (lambda a, positive: a / positive, lambda a, positive: a / positive),
    "SCALE": (lambda a: ow.scale(a, 2.0, 3.0), lambda a: 2 * a + 3),
    "ADD_ID": (lambda a, b, ids: ow.add_expert(a[:3], b, ids), lambda a, b, ids: a[:3] + b[ids]),
    "ARANGE": (lambda: ow.arange(2, 9, 3), lambda: np.array([2, 5, 8])),
    "FILL": (lambda: ow.full((2, 3), 7.0), lambda: np.full((2, 3), 7)),
    "MUL_MAT": (lambda a, w: ow.linear(a, w), lambda a, w: a @ w.T),
    "MUL_MAT_ID": (
        lambda a, experts, routes: ow.expert_linear(a, experts, routes),
        lambda a, experts, routes: np.einsum("ti,tuoi->tuo", a, experts[routes]),
    ),
    "OUT_PROD": (lambda a, b: a.T @ b, lambda a, b: np.einsum("ki,kj->ij", a, b)),
    "SUM": (lambda a: ow.sum(a), lambda a: a.sum()),
    "SUM_ROWS": (lambda a: ow.sum(a, -1, True), lambda a: a.sum(-1, keepdims=True)),
    "MEAN": (lambda a: ow.mean(a, -1, True), lambda a: a.mean(-1, keepdims=True)),
    "ARGMAX": (lambda a: ow.argmax(a, -1), lambda a: a.argmax(-1)),
    "COUNT_EQUAL": (lambda ids, routes: ow.count_equal(ids[:2], routes), lambda ids, routes: (ids[:2] == routes).sum()),
    "CUMSUM": (lambda a: ow.cumsum(a), lambda a: a.cumsum(-1)),
    "ARGSORT": (lambda a: ow.argsort(a), lambda a: a.argsort(-1)),
    "TOP_K": (lambda a: ow.top_k(a, 2)[1], lambda a: (-a).argsort(-1)[:, :2]),
    "NORM": (
        lambda a: ow.layer_norm(a, eps=1e-6),
        lambda a: (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-6),
    ),
    "RMS_NORM": (
        lambda a: ow.rms_norm(a, eps=1e-6),
        lambda a: a / np.sqrt(np.square(a).mean(-1, keepdims=True) + 1e-6),
    ),
    "L2_NORM": (lambda a: ow.l2_norm(a), lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)),
    "GROUP_NORM": (
        lambda image: ow.group_norm(image, 2, eps=1e-6),
        lambda image: (
            ((g := image.reshape(2, 2, -1)) - g.mean(-1, keepdims=True)).reshape(image.shape)
            / np.repeat(np.sqrt(g.var(-1) + 1e-6), 2, -1)[..., None, None]
        ),
    ),
    "SOFT_MAX": (
        lambda a, b: ow.softmax(a, mask=b, scale=0.5),
        lambda a, b: softmax(0.5 * a + b),
    ),
    "DIAG_MASK_INF": (lambda a, mask: ow.softmax(a, mask=mask), lambda a, mask: softmax(a + mask)),
    "ROPE": (lambda heads: ow.rope(heads, ow.arange(3)), lambda heads: turned(heads)),
    "FLASH_ATTN_EXT": (
        lambda heads: ow.attention(heads, heads[:, ::2], heads[:, 1::2], causal=True),
        lambda heads: (
            softmax(
                heads @ np.repeat(heads[:, ::2], 2, 1).swapaxes(2, 3) / math.sqrt(6)
                + np.triu(np.full((3, 3), -np.inf), 1)
            )
            @ np.repeat(heads[:, 1::2], 2, 1)
        ),
    ),
    "SSM_CONV": (
        lambda rows, w: ow.causal_conv1d(rows, w[:4, :3]),
        lambda rows, w: np.einsum("bctj,cj->bct", windows(np.pad(rows, ((0, 0), (0, 0), (2, 0))), 3), w[:4, :3]),
    ),
    "SSM_SCAN": (
        lambda rows, steps, decay, maps: ow.selective_scan(rows, steps, decay, maps, maps + 1),
        lambda rows, steps, decay, maps: scanned(rows, steps, decay, maps, maps + 1),
    ),
    "DSV4_HC_COMB": (
        lambda positive: ow.sinkhorn(positive[:, :4], 1, 0.0),
        lambda positive: softmax(positive[:, :4]) / softmax(positive[:, :4]).sum(0),
    ),
    "DSV4_HC_PRE": (
        lambda heads: opweave_models.hyper_connection_pre(heads, heads[..., 0]),
        lambda heads: np.einsum("bhte,bht->bhe", heads, heads[..., 0]),
    ),
    "DSV4_HC_POST": (
        lambda heads: opweave_models.hyper_connection_post(heads[:, :, 0], heads, heads[..., 0], heads[..., :3]),
        lambda heads: heads[:, :, :1] * heads[..., :1] + np.einsum("bhse,bhsd->bhde", heads, heads[..., :3]),
    ),
    "COL2IM_1D": (
        lambda rows: opweave_models.col2im1d(rows, 2),
        lambda rows: np.pad(rows[:, ::2], ((0, 0), (0, 0), (0, 1))) + np.pad(rows[:, 1::2], ((0, 0), (0, 0), (1, 0))),
    ),
    "LIGHTNING_INDEXER": (
        lambda heads: ow.indexer_scores(heads, heads[:, 1], heads[..., 0]),
        lambda heads: np.einsum("bhts,bht->bts", np.maximum(heads @ heads[:, 1:2].swapaxes(2, 3), 0), heads[..., 0]),
    ),
    "MUL_MAT_HADAMARD": (
        lambda a: ow.matmul(ow.hadamard_transform(a[:, :4], 0.5), a),
        lambda a: a[:, :4] @ np.kron([[1, 1], [1, -1]], [[1, 1], [1, -1]]) / 2 @ a,
    ),
    "SOLVE_TRI": (
        lambda positive, a: ow.solve_triangular(positive[:, :4], a),
        lambda positive, a: np.linalg.solve(np.tril(positive[:, :4]), a),
    ),
    "GATED_LINEAR_ATTN": (
        lambda heads: ow.gated_linear_attention(heads, heads, heads + 1, -heads * heads, scale=1.0),
        lambda heads: recurred(heads, heads, heads + 1, np.exp(-heads * heads)),
    ),
    "GATED_DELTA_NET": (
        lambda heads: ow.gated_delta_rule(heads, heads, heads + 1, -(heads[..., 0] ** 2), heads[..., 1], scale=1.0),
        lambda heads: recurred(
            heads,
            heads[..., 1:2] * heads,
            heads + 1,
            np.exp(-(heads[..., :1] ** 2)) + 0 * heads,
            removal=np.exp(-(heads[..., :1] ** 2)) * heads,
            insertion=-heads[..., 1:2] * heads,
        ),
    ),
    "RWKV_WKV6": (
        lambda heads: ow.rwkv6(heads, heads, heads + 1, -heads * heads, heads[0, :, 0]),
        lambda heads: recurred(heads, heads, heads + 1, np.exp(-heads * heads), bonus=heads[0, :, 0]),
    ),
    "RWKV_WKV7": (
        lambda heads: ow.rwkv7(heads, -heads * heads, heads, heads + 1, heads / 2, heads / 3),
        lambda heads: recurred(heads, heads, heads + 1, np.exp(-heads * heads), removal=heads / 2, insertion=heads / 3),
    ),
    "GET_ROWS": (lambda a, ids: ow.embedding(a, ids), lambda a, ids: a[ids]),
    "SET_ROWS": (
        lambda state, ids, b: ow.index_copy(state, ids[:2], b[:2]),
        lambda state, ids, b: changed(state, ids[:2], b[:2]),
    ),
    "DUP": (lambda a: ow.copy(a.T), lambda a: a.T),
    "CONT": (lambda a: ow.contiguous(a.T), lambda a: a.T),
    "CPY": (lambda state, b: ow.assign(state, b), lambda state, b: b),
    "SET": (
        lambda state, b: ow.assign(state[1:3, 2:], b[1:3, 2:]),
        lambda state, b: changed(state, np.s_[1:3, 2:], b[1:3, 2:]),
    ),
    "ACC": (
        lambda state, b: ow.accumulate(state[1:3], b[1:3]),
        lambda state, b: changed(state, np.s_[1:3], state[1:3] + b[1:3]),
    ),
    "REPEAT": (lambda a: ow.tile(a, (2, 3)), lambda a: np.tile(a, (2, 3))),
    "CONCAT": (lambda a, w: ow.concat([a, w]), lambda a, w: np.concatenate([a, w])),
    "PAD": (lambda a: ow.pad(a, ((0, 0), (0, 2))), lambda a: np.pad(a, ((0, 0), (0, 2)))),
    "PAD_REFLECT_1D": (
        lambda a: ow.pad(a, ((0, 0), (2, 3)), "reflect"),
        lambda a: np.pad(a, ((0, 0), (2, 3)), "reflect"),
    ),
    "ROLL": (lambda a: ow.roll(a, 2, axis=1), lambda a: np.roll(a, 2, axis=1)),
    "TRI": (lambda a: ow.tril(a, -1), lambda a: np.tril(a, -1)),
    "DIAG": (lambda row: ow.diag(row[0]), lambda row: np.diag(row[0])),
    "UPSCALE": (
        lambda image: ow.interpolate(image, scale_factor=(2, 3)),
        lambda image: image.repeat(2, -2).repeat(3, -1),
    ),
    "TIMESTEP_EMBEDDING": (
        lambda row: ow.timestep_embedding(row[0], 4),
        lambda row: np.exp(1j * np.outer(row[0], [1, 0.01])).view(float)[:, [0, 2, 1, 3]],
    ),
    "POOL_1D": (lambda rows: ow.avg_pool1d(rows, 2), lambda rows: (rows[..., ::2] + rows[..., 1::2]) / 2),
    "POOL_2D": (
        lambda image: ow.max_pool2d(image, (3, 2), 1),
        lambda image: windows(image, 3, 2).max((-2, -1)),
    ),
    "IM2COL": (
        lambda image: ow.im2col(image, (3, 2)),
        lambda image: np.einsum("ncijkl->ncklij", windows(image, 3, 2)).reshape(2, 24, 15),
    ),
    "IM2COL_3D": (
        lambda volume: ow.im2col(volume, (2, 3, 2)),
        lambda volume: np.einsum("nchijdkl->ncdklhij", windows(volume, 2, 3, 2)).reshape(2, 48, 30),
    ),
    "CONV_2D": (
        lambda image, kernel: ow.conv2d(image, kernel),
        lambda image, kernel: np.einsum("ncijkl,ockl->noij", windows(image, 3, 2), kernel),
    ),
    "CONV_2D_DW": (
        lambda image, kernel: ow.conv2d(image, ow.reshape(kernel[0], (4, 1, 3, 2)), groups=4),
        lambda image, kernel: np.einsum("ncijkl,ckl->ncij", windows(image, 3, 2), kernel[0]),
    ),
    "CONV_3D": (
        lambda volume, image: ow.conv3d(volume, image[None, 0, :, None, :2, :3]),
        lambda volume, image: np.einsum("ncdijkl,ckl->ndij", windows(volume, 2, 3), image[0, :, :2, :3])[:, None],
    ),
    "CONV_TRANSPOSE_1D": (
        lambda rows, experts: ow.conv_transpose1d(rows[:, :3], experts, stride=2),
        lambda rows, experts: spread_out(rows[:, :3], experts, 2),
    ),
    "CONV_TRANSPOSE_2D": (
        lambda volume, kernel: ow.conv_transpose2d(volume[0, :, :], ow.swapaxes(kernel, 0, 1)[:3], stride=2),
        lambda volume, kernel: spread_out(volume[0], kernel.swapaxes(0, 1)[:3], 2),
    ),
    "GET_ROWS_BACK": (lambda ids, a: ow.index_add(ids, a[:3], 5), lambda ids, a: np.eye(5, 4)[:, ids] @ a[:3]),
    "REPEAT_BACK": (lambda a: repeated_back(a), lambda a: a.reshape(2, 2, 2, 3).sum((0, 2))),
    "SILU_BACK": (
        lambda a: ow.gradients(ow.silu(a), a, a),
        lambda a: a * sigmoid(a) * (1 + a * (1 - sigmoid(a))),
    ),
    "RMS_NORM_BACK": (lambda a: ow.gradients(ow.rms_norm(a), a, ow.square(a)), lambda a: normed_back(a, a * a)),
    "SOFT_MAX_BACK": (
        lambda a: ow.gradients(ow.softmax(a), a, ow.square(a)),
        lambda a: softmax(a) * (a * a - (a * a * softmax(a)).sum(-1, keepdims=True)),
    ),
    "ROPE_BACK": (  # turning back what was turned gives what was there
        lambda a: ow.gradients(ow.rope(a, np.arange(4)), a, ow.rope(a, np.arange(4))),
        lambda a: a,
    ),
    "CROSS_ENTROPY_LOSS": (
        lambda a, positive: ow.cross_entropy(a, positive),
        lambda a, positive: -(positive * np.log(softmax(a))).sum() / 4,
    ),
    "CROSS_ENTROPY_LOSS_BACK": (
        lambda a, positive: ow.gradients(ow.cross_entropy(a, ow.softmax(positive)), a),
        lambda a, positive: (softmax(a) - softmax(positive)) / 4,
    ),
    "OPT_STEP_SGD": (
        lambda a, state: SGD({"w": state}).step({"w": a}, 0.1)["w"],
        lambda a, state: state - 0.1 * a,
    ),
    "OPT_STEP_ADAMW": (
        lambda a, state: AdamW({"w": state}, weight_decay=0.5).step({"w": a}, 0.1)["w"],
        lambda a, state: state * (1 - 0.1 * 0.5) - 0.1 * np.sign(a),
    ),
}
"""ggml's name -> ours and NumPy's, as functions of operands in `DATA`."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str):
    ours, exact = OPERATIONS[name]
    arrays = {**DATA, "positive": np.abs(DATA["a"]) + F(0.1), "state": DATA["a"].copy()}
    wanted = list(signature(ours).parameters)
    tensors = {n: ow.input(n, arrays[n].shape, arrays[n].dtype) for n in wanted if n != "state"}
    if "state" in wanted:
        tensors["state"] = ow.state("state", (4, 6))
        ow.write(tensors["state"], arrays["state"])
    outputs = ours(**tensors)
    feeds = {n: arrays[n] for n in wanted if n != "state" and tensors[n] in ow.Graph(outputs).leaves}
    result = ow.Scheduler(HostDevice()).build(outputs).run(feeds)
    np.testing.assert_allclose(result, exact(**{n: arrays[n].copy() for n in wanted}), rtol=1e-5, atol=1e-6)


# --- schedulers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (4, 6))


class Counting(ow.BufferType):
    """A further kind of memory of a device, which counts what is allocated."""

    def __init__(self, device: ow.Device, name: str) -> None:
        super().__init__(device, name)
        self.taken: list[int] = []

    def _alloc(self, size: int, usage: ow.Usage) -> Any:
        self.taken.append(size)
        return super()._alloc(size, usage)


def test_what_a_scheduler_runs_on():
    first, last = Separate("first"), Plain()
    special = Counting(first, "first.special")
    scheduler = ow.Scheduler([first, last], buffer_types={first: special})
    assert scheduler.devices == (first, last)
    assert [s.device for s in scheduler.streams] == [first, last]
    assert scheduler.buffer_type(first) is special
    assert scheduler.buffer_type("plain") is last.default_buffer_type


def test_a_pin_holds_until_it_is_lifted(x):
    first, last = Separate("first"), Plain()
    scheduler = ow.Scheduler([first, last])
    y = ow.exp(x)
    scheduler.pin(y, last)
    assert scheduler.partition(y).device_of(y) is last
    assert scheduler.build(y).device_of(y) is last
    assert scheduler.build(y, pins={y: "first"}).device_of(y) is first, "pins of one build come first"
    scheduler.pin(y, None)
    assert scheduler.build(y).device_of(y) is first


class Mark:
    """The handle of an event."""


class Queue(ow.Stream):
    """An asynchronous stream that notes when it is waited for and ended."""

    def __init__(self, device: ow.Device) -> None:
        super().__init__(device)
        self.log: list[str] = []

    def _synchronize(self) -> None:
        self.log.append("synchronize")

    def _record(self) -> Mark:
        return Mark()

    def _close(self) -> None:
        self.log.append("close")


class Queued(Separate):
    stream_class = Queue


def test_a_scheduler_waits_for_all_its_streams():
    with ow.Scheduler([Queued("one"), Queued("two")]) as scheduler:
        logs = [stream.log for stream in scheduler.streams if isinstance(stream, Queue)]
        scheduler.synchronize()
        assert logs == [["synchronize"], ["synchronize"]]
    assert [log[-1] for log in logs] == ["close", "close"]


def test_a_reset_scheduler_gives_its_memory_back_and_can_be_used_again(x):
    device = Separate("g")
    scheduler = ow.Scheduler([device, HostDevice()])
    y = ow.exp(ow.neg(x))
    program = scheduler.build(y)
    scheduler.pin(y, "hostdevice")
    assert scheduler.buffer_size(device) > 0
    scheduler.reset()
    assert scheduler.buffer_size(device) == 0
    with pytest.raises(ow.LifetimeError, match="closed"):
        program.run(x=array(4, 6))
    again = scheduler.build(y)
    assert again.device_of(y) is device, "pins are lifted"
    np.testing.assert_allclose(again.run(x=array(4, 6)), np.exp(-array(4, 6)), rtol=1e-6)


def test_one_graph_runs_on_two_devices_at_once(x):
    devices = Separate("one"), Separate("two")
    w = ow.weights({"w": array(5, 6)})
    y = ow.relu(ow.linear(x, w["w"]))
    programs = [ow.Scheduler(device).build(y) for device in devices]
    assert [p.device_of(y) for p in programs] == list(devices)
    assert [p.memory[d.name].weights for p, d in zip(programs, devices, strict=True)] == [120, 120], "each has its own"
    first, second = (p.run(x=array(4, 6, seed=1)) for p in programs)
    np.testing.assert_allclose(first, np.maximum(array(4, 6, seed=1) @ array(5, 6).T, 0), rtol=1e-5)
    np.testing.assert_array_equal(first, second)


# --- registries and devices -------------------------------------------------------------------------------------------


class Family(ow.Backend):
    def __init__(self, name: str, *devices: ow.Device) -> None:
        self.name = name
        self._devices = devices

    def devices(self) -> Sequence[ow.Device]:
        return self._devices


def registry_of(*backends: ow.Backend) -> ow.Registry:
    registry = ow.Registry(environ={}, search=[])
    for backend in backends:
        registry.register(backend)
    return registry


def test_devices_of_one_backend():
    registry = registry_of(Family("one", Separate("a"), Separate("b")), Family("two", Plain()))
    one = registry.backend("one")
    assert [d.name for d in registry.devices() if d.backend is one] == ["one:0", "one:1"]
    assert {p.name: p.devices for p in registry.plugins()}["one"] == ("one:0", "one:1")


def test_streams_are_opened_by_kind_and_of_the_best_device():
    registry = registry_of(Family("plain", Plain()), Family("card", Separate("g")))
    with registry.device(kind="CPU").open() as stream:
        assert stream.device.name == "plain"
    with registry.best_device().open() as stream:
        assert stream.device.name == "card"


def test_host_memory_is_always_there():
    host = registry_of().device("host")
    assert host.default_buffer_type.is_host
    numbers = np.arange(4, dtype=F)
    buffer = host.import_host(numbers)
    assert isinstance(buffer, ow.Buffer)
    numbers[0] = 5
    assert buffer.read().view(F).tolist() == [5, 1, 2, 3], "the array's own bytes"


def test_a_device_may_offer_further_kinds_of_memory(x):
    class Fast(Separate):
        def __init__(self) -> None:
            super().__init__("g")
            self.fast = Counting(self, "g.fast")

        @property
        def buffer_types(self) -> Sequence[ow.BufferType]:
            return (self.default_buffer_type, self.fast)

    device = Fast()
    assert [kind.name for kind in device.buffer_types] == ["g", "g.fast"]
    program = ow.Scheduler(device, buffer_types={device: device.buffer_types[1]}).build(ow.exp(x))
    assert device.fast.taken == [program.memory["g"].temporaries]
    np.testing.assert_allclose(program.run(x=array(4, 6)), np.exp(array(4, 6)), rtol=1e-6)


# --- optional procedures ----------------------------------------------------------------------------------------------


class Shards(ow.BufferType):
    """Puts the rows of each tensor on several devices by shares; kernels find the parts in ``Arg.handle``."""

    def __init__(self, device: ow.Device, cards: Sequence[ow.Device], shares: Sequence[float]) -> None:
        super().__init__(device, f"{device.name}.split")
        self.cards, self.shares = cards, shares

    def _alloc(self, size: int, usage: ow.Usage) -> dict[int, list[ow.Buffer]]:
        return {}

    def _init(self, mem: dict[int, list[ow.Buffer]], offset: int, tensor: ow.Tensor) -> list[ow.Buffer]:
        rows = [0, *np.round(np.cumsum(self.shares) / sum(self.shares) * tensor.shape[0]).astype(int)]
        row = tensor.nbytes // tensor.shape[0]
        pieces = zip(self.cards, rows, rows[1:], strict=False)
        mem[offset] = [card.alloc(int(end - start) * row) for card, start, end in pieces]
        return mem[offset]

    def _upload(self, mem: dict[int, list[ow.Buffer]], offset: int, data: memoryview) -> None:
        for shard in mem[offset]:
            shard.upload(0, data[: shard.size])
            data = data[shard.size :]

    def _download(self, mem: dict[int, list[ow.Buffer]], offset: int, out: memoryview) -> None:
        for shard in mem[offset]:
            shard.download(0, out[: shard.size])
            out = out[shard.size :]


class Cards(Family):
    def split_buffer_type(self, shares: Sequence[float]) -> ow.BufferType:
        return Shards(self._devices[0], self._devices[1:], shares)


def sharded_linear(stream: ow.Stream, op: str, out: ow.Arg, x: ow.Arg, w: ow.Arg, **attrs: Any) -> Callable[[], Any]:
    def call() -> None:
        shards = [shard.read().view(F).reshape(-1, w.shape[1]) for shard in w.handle]
        np.concatenate([x.view @ shard.T for shard in shards], axis=-1, out=out.view)

    return call


def test_memory_of_a_backend_puts_a_tensor_in_shards(x):
    main = Separate("main")
    main.kernels = KernelTable("f32", "strided")
    main.kernels("linear", accepts=Shards)(sharded_linear)
    backend = registry_of(Cards("cards", main, Separate("a"), Separate("b"))).backend("cards")
    kind = backend.extension("split_buffer_type")([1, 3])
    (weight,) = ow.weights({"w": ow.Spec((8, 6))}).values()
    buffer = kind.alloc(kind.alloc_size(weight), ow.Usage.WEIGHTS)
    placement = ow.place(weight, buffer)
    buffer.upload(0, array(8, 6))
    assert [shard.size for shard in placement.handle] == [2 * 24, 6 * 24]
    np.testing.assert_array_equal(ow.read(weight), array(8, 6))
    program = ow.Scheduler([main, HostDevice()]).build(ow.linear(x, weight))
    assert [s.target.name for s in program.splits] == ["cards:0"]
    v = array(4, 6, seed=1)
    np.testing.assert_allclose(program.run(x=v), v @ array(8, 6).T, rtol=1e-5)


def test_an_event_is_freed_with_its_last_reference():
    with Queued("g").open() as stream:
        event = stream.record()
        handle = weakref.ref(event.handle)
        assert isinstance(handle(), Mark)
        del event
        gc.collect()
        assert handle() is None


# --- what things say of themselves ------------------------------------------------------------------------------------


def test_a_buffer_and_its_kind_of_memory():
    device = Separate("g", max_buffer_size=1 << 20)
    kind = device.default_buffer_type
    buffer = device.alloc(100)
    assert buffer.type is kind
    assert (buffer.name, kind.name) == ("g", "g")
    assert buffer.device is kind.device is device
    assert (buffer.size, kind.alignment, kind.max_size) == (100, device.alignment, 1 << 20)
    assert not buffer.is_host
    assert HostDevice().alloc(1).is_host
    assert kind.alloc_size(ow.input("x", (4, 6))) == 4 * 6 * 4


def test_a_device_at_a_glance():
    device = Separate("g")
    device.description, device.hardware_id = "a card", "0000:01:00.0"
    assert device.props() == ("g", "a card", ow.Kind.GPU, "0000:01:00.0", 1 << 30, 1 << 30, device.caps)


def test_devices_share_memory_when_both_reach_one_space():
    one, other = Separate("one"), Separate("other")
    assert one.reaches(one.alloc(1).space)
    assert not one.reaches(other.space)
    other.shared_spaces = (one.space,)
    assert other.reaches(one.space)
    x = ow.input("x", (4, 6))
    y = ow.exp(x)
    program = ow.Scheduler([one, other]).build(ow.neg(y), pins={y: one, ow.neg(y): other})
    assert program.n_copies == 0, "other reads the memory of one"
    np.testing.assert_allclose(program.run(x=array(4, 6)), -np.exp(array(4, 6)), rtol=1e-6)
