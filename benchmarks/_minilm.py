"""MiniLM (all-MiniLM-L6-v2, as in ``examples/encoder.py``) in torch, for the benchmarks that run it beside opweave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation calls it
from torch import Tensor

__all__ = ["HEADS", "LAYERS", "Weighted", "minilm", "products"]

LAYERS, HEADS = 6, 12


def minilm(
    w: Mapping[str, Tensor], ids: Tensor, is_token: Tensor,
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention,
) -> Tensor:  # fmt: skip
    """Sentences as vectors.

    Args:
        w: weights by the names of the model's file.
        ids: (batch, tokens).
        is_token: (batch, tokens), 1 or 0, of the dtype of the weights.
        attention: of queries, keys, values, and what is added to the scores.

    Returns:
        (batch, width), each of length 1.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = (w[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return F.layer_norm(x, (x.shape[-1],), scale, shift, 1e-12)

    words, places, kinds = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
    x = norm(F.embedding(ids, words) + places[: ids.shape[1]] + kinds[0], "embeddings")
    mask = (is_token - 1)[:, None, None, :] * 1e9
    batch, tokens, width = x.shape
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{n}").view(batch, tokens, HEADS, -1).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        mixed = attention(q, k, v, mask).transpose(1, 2).reshape(batch, tokens, width)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
        wide = F.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(wide, f"{at}.output.dense"), f"{at}.output")
    return F.normalize((x * is_token[:, :, None]).sum(1), dim=1)


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention as two products, for exporters."""
    return (q @ k.transpose(2, 3) / q.shape[3] ** 0.5 + mask).softmax(-1) @ v


class Weighted(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """A function of weights by name as a module: the weights are buffers, which compilers and exporters take for fixed
    memory."""

    def __init__(self, function: Callable[..., Tensor], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        self.names = {name: f"w{i}" for i, name in enumerate(weights)}
        for name, own in self.names.items():
            self.register_buffer(own, weights[name])

    def forward(self, *inputs: Any) -> Tensor:
        return self.function({name: getattr(self, own) for name, own in self.names.items()}, *inputs)
