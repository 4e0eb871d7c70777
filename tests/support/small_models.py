"""Folders of small models with random weights, as transformers writes them, with a tokenizer of 300 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import opweave as ow

COMMON: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 8 for i in range(6)],
        "long_factor": [2.0 + i for i in range(6)], "original_max_position_embeddings": 128}  # fmt: skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-wide": ("Llama", {"head_dim": 32}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-long": ("Phi3", {"partial_rotary_factor": 0.75, "rope_parameters": {**LONG, "partial_rotary_factor": 0.75},
                           "original_max_position_embeddings": 128}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 16}),
}  # fmt: skip


def available(name: str) -> Any:
    """The device; a test that needs it is skipped where it is not."""
    try:
        return ow.device(name)
    except (ow.PluginError, ow.UnknownNameError) as error:
        pytest.skip(str(error))


def make_folder(kind: str, path: Path, **changed: Any) -> Any:
    """Write a folder, with changes of its config, and return the model of transformers, in f32."""
    import torch
    import transformers

    name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options, **changed})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():  # random norms and biases too: those of a new model hide what is left out
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.02))
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: control tokens, the 256 bytes, and some merges."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *symbols]
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("o", "n")]
    pieces += ["".join(pair) for pair in pairs]
    library = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=pairs))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(pieces[:5])
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8")
