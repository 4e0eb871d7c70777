"""Encoders: `bert` and `nomic-bert`, whose norms follow each sum, and the pooling of their tokens to one embedding."""

from __future__ import annotations

from typing import Final

import opweave as ow
from opweave_models.config import Config, Pooling
from opweave_models.decoder import Weights, gated, linear, project, rotate

__all__ = ["batch_shape", "encode"]

TEXTS: Final = 32
TOKENS: Final = 4096
"""Texts of one step, and their tokens with padding, at most: enough for products of matrices, and a bound for temporary
values."""

ACTIVATIONS: Final = {"gelu": ow.gelu, "gelu_tanh": ow.gelu_tanh, "relu": ow.relu, "silu": ow.silu}


def batch_shape(texts: int, longest: int, context: int) -> tuple[int, int]:
    """Rows and columns of the next step of so many texts, the longest of which has ``longest`` tokens: powers of two,
    so that few programs are built, columns at most ``context``."""
    columns = min(1 << (longest - 1).bit_length(), context)
    return min(TEXTS, max(1, TOKENS // columns), 1 << (texts - 1).bit_length()), columns


def encode(config: Config, w: Weights, tokens: ow.Tensor, mask: ow.Tensor, pooling: Pooling) -> ow.Tensor:
    """The embedding of each text, f32 of shape (n, width), not normalized; without pooling those of all tokens.

    Args:
        config: the model.
        w: its weights, by GGUF's names.
        tokens: i64 of shape (n, T).
        mask: bool of the same shape: tokens that are no padding; each text has at least one.
        pooling: ``"mean"`` over these tokens, or that of the first one (``"cls"``).
    """
    n, count = tokens.shape
    places = ow.arange(count)
    x = ow.embedding(w["token_embd.weight"], tokens).astype("f32")
    if config.rope is None:
        x = x + ow.embedding(w["position_embd.weight"], places).astype("f32")
    if "token_types.weight" in w:
        x = x + w["token_types.weight"].astype("f32")[0]
    x = norm(config, w, "token_embd_norm", x)
    seen = mask.reshape(n, 1, 1, count)
    for i in range(config.layers):
        with ow.scope(f"layer{i}"):
            q, k, v = project(config, w, i, x)
            if config.rope is not None:
                q, k = (rotate(y, places, config.rope, config, count) for y in (q, k))
            mixed = ow.attention(q, k, v, seen, scale=config.scale).transpose(0, 2, 1, 3).reshape(x.shape)
            x = norm(config, w, f"blk.{i}.attn_output_norm", x + linear(w, f"blk.{i}.attn_output", mixed))
            inner = linear(w, f"blk.{i}.ffn_up", x)
            if config.architecture == "nomic-bert":
                inner = gated(config, inner, linear(w, f"blk.{i}.ffn_gate", x))
            else:
                inner = ACTIVATIONS[config.activation](inner)
            x = norm(config, w, f"blk.{i}.layer_output_norm", x + linear(w, f"blk.{i}.ffn_down", inner))
    if pooling == "none":
        return x
    if pooling == "cls":
        return x[:, 0]
    kept = ow.expand_dims(mask.astype("f32"), -1)
    return ow.sum(x * kept, 1) / ow.sum(kept, 1)


def norm(config: Config, w: Weights, name: str, x: ow.Tensor) -> ow.Tensor:
    return ow.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], config.eps)
