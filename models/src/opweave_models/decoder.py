"""Decoders: `llama qwen2 qwen3 gemma2 gemma3 phi3 mixtral qwen3moe` are one block with different options of `Config`.

::

    tokens ─ embedding ─┬─ norm ─ q, k, v ─ (norm) ─ rope ─ attention over the cache ─ linear ─ (norm) ─ + ─┐
                        │   ┌───────────────────────────────────────────────────────────────────────────────┘
                        │   └─ norm ─ feed-forward network or experts ─ (norm) ─ + ─ next layer
                        └─ after the last layer: norm ─ linear ─ logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.errors import LayoutError
from opweave_models.config import Config, Rope

__all__ = ["Weights", "decode", "empty_cache", "feed_forward", "project", "rotate"]

Weights = Mapping[str, ow.Tensor]

BLOCK: Final = 64
"""Tokens of a block of keys and values, at most, that sequences share: a beginning that ends in one is copied from
there on."""


def empty_cache(
    config: Config, sequences: int, context: int, kv: Any = "f16", layers: Sequence[str] = (), placed: bool = False
) -> ow.KVCache:
    """The cache of a decoder, which takes memory once it is used: rings where its layers look back over a window, else
    memory for the context of each sequence, or as many blocks, which several share where the devices of the ``layers``
    read them where they lie. ``placed``: the states lie there. Raises `LayoutError` for heads of no whole blocks."""
    if config.size % (block := ow.as_dtype(kv).block):
        raise LayoutError(f"keys and values in {kv} are blocks of {block} elements, and the head size of this model is "
                          f"{config.size}: take another type, such as kv='f16'")  # fmt: skip
    shared = sequences > 1 and layers and all(ow.device(name).reads_block_tables for name in set(layers))
    windows = [config.window if windowed else None for windowed in config.windowed]
    each = -(-context // BLOCK)  # blocks of a sequence, which are equal and filled by its context
    block, blocks = (-(-context // each), sequences * each) if shared else (BLOCK, None)
    return ow.KVCache(
        config.layers, sequences, context, config.groups, config.size, kv, device=layers if placed else None,
        window=windows, block=block, blocks=blocks,
    )  # fmt: skip


def decode(
    config: Config, w: Weights, cache: ow.KVCache, context: int,
    tokens: ow.Tensor, positions: ow.Tensor, slots: ow.Tensor, blocks: ow.Tensor, last: ow.Tensor, reach: int,
) -> ow.Tensor:  # fmt: skip
    """The logits of the token after each sequence's last one, f32 of shape (n, vocabulary).

    Args:
        config: the model.
        w: its weights, by GGUF's names.
        cache: keys and values of all sequences.
        context: tokens of the longest sequence, by which rotary factors are chosen.
        tokens, positions, slots, blocks, last, reach: as `opweave.KVCache.feed` gives them.
    """
    x = ow.embedding(w["token_embd.weight"], tokens).astype("f32")
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    for i in range(config.layers):
        with ow.scope(f"layer{i}"):
            h = ow.rms_norm(x, w[f"blk.{i}.attn_norm.weight"], config.eps)
            h = attend(config, w, i, h, positions, slots, blocks, reach, cache, context)
            x = x + normed(config, w, f"blk.{i}.post_attention_norm.weight", h)
            h = ow.rms_norm(x, w[f"blk.{i}.ffn_norm.weight"], config.eps)
            h = mixture(config, w, i, h) if config.experts else feed_forward(config, w, i, h)
            x = x + normed(config, w, f"blk.{i}.post_ffw_norm.weight", h)
    x = ow.embedding(x.reshape(-1, config.width), last)
    x = ow.rms_norm(x, w["output_norm.weight"], config.eps)
    logits = ow.linear(x, w["output.weight"] if "output.weight" in w else w["token_embd.weight"]).astype("f32")
    return ow.tanh(logits / config.logit_cap) * config.logit_cap if config.logit_cap else logits


def attend(
    config: Config, w: Weights, i: int, h: ow.Tensor,
    positions: ow.Tensor, slots: ow.Tensor, blocks: ow.Tensor, reach: int, cache: ow.KVCache, context: int,
) -> ow.Tensor:  # fmt: skip
    """Self-attention of layer ``i`` over the cache: (n, tokens, width) -> the same."""
    q, k, v = project(config, w, i, h)
    q = normed(config, w, f"blk.{i}.attn_q_norm.weight", q)
    k = normed(config, w, f"blk.{i}.attn_k_norm.weight", k)
    rope = config.rope_local if config.windowed[i] and config.rope_local else config.rope
    assert rope is not None
    at = ow.expand_dims(positions, 1)
    q, k = (rotate(y, at, rope, config, context) for y in (q, k))
    mixed = cache.attend(i, q, k, v, positions, slots, blocks, reach, scale=config.scale, soft_cap=config.score_cap)
    mixed = mixed.transpose(0, 2, 1, 3).reshape(*h.shape[:2], config.heads * config.size)
    return linear(w, f"blk.{i}.attn_output", mixed)


def project(config: Config, w: Weights, i: int, h: ow.Tensor) -> list[ow.Tensor]:
    """Queries, keys and values, each (n, heads or groups, tokens, size). They may come from one matrix."""
    q, kv = config.heads * config.size, config.groups * config.size
    if f"blk.{i}.attn_qkv.weight" in w:
        every = linear(w, f"blk.{i}.attn_qkv", h)
        parts = [every[..., :q], every[..., q : q + kv], every[..., q + kv :]]
    else:
        parts = [linear(w, f"blk.{i}.attn_{name}", h) for name in "qkv"]
    return [part.reshape(*h.shape[:2], -1, config.size).transpose(0, 2, 1, 3) for part in parts]


def rotate(y: ow.Tensor, positions: ow.Tensor, rope: Rope, config: Config, context: int) -> ow.Tensor:
    """Rotary embedding; a context longer than that of training has factors of its own (LongRoPE)."""
    factors = rope.factors
    if rope.factors_long is not None and context > rope.original_context:
        factors = rope.factors_long
    divisors = None if factors is None else ow.constant(np.array(factors, np.float32))
    return ow.rope(
        y, positions, divisors, pairing="adjacent" if config.adjacent else "half", base=rope.base, dims=rope.dims,
        scale=rope.scale, attn_factor=rope.length, **rope.yarn,  # type: ignore[arg-type]
    )  # fmt: skip


def feed_forward(config: Config, w: Weights, i: int, h: ow.Tensor) -> ow.Tensor:
    """The gated feed-forward network: down(activation(gate(h)) · up(h))."""
    up = linear(w, f"blk.{i}.ffn_up", h)
    if config.architecture == "phi3":
        gate, up = up[..., : config.hidden], up[..., config.hidden :]
    else:
        gate = linear(w, f"blk.{i}.ffn_gate", h)
    return linear(w, f"blk.{i}.ffn_down", gated(config, up, gate))


def gated(config: Config, up: ow.Tensor, gate: ow.Tensor) -> ow.Tensor:
    """up · activation(gate)."""
    if config.activation in ("silu", "relu"):
        return ow.swiglu(up, gate) if config.activation == "silu" else ow.reglu(up, gate)
    return ow.geglu(up, gate, "tanh" if config.activation == "gelu_tanh" else "none")


def mixture(config: Config, w: Weights, i: int, h: ow.Tensor) -> ow.Tensor:
    """Experts: each token goes to the few with the highest scores, whose results are added by their shares."""
    x = h.reshape(-1, config.width)
    shares = ow.softmax(ow.linear(x, w[f"blk.{i}.ffn_gate_inp.weight"]))
    chosen, ids = ow.top_k(shares, config.experts_used)
    if config.normalize_experts:
        chosen = chosen / ow.sum(chosen, -1, keepdims=True)
    up, gate = (ow.expert_linear(x, w[f"blk.{i}.ffn_{name}_exps.weight"], ids) for name in ("up", "gate"))
    each = ow.expert_linear(gated(config, up, gate), w[f"blk.{i}.ffn_down_exps.weight"], ids)
    # The shares first: nodes run in the order of operands, and the ids then are known before any weights are read.
    return ow.sum(ow.expand_dims(chosen, -1) * each, 1).reshape(h.shape)


def normed(config: Config, w: Weights, name: str, x: ow.Tensor) -> ow.Tensor:
    """The norm of that name, of models that have it."""
    return ow.rms_norm(x, w[name], config.eps) if name in w else x


def linear(w: Weights, name: str, x: ow.Tensor) -> ow.Tensor:
    """A linear layer, with the bias that some models have."""
    return ow.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
