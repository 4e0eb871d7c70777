"""`Config`: what a model is, in one form for GGUF's metadata and for the ``config.json`` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, pi, sqrt
from typing import Any, Final, Literal

import numpy as np

from opweave.errors import FormatError, UnknownNameError, UnsupportedOpError

__all__ = ["ARCHITECTURES", "DECODERS", "Config", "Rope", "config_from_gguf", "config_from_hugging_face"]

DECODERS: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen3moe")
ENCODERS: Final = ("bert", "nomic-bert")
ARCHITECTURES: Final = (*DECODERS, *ENCODERS)

MOST: Final = {"layers": 1024, "heads": 4096, "groups": 4096, "size": 65536, "width": 1 << 20, "hidden": 1 << 24,
               "context": 1 << 30, "experts": 4096, "experts_used": 4096}  # fmt: skip
"""The largest numbers that are believed: above them a file is damaged, and is refused before anything is allocated."""

YARN: Final = {"ext_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
"""YaRN's share; turns of a pair in the original context above which it leaves it, and below which it interpolates."""

Pooling = Literal["none", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, as the options of `opweave.rope`.

    Attributes:
        base: of the frequencies.
        dims: elements of a head that turn.
        scale: multiplies all angles.
        yarn: further options (``ext_factor``, ``original_context``, ...) of contexts that were extended by YaRN.
        length: the factor by which cosines and sines are multiplied (`attn_factor`).
        factors: what the angle of each pair is divided by.
        factors_long: takes the place of ``factors`` in contexts longer than ``original_context``.
        original_context: tokens of the context seen in training, where ``factors_long`` is given.
    """

    base: float
    dims: int
    scale: float = 1.0
    yarn: Mapping[str, float | int] = field(default_factory=dict)
    length: float = 1.0
    factors: tuple[float, ...] | None = None
    factors_long: tuple[float, ...] | None = None
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """A model's architecture and sizes.

    Attributes:
        architecture: one of `ARCHITECTURES`.
        name: what its authors call it, or "".
        layers, width, hidden, heads, groups, size: layers; elements of a token; of the feed-forward network (of one
            expert); heads of queries; of keys and values; elements of a head.
        vocabulary: number of tokens.
        context: the longest sequence it was made for.
        eps: of its norms.
        rope: of all layers; ``rope_local`` of those with a window, where these have another one. ``None``: absolute
            positions are learned.
        adjacent: rotary pairs are neighbours (as llama's GGUF files store them), not elements of two halves.
        window: a token sees so many positions up to its own, in the layers of ``windowed``; 0: all.
        windowed: for each layer, whether it has the window.
        scale: multiplies the products of queries and keys.
        score_cap, logit_cap: soft caps of these scores, and of the logits; 0: none.
        embedding_scale: multiplies the embeddings.
        activation: of the feed-forward network, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        experts, experts_used: how many there are, and how many compute a token; 0: none.
        normalize_experts: the shares of the experts used add up to 1.
        pooling: of an encoder.
        tied: the matrix of the logits may be absent, and is that of the embeddings then.
        biases: the linear layers that have one, by GGUF's names; ``None``: those whose bias the file has.
        causal: a decoder.
    """

    architecture: str
    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    size: int
    vocabulary: int
    context: int
    eps: float
    rope: Rope | None
    rope_local: Rope | None = None
    adjacent: bool = False
    window: int = 0
    windowed: tuple[bool, ...] = ()
    scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"
    experts: int = 0
    experts_used: int = 0
    normalize_experts: bool = True
    pooling: Pooling = "none"
    tied: bool = True
    biases: tuple[str, ...] | None = None

    @property
    def causal(self) -> bool:
        return self.architecture in DECODERS

    def check_decoder(self) -> None:
        """Raise `UnsupportedOpError` of an encoder."""
        if not self.causal:
            raise UnsupportedOpError(f"{self.architecture} is an encoder: it embeds texts and continues none")


class _Fields:
    """Reads numbers out of metadata: each has its type and limits, or the error names file and key."""

    def __init__(self, path: object, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def number(self, key: str, default: float | None = None, least: float = -1e18, most: float = 1e18) -> float:
        value = self.values.get(self.prefix + key)
        if value is None:
            if default is None:
                raise FormatError(f"{self.path}: the metadata lack {self.prefix + key}")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise FormatError(f"{self.path}: {self.prefix}{key} is a number, {least:g} to {most:g}, not {value!r:.60}")
        return float(value)

    def count(self, what: str, key: str, default: int | None = None, least: int = 1) -> int:
        value: Any = self.values.get(self.prefix + key)
        value = default if value is None else value
        if isinstance(value, (list, np.ndarray)):
            each = value[:4096].tolist() if isinstance(value, np.ndarray) else value[:4096]
            if not each or any(v != each[0] for v in each):
                raise FormatError(f"{self.path}: {self.prefix + key} differs between layers, which is not supported")
            value = each[0]
        if value is None:
            raise FormatError(f"{self.path}: the metadata lack {self.prefix + key}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST.get(what, 1 << 31):
            raise FormatError(f"{self.path}: {self.prefix + key} is a whole number from {least} to "
                              f"{MOST.get(what, 1 << 31):,}, not {value!r:.60}")  # fmt: skip
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(self.prefix + key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self.path}: {self.prefix + key} is true or false, not {value!r:.60}")
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(self.prefix + key) or {}
        if not isinstance(value, Mapping):
            raise FormatError(f"{self.path}: {self.prefix + key} is an object, not {value!r:.60}")
        return value


def _check(path: object, config: Config) -> Config:
    """What holds for every model. Raises `FormatError`."""
    dims = 2 if config.rope is None else config.rope.dims
    wrong = (
        f"{config.heads} heads are no multiple of {config.groups} groups" if config.heads % config.groups
        else f"{dims} elements of a head of {config.size} cannot turn" if dims % 2 or not 0 < dims <= config.size
        else f"{config.experts_used} of {config.experts} experts" if config.experts_used > config.experts
        else f"eps is {config.eps}" if not 0 < config.eps < 1
        else ""
    )  # fmt: skip
    if wrong:
        raise FormatError(f"{path}: its metadata contradict themselves: {wrong}")
    return config


def _known(path: object, architecture: Any) -> str:
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnknownNameError("architecture", str(architecture)[:60], ARCHITECTURES, f"(in {path})", listed=True)
    return architecture


def _windowed(architecture: str, layers: int, window: int, pattern: int | None = None) -> tuple[bool, ...]:
    """Which layers have the window: of Gemma 2 every other one, of Gemma 3 all but every sixth, of the others all."""
    if not window:
        return (False,) * layers
    every = pattern or {"gemma2": 2, "gemma3": 6}.get(architecture, 0)
    return tuple(not every or (i + 1) % every != 0 for i in range(layers))


def _score_scale(architecture: str, layers: int, width: int, heads: int, size: int) -> float:
    """1 / √size; the 27 B models of Gemma 2 and 3 have 1 / √(width / heads)."""
    wide = (architecture, layers) in (("gemma2", 46), ("gemma3", 62))
    return 1 / sqrt(width / heads if wide else size)


# --- GGUF -----------------------------------------------------------------------------------------------------------


def config_from_gguf(path: object, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """The config that GGUF's metadata describe (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    Args:
        path: of the file, for messages.
        metadata: keys as the file has them.
        tensors: name -> tensor; rotary factors are read, of others only whether they are there.

    Raises:
        FormatError: a key that is missing, of another type, or beyond belief.
        UnknownNameError: another architecture than `ARCHITECTURES`.
    """
    stored = metadata.get("general.architecture")
    f = _Fields(path, metadata, f"{stored}.")
    experts_of_llama = str(stored) == "llama" and "llama.expert_count" in metadata
    architecture = "mixtral" if experts_of_llama else _known(path, stored)
    layers, width = f.count("layers", "block_count"), f.count("width", "embedding_length")
    heads = f.count("heads", "attention.head_count")
    groups = f.count("groups", "attention.head_count_kv", heads)
    size = f.count("size", "attention.key_length", max(1, width // heads))
    if f.count("size", "attention.value_length", size) != size:
        raise FormatError(f"{path}: keys and values of different sizes are not supported")
    experts = f.count("experts", "expert_count", 0, 0)
    hidden = f.count("hidden", "feed_forward_length")
    gemma = architecture.startswith("gemma")
    encoder = architecture in ENCODERS
    window = f.count("context", "attention.sliding_window", 0, 0)
    rope = None if architecture == "bert" else _gguf_rope(f, tensors, size)
    local = f.number("rope.freq_base_swa", 10000.0, 1)
    tokens = metadata.get("tokenizer.ggml.tokens")
    pooling = {0: "none", 1: "mean", 2: "cls"}.get(f.count("pooling", "pooling_type", 1 if encoder else 0, 0))
    if pooling is None:
        raise FormatError(f"{path}: {f.prefix}pooling_type is 0 (none), 1 (mean) or 2 (the first token)")
    return _check(path, Config(
        architecture, str(metadata.get("general.name", ""))[:200], layers, width,
        f.count("hidden", "expert_feed_forward_length", hidden) if experts else hidden, heads, groups, size,
        len(tokens) if isinstance(tokens, list) else f.count("vocabulary", "vocab_size"),
        f.count("context", "context_length"),
        f.number("attention.layer_norm_epsilon" if encoder else "attention.layer_norm_rms_epsilon"),
        rope, Rope(local, rope.dims) if architecture == "gemma3" and rope else None,
        adjacent=stored == "llama", window=window, windowed=_gguf_windowed(f, architecture, layers, window),
        scale=_score_scale(architecture, layers, width, heads, size),
        score_cap=f.number("attn_logit_softcapping", 50.0 if architecture == "gemma2" else 0.0),
        logit_cap=f.number("final_logit_softcapping", 30.0 if architecture == "gemma2" else 0.0),
        embedding_scale=sqrt(width) if gemma else 1.0,
        activation="gelu_tanh" if gemma else "gelu" if architecture == "bert" else "silu",
        experts=experts, experts_used=f.count("experts_used", "expert_used_count", 0, 0),
        normalize_experts=True, pooling=pooling,  # type: ignore[arg-type]
        biases=_BIASES.get(architecture),
    ))  # fmt: skip


def _gguf_windowed(f: _Fields, architecture: str, layers: int, window: int) -> tuple[bool, ...]:
    """A period, of which the last layer sees all, or a flag for each layer."""
    key = "attention.sliding_window_pattern"
    given = f.values.get(f.prefix + key)
    if isinstance(given, np.ndarray) and given.dtype == np.bool_ and given.shape == (layers,):
        return tuple(bool(window) and flag for flag in given.tolist())
    return _windowed(architecture, layers, window, f.count("layers", key, 0, 0) or None)


def _gguf_rope(f: _Fields, tensors: Mapping[str, Any], size: int) -> Rope:
    base, dims = f.number("rope.freq_base", 10000.0, 1), f.count("size", "rope.dimension_count", size)
    kind = str(f.values.get(f.prefix + "rope.scaling.type", "linear"))
    factor = f.number("rope.scaling.factor", f.number("rope.scale_linear", 1.0, 0), 0) or 1.0
    original = f.count("context", "rope.scaling.original_context_length", 0, 0)
    length = f.number("rope.scaling.attn_factor", 1.0)
    if kind == "yarn" and factor > 1:
        trained = original or f.count("context", "context_length")
        options = {key: f.number(f"rope.scaling.yarn_{key}", value) for key, value in YARN.items()}
        length *= f.number("rope.scaling.yarn_attn_factor", 1.0)
        return Rope(base, dims, 1 / factor, {"original_context": trained, **options}, length)
    scale = 1 / factor if kind == "linear" else 1.0
    plain = _factors(f.path, tensors, "rope_freqs.weight", dims)
    short = _factors(f.path, tensors, "rope_factors_short.weight", dims)
    long = _factors(f.path, tensors, "rope_factors_long.weight", dims)
    return Rope(base, dims, scale, {}, length, plain or short, long, original)


def _factors(path: object, tensors: Mapping[str, Any], name: str, dims: int) -> tuple[float, ...] | None:
    if name not in tensors:
        return None
    values = np.asarray(tensors[name])
    if values.shape != (dims // 2,) or values.dtype != np.float32 or not ((values > 0) & (values < 1e18)).all():
        raise FormatError(f"{path}: {name} has one positive f32 for each of {dims // 2} pairs")
    return tuple(values.tolist())


# --- Hugging Face ---------------------------------------------------------------------------------------------------

_MODEL_TYPES: Final = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "nomic_bert": "nomic-bert"}

_LLAMA: Final[Mapping[str, Any]] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_QWEN: Final = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
                "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip
_GEMMA: Final = {
    **_LLAMA, "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
_BERT: Final = {
    "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "phi3": {**_LLAMA, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
             "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "mixtral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_experts": 8},
    "qwen3moe": {**_QWEN, "hidden_size": 2048, "num_hidden_layers": 24, "num_key_value_heads": 4, "num_experts": 128,
                 "moe_intermediate_size": 768, "num_experts_per_tok": 8},
    "bert": _BERT,
    "nomic-bert": {**_BERT, "vocab_size": 30528, "max_position_embeddings": 2048, "hidden_act": "silu"},
}  # fmt: skip
"""What transformers takes for keys that a ``config.json`` leaves out."""

_ONLY: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma2": {"use_bidirectional_attention": False}, "gemma3": {"use_bidirectional_attention": False},
    "bert": {"is_decoder": False, "position_embedding_type": "absolute"},
    "nomic-bert": {"activation_function": "swiglu", "causal": False, "prenorm": False, "parallel_block": False,
                   "use_rms_norm": False, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
                   "rotary_scaling_factor": None},
}  # fmt: skip
"""The only values of keys that are computed here."""

_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu",
                       "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # fmt: skip

_ATTENTION: Final = ("attn_q", "attn_k", "attn_v", "attn_output")
_BIASES: Final = {"qwen2": _ATTENTION[:3], "bert": (*_ATTENTION, "ffn_up", "ffn_down")}
"""Linear layers that always have a bias."""


def config_from_hugging_face(path: object, values: Mapping[str, Any], pooling: Pooling | None = None) -> Config:
    """The config that a ``config.json`` of Hugging Face's transformers describes. Errors as `config_from_gguf`.

    Args:
        path: of the file, for messages.
        values: the parsed JSON.
        pooling: of an encoder, from the folder ``1_Pooling``; ``None``: mean.
    """
    kind = values.get("model_type")
    if kind == "gemma3" and "text_config" in values:
        whole = ("_name_or_path", "tie_word_embeddings", "quantization_config")
        values = {**_Fields(path, values).section("text_config"), **{k: values[k] for k in whole if k in values}}
    architecture = _known(path, _MODEL_TYPES.get(kind, kind) if isinstance(kind, str) else kind)
    experts_key = "num_local_experts" if "num_local_experts" in values else "num_experts"
    values = {**_DEFAULTS[architecture], **values}
    f = _Fields(path, values)
    _check_computed(f, architecture)
    encoder, gemma = architecture in ENCODERS, architecture.startswith("gemma")
    nomic = architecture == "nomic-bert" and "n_embd" in values
    keys = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "layer_norm_epsilon") if nomic else (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings",
        "layer_norm_eps" if encoder else "rms_norm_eps")  # fmt: skip
    layers, width, heads = (f.count(w, k) for w, k in zip(("layers", "width", "heads"), keys[:3], strict=True))
    groups = heads if encoder else f.count("groups", "num_key_value_heads", heads)
    size = f.count("size", "head_dim", max(1, width // heads))
    experts = f.count("experts", experts_key) if architecture in ("mixtral", "qwen3moe") else 0
    hidden = f.count("hidden", "moe_intermediate_size" if architecture == "qwen3moe" else keys[3], 4 * width)
    context = f.count("context", keys[4])
    rope, local = (None, None) if architecture == "bert" else _hugging_face_ropes(f, architecture, size, context)
    windowed = _hugging_face_windowed(f, architecture, layers)
    return _check(path, Config(
        architecture, str(values.get("_name_or_path") or "")[:200], layers, width, hidden, heads, groups, size,
        f.count("vocabulary", "vocab_size"), context, f.number(keys[5], 1e-12 if encoder else 1e-6), rope, local,
        window=f.count("context", "sliding_window", 0, 0) if any(windowed) else 0, windowed=windowed,
        scale=1 / sqrt(f.number("query_pre_attn_scalar", 256.0, 1e-6) if gemma else size),
        score_cap=f.number("attn_logit_softcapping", 0.0) if architecture == "gemma2" else 0.0,
        logit_cap=f.number("final_logit_softcapping", 0.0) if gemma else 0.0,
        embedding_scale=sqrt(width) if gemma else 1.0,
        activation="silu" if nomic else _activation(f, "hidden_activation" if gemma else "hidden_act"),
        experts=experts, experts_used=f.count("experts_used", "num_experts_per_tok") if experts else 0,
        normalize_experts=f.flag("norm_topk_prob", False) if architecture == "qwen3moe" else True,
        pooling=pooling or ("mean" if encoder else "none"),
        tied=f.flag("tie_word_embeddings", encoder or gemma), biases=_biases(f, architecture, nomic),
    ))  # fmt: skip


def _check_computed(f: _Fields, architecture: str) -> None:
    """Refuse what changes results, and is not computed here."""
    for key in ("quantization_config", "compression_config"):
        if stored := f.section(key):
            raise FormatError(f"{f.path}: {key}: weights quantized by {stored.get('quant_method')!r:.60} are not "
                              "supported in folders")  # fmt: skip
    for key, only in _ONLY.get(architecture, {}).items():
        if f.values.get(key) not in (None, only):
            raise FormatError(f"{f.path}: {key} is {f.values[key]!r:.60}, and only {only!r} is supported")


def _activation(f: _Fields, key: str) -> str:
    name = f.values.get(key)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise FormatError(f"{f.path}: {key} is one of {', '.join(_ACTIVATIONS)}, not {name!r:.60}")
    return _ACTIVATIONS[name]


def _biases(f: _Fields, architecture: str, nomic: bool) -> tuple[str, ...]:
    """The linear layers that have a bias."""
    if architecture in (*_BIASES, "phi3", "mixtral") or (architecture == "nomic-bert" and not nomic):
        return _BIASES.get(architecture, ())
    attention, up, down = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias") if nomic else (
        "attention_bias", "mlp_bias", "mlp_bias")  # fmt: skip
    found: tuple[str, ...] = _ATTENTION if f.flag(attention, nomic) else ()
    if architecture in ("llama", "nomic-bert"):
        found += ("ffn_up", "ffn_gate") if f.flag(up, nomic) else ()
        found += ("ffn_down",) if f.flag(down, nomic) else ()
    return found


def _hugging_face_windowed(f: _Fields, architecture: str, layers: int) -> tuple[bool, ...]:
    """Which layers have the window: as ``layer_types`` says, of those that have it; else by the architecture."""
    window, kinds = f.count("context", "sliding_window", 0, 0), f.values.get("layer_types")
    if architecture == "llama" or (architecture.startswith("qwen") and not f.flag("use_sliding_window", False)):
        window = 0
    if architecture in ("qwen2", "qwen3", "gemma2", "gemma3") and kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not all(
            kind in ("sliding_attention", "full_attention") for kind in kinds
        ):  # fmt: skip
            raise FormatError(f"{f.path}: layer_types is sliding_attention or full_attention for each layer")
        return tuple(bool(window) and kind == "sliding_attention" for kind in kinds)
    if architecture in ("qwen2", "qwen3"):
        first = f.count("layers", "max_window_layers", least=0)
        return tuple(bool(window) and i >= first for i in range(layers))
    pattern = f.count("layers", "sliding_window_pattern", 0, 0) if architecture == "gemma3" else 0
    return _windowed(architecture, layers, window, pattern or None)


def _hugging_face_ropes(f: _Fields, architecture: str, size: int, context: int) -> tuple[Rope, Rope | None]:
    """The rotary embeddings of layers that see all, and of those with a window where they differ."""
    parameters = f.section("rope_parameters")
    full = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention")
    scaling = {**(full if isinstance(full, Mapping) else {}), **f.section("rope_scaling")}
    share_key, base = "partial_rotary_factor", f.values.get("rope_theta", 1000.0)
    if "n_embd" in f.values:
        share_key, base = "rotary_emb_fraction", f.values.get("rotary_emb_base", f.values.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if architecture == "phi3" and kind in ("su", "yarn"):  # names that its first versions had
        kind = "longrope"
    g = _Fields(f.path, {**scaling, "base": scaling.get("rope_theta", base), "rope_type": kind})
    share = _Fields(f.path, {**f.values, **scaling}).number(share_key, 1.0, 0, 1)
    if architecture not in ("phi3", "nomic-bert"):  # transformers ignores it, or fails
        if kind not in ("default", None) and share != 1:
            raise FormatError(f"{f.path}: {share_key} is {share:g} beside a scaled rotary embedding of {architecture}")
        share = 1.0
    dims = int(size * share)
    trained = _Fields(f.path, {**scaling, **f.values}).count("context", "original_max_position_embeddings", context)
    rope = _scaled_rope(g, g.number("base", least=1), dims, context, trained)
    if architecture != "gemma3":
        return rope, None
    own = dict(sliding) if isinstance(sliding, Mapping) else {}
    base = own.get("rope_theta", f.values.get("rope_local_base_freq"))
    h = _Fields(f.path, {**own, "base": base})
    return rope, _scaled_rope(h, h.number("base", 10000.0, 1), dims, context, trained)


def _scaled_rope(g: _Fields, base: float, dims: int, context: int, trained: int) -> Rope:
    """Contexts beyond those of training, by the methods of transformers' ``modeling_rope_utils``."""
    kind = g.values.get("rope_type", g.values.get("type", "default"))
    if kind in ("default", None):
        return Rope(base, dims)
    if kind == "linear":
        return Rope(base, dims, 1 / g.number("factor", least=1e-6))
    if kind == "yarn":
        factor = g.number("factor", context / trained, 1e-6)
        if not g.flag("truncate", True):
            raise FormatError(f"{g.path}: truncate is false in the parameters of yarn, and only true is supported")
        options: dict[str, float | int] = {"original_context": trained, "ext_factor": 1.0}
        options |= {key: g.number(key, YARN[key]) or YARN[key] for key in ("beta_fast", "beta_slow")}
        grown = log(max(factor, 1.0)) / 10
        scales = g.number("mscale", 0.0), g.number("mscale_all_dim", 0.0)
        length = (1 + scales[0] * grown) / (1 + scales[1] * grown) if all(scales) else 1 + grown
        return Rope(base, dims, 1 / factor, options, g.number("attention_factor", length) / (1 + 0.1 * log(factor)))
    if kind == "llama3":
        return Rope(base, dims, factors=_llama3_factors(g, base, dims, trained))
    if kind == "longrope":
        factor = g.number("factor", context / trained)
        length = g.number("attention_factor", sqrt(1 + log(factor) / log(trained)) if min(factor, trained) > 1 else 1.0)
        short, long = (_numbers(g, key, dims // 2) for key in ("short_factor", "long_factor"))
        return Rope(base, dims, 1.0, {}, length, short, long, trained)
    raise UnknownNameError("rope_type", str(kind)[:60], ("default", "linear", "yarn", "llama3", "longrope"),
                           f"(in {g.path})", listed=True)  # fmt: skip


def _numbers(g: _Fields, key: str, count: int) -> tuple[float, ...]:
    values = g.values.get(key)
    if not isinstance(values, list) or len(values) != count or not all(
        isinstance(v, (int, float)) and 0 < v < 1e18 for v in values
    ):  # fmt: skip
        raise FormatError(f"{g.path}: {key} has one positive number for each of {count} pairs")
    return tuple(map(float, values))


def _llama3_factors(g: _Fields, base: float, dims: int, trained: int) -> tuple[float, ...]:
    """Llama 3.1: pairs of long waves are slowed by the factor, short ones stay, those between are interpolated."""
    factor, low, high = g.number("factor"), g.number("low_freq_factor"), g.number("high_freq_factor")
    if factor <= 0 or not 0 < low < high:
        raise FormatError(f"{g.path}: the factors of llama3's rotary embedding are positive, low below high")
    waves = 2 * pi * base ** (np.arange(0, dims, 2) / dims)
    smooth = np.clip((trained / waves - low) / (high - low), 0.0, 1.0)
    return tuple((1 / ((1 - smooth) / factor + smooth)).tolist())
