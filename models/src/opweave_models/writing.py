"""`write_gguf`: a model as a GGUF file, from another one or from a folder, written by the package ``gguf``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.errors import FormatError, PathError, Unavailable
from opweave.formats.folder import shards_of
from opweave.formats.tensor_file import parse_json
from opweave.progress import shown
from opweave.warning import warn_caller
from opweave_models.config import YARN, Config
from opweave_models.files import ModelFile, encoded_type, open_model, rounded, stored_type
from opweave_models.tokenizer import (
    BYTE,
    CONTROL,
    END_TOKENS,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    WHOLE_TOKENIZER,
    pre_name,
    read_tokenizer,
    spelled_ends,
)

__all__ = ["new_file", "write_gguf"]

POOLING: Final = {"none": 0, "mean": 1, "cls": 2}


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write to, which becomes ``target`` at the end. Nothing is left of it after an error.

    Raises:
        PathError: for an `OSError` within.
    """
    part = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield part
        os.replace(part, target)
    except OSError as error:
        raise PathError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # it is not there
            part.unlink()


def write_gguf(source: Path, target: Path, kind: str | None = None) -> Counter[str]:
    """Write a model as a GGUF file, with all that llama.cpp needs of it. Returns how many matrices were rounded to each
    type; "": how many stay as they were, because they are those of routers or have narrow rows.

    Args:
        source: a GGUF file, whose metadata are copied, or a folder, whose config and tokenizer become metadata.
        target: the file to write.
        kind: f16, bf16, f32, or a type of blocks: matrices are rounded to it where their rows consist of whole blocks,
            else to q8_0. Norms, biases and routers stay. ``None``: all do; of a half type, they become f32.

    Raises:
        FormatError: ``source`` is damaged, or has something that GGUF cannot say.
        UnknownNameError, DTypeError: a type that values are not rounded to, or that cannot hold them.
        Unavailable: the package ``gguf`` is not installed.
        PathError: ``target`` cannot be written; nothing is left of it.
    """
    try:
        import gguf
    except ImportError:
        raise Unavailable("GGUF files are written by the package gguf", remedy="pip install gguf") from None
    wanted, f32 = None if kind is None else encoded_type(kind), ow.as_dtype("f32")
    made = Counter[str]()
    opened = open_model(source)
    writer = _with_metadata(source, opened)
    for name, factors in _factors(opened.config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    for name in shown(list(opened.tensors), "writing"):
        value: Any = opened.tensors[name]
        if source.is_dir() and opened.config.architecture in ("llama", "mixtral"):
            value = _adjacent(opened.config, name, value)
        chosen = None if wanted is None else stored_type(name, value, wanted)
        if wanted is not None and len(value.shape) > 1:
            made["" if chosen is None else chosen.name] += 1
        if chosen is not None:
            value = rounded(name, value, chosen)
        dtype, shape = ow.as_dtype(value.dtype), value.shape
        if dtype.block == 1 and (len(shape) < 2 or not dtype.is_half):  # llama.cpp's norms and biases are f32
            value, dtype = rounded(name, value, f32), f32
        raw = np.frombuffer(value.data, np.uint8) if isinstance(value, ow.Blocks) else np.ascontiguousarray(value)
        rows = raw.view(np.uint8).reshape(*shape[:-1], shape[-1] // dtype.block * dtype.itemsize)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[dtype.name.upper()])
    with new_file(target) as part:
        with closing(writer):
            writer.write_header_to_file(part)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        _check_same(opened, part)
    return made


def _with_metadata(source: Path, opened: ModelFile) -> Any:
    """A writer that has the metadata: those of all shards of a file, or what a folder says in other words."""
    import gguf

    types = gguf.GGUFValueType
    if not source.is_dir():
        writer = gguf.GGUFWriter(None, opened.metadata["general.architecture"])
        known = {"general.architecture", "general.file_type"}
        for path in shards_of(source) or [source]:
            for field in gguf.GGUFReader(path).fields.values():
                if field.name in known or field.name.startswith(("GGUF.", "split.")):
                    continue
                known.add(field.name)
                inner = field.types[-1] if field.types[0] is types.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        return writer
    stored = "llama" if opened.config.architecture == "mixtral" else opened.config.architecture
    writer = gguf.GGUFWriter(None, stored)
    for key, entry in _metadata(opened).items():
        kind = types.get_type(entry)
        inner = types.get_type(entry[0]) if isinstance(entry, list) else None
        writer.add_key_value(key, entry, types.UINT32 if kind == types.INT32 else kind, sub_type=inner)
    return writer


def _adjacent(config: Config, name: str, value: Any) -> Any:
    """Rows of queries and keys in llama's order: the elements that rotate together lie beside each other."""
    if name.split(".")[-2] not in ("attn_q", "attn_k"):
        return value
    pairs = np.asarray(value).reshape(-1, 2, config.size // 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


def _check_same(opened: ModelFile, target: Path) -> None:
    """Refuse a file that says something else than its source, because GGUF has no key for it."""
    written = open_model(target).config
    ignored = ("name", "adjacent", "tied", "biases")
    for field in fields(Config):
        was, now = getattr(opened.config, field.name), getattr(written, field.name)
        if field.name not in ignored and was != now and not _near(was, now):
            raise FormatError(f"{opened.path}: GGUF cannot say that {field.name} is {was!r:.100}: it would be read as "
                              f"{now!r:.100}")  # fmt: skip


def _near(a: Any, b: Any) -> bool:
    """Equal up to the rounding of metadata and factors to f32."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_near(a[key], b[key]) or a[key] == b[key] for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_near(x, y) or x == y for x, y in zip(a, b, strict=True))
    names = getattr(type(a), "__dataclass_fields__", {}) if type(a) is type(b) else {}
    return bool(names) and all(_near(getattr(a, n), getattr(b, n)) or getattr(a, n) == getattr(b, n) for n in names)


def _factors(config: Config) -> dict[str, tuple[float, ...]]:
    """Tensors of rotary factors."""
    rope = config.rope
    if rope is None or rope.factors is None:
        return {}
    if rope.factors_long is None:
        return {"rope_freqs.weight": rope.factors}
    return {"rope_factors_short.weight": rope.factors, "rope_factors_long.weight": rope.factors_long}


def _metadata(opened: ModelFile) -> dict[str, Any]:
    """GGUF's keys for a folder (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
    config = opened.config
    stored = "llama" if config.architecture == "mixtral" else config.architecture
    eps = "layer_norm_rms_epsilon" if config.causal else "layer_norm_epsilon"
    own: dict[str, Any] = {
        "block_count": config.layers, "context_length": config.context, "embedding_length": config.width,
        "feed_forward_length": config.hidden, "attention.head_count": config.heads,
        "attention.head_count_kv": config.groups, "attention.key_length": config.size,
        "attention.value_length": config.size, f"attention.{eps}": config.eps, "vocab_size": config.vocabulary,
    }  # fmt: skip
    if config.window:
        own["attention.sliding_window"] = config.window
    if config.architecture == "gemma2":
        own |= {"attn_logit_softcapping": config.score_cap, "final_logit_softcapping": config.logit_cap}
    if config.experts:
        own |= {"expert_count": config.experts, "expert_used_count": config.experts_used}
        own |= {"expert_feed_forward_length": config.hidden} if stored != "llama" else {}
    if not config.causal:
        own |= {"attention.causal": False, "pooling_type": POOLING[config.pooling]}
    if rope := config.rope:
        own |= {"rope.freq_base": rope.base, "rope.dimension_count": rope.dims}
        if config.rope_local is not None:
            own["rope.freq_base_swa"] = config.rope_local.base
        if rope.scale != 1:
            own |= {"rope.scaling.type": "yarn" if rope.yarn else "linear", "rope.scaling.factor": 1 / rope.scale}
        own |= {f"rope.scaling.yarn_{key}": value for key, value in rope.yarn.items() if key in YARN}
        original = int(rope.yarn.get("original_context", rope.original_context))
        own |= {"rope.scaling.original_context_length": original} if original else {}
        own |= {"rope.scaling.attn_factor": rope.length} if rope.length != 1 else {}
    general = {"general.name": config.name or opened.path.name}
    return general | {f"{stored}.{key}": value for key, value in own.items()} | _vocabulary(opened)


def _vocabulary(opened: ModelFile) -> dict[str, Any]:
    """The tokenizer's keys, from ``tokenizer.json``: byte pairs of GPT-2 or SentencePiece, or BERT's word pieces."""
    path = opened.tokenizer_json
    if path is None:
        raise FormatError(f"{opened.path} has no tokenizer.json, which becomes a part of the GGUF file")
    tokenizer, data = read_tokenizer(opened), parse_json(path.read_bytes(), str(path))
    model = data.get("model") or {}
    added = {entry["id"]: CONTROL if entry.get("special") else USER_DEFINED for entry in data.get("added_tokens") or ()}
    pieces = [tokenizer.piece(i) or f"[PAD{i}]" for i in range(opened.config.vocabulary)]
    kinds = [added.get(i, NORMAL if tokenizer.piece(i) else UNUSED) for i in range(len(pieces))]
    keys: dict[str, Any] = {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    keys |= {} if tokenizer.bos is None else {"bos_token_id": tokenizer.bos}
    keys |= {} if tokenizer.eos is None else {"eos_token_id": tokenizer.eos}
    ends = sorted(tokenizer.ends - {tokenizer.eos, *spelled_ends(tokenizer.library)})
    keys |= dict(zip(("eot_token_id", "eom_token_id"), ends, strict=False))
    unknown = tokenizer.library.token_to_id(model["unk_token"]) if isinstance(model.get("unk_token"), str) else None
    keys |= {} if unknown is None else {"unknown_token_id": unknown}
    normalizer, splitting = data.get("normalizer") or {}, data.get("pre_tokenizer") or {}
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()]
    if model.get("type") == "WordPiece":
        pieces = [piece[2:] if piece.startswith("##") else piece if kind == CONTROL else f"▁{piece}"
                  for piece, kind in zip(pieces, kinds, strict=True)]  # fmt: skip
        keys |= {"model": "bert", "cls_token_id": tokenizer.bos, "seperator_token_id": tokenizer.eos}
        lower, strip = normalizer.get("lowercase", True), normalizer.get("strip_accents")
        keys |= {"normalizer.lowercase": lower, "normalizer.strip_accents": lower if strip is None else strip}
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        ranks = {pair.replace(" ", ""): -float(rank) for rank, pair in reversed(list(enumerate(pairs)))}
        kinds = [
            BYTE if piece[:3] == "<0x" and kind == NORMAL else kind for piece, kind in zip(pieces, kinds, strict=True)
        ]
        keys |= {"model": "llama", "scores": [ranks.get(piece, -1e6) for piece in pieces]}
        keys["add_space_prefix"] = "Prepend" in str(normalizer) or splitting.get("prepend_scheme", "never") != "never"
    elif model.get("type") == "BPE":
        keys |= {"model": "gpt2", "pre": pre_name(path, splitting, model.get("ignore_merges") is True), "merges": pairs}
    else:
        raise FormatError(f"{path}: {model.get('type')!r:.40} is no kind of tokenizer that is written here")
    keys |= {"tokens": pieces, "token_type": kinds}
    made = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if len(ends) > 2:
        made[END_TOKENS] = sorted(tokenizer.ends)
    if unsaid := _unsaid(data):
        made[WHOLE_TOKENIZER] = path.read_text(encoding="utf-8")
        warn_caller(f"{path}: GGUF has no key to say that {', '.join(unsaid)}. The file has all of tokenizer.json too, "
                    "which opweave reads; other programs may find other tokens")  # fmt: skip
    return made | ({} if opened.chat_template is None else {"tokenizer.chat_template": opened.chat_template})


def _unsaid(data: Mapping[str, Any]) -> list[str]:
    """What a ``tokenizer.json`` says for which GGUF has no key beside that for the whole of it."""
    model, normalizer, splitting = (data.get(key) or {} for key in ("model", "normalizer", "pre_tokenizer"))
    flagged = [f"{entry.get('content')!r:.40} has {flag}" for entry in data.get("added_tokens") or ()
               for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]  # fmt: skip
    found = [*flagged[:3], *(["further tokens have such"] if len(flagged) > 3 else [])]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    if model.get("type") == "WordPiece":
        plain = normalizer.get("type") == "BertNormalizer" and all(
            normalizer.get(key, True) for key in ("clean_text", "handle_chinese_chars")
        )
        split = splitting.get("type") == "BertPreTokenizer"
    elif model.get("byte_fallback"):
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        split = not splitting
        plain = steps in ([spaces], [{"type": "Prepend", "prepend": SPACE}, spaces]) or not (steps or split)
    else:
        plain, split = not steps, True  # `pre_name` knows how texts are split
    if not plain:
        found.append(f"texts are normalized by {[step.get('type') for step in steps]}")
    if not split:
        found.append(f"texts are split by {splitting.get('type')}")
    return found
