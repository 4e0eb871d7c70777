"""`open_model`: a GGUF file or a Hugging Face folder as a config, named tensors, a vocabulary and a chat template.

Nothing is read but the metadata: tensors are views of the mapped files. They have the names that GGUF gives them
(``blk.0.attn_q.weight``), whichever the format; a folder's tensors are renamed, and Gemma's norms get the 1 that its
folders leave out. Every tensor that the architecture needs is checked for its shape before anything is loaded.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

import opweave as ow
from opweave.errors import DTypeError, FormatError
from opweave.formats.load import described, read_tensors
from opweave.formats.tensor_file import parse_json
from opweave_models.config import Config, Pooling, config_from_gguf, config_from_hugging_face

__all__ = [
    "ModelFile", "Stacked", "encoded_type", "expected_tensors", "nbytes_of", "open_model", "rounded", "stored_type",
]  # fmt: skip

Shapes = dict[str, tuple[tuple[int, ...], bool]]
"""Name -> shape, and whether the tensor may be absent."""


@dataclass(frozen=True)
class ModelFile:
    """A model that was opened, but not loaded.

    Attributes:
        path: the file or folder.
        config: what the model is.
        tensors: canonical name -> array or `opweave.Blocks` over the mapped bytes, or `Stacked`.
        metadata: of GGUF as the file has them; of a folder the contents of ``tokenizer_config.json``.
        tokenizer_json: the file of that name in a folder, or ``None``.
        chat_template: a Jinja template, or ``None`` where the model has none.
        ends: ids of the tokens that end an answer, as a folder lists them; GGUF names them in its metadata.
    """

    path: Path
    config: Config
    tensors: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tokenizer_json: Path | None = None
    chat_template: str | None = None
    ends: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(map(nbytes_of, self.tensors.values()))

    def release(self) -> None:
        """Let go of the mapped pages that were read: those that are read again come back from the file. Devices that
        have copies of weights read no more of them. Memory that was freed goes back to the system too: lists of merges
        and what prompts needed, which the GNU C library keeps unless it is told."""
        found: dict[int, mmap.mmap] = {}
        for base in chain.from_iterable(map(_mapped, self.tensors.values())):
            while isinstance(base, np.ndarray | memoryview):
                base = base.base if isinstance(base, np.ndarray) else base.obj
            if isinstance(base, mmap.mmap):
                found[id(base)] = base
        for pages in found.values() if hasattr(mmap, "MADV_DONTNEED") else ():
            with suppress(OSError):  # pages that a driver has locked stay
                pages.madvise(mmap.MADV_DONTNEED)
        with suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)

    @property
    def label(self) -> str:
        """What tells this model from others, for files of sequences that it computed: its architecture, and a checksum
        of the names, shapes and first bytes of its tensors."""
        checksum = 0
        for name, value in self.tensors.items():
            first = np.ascontiguousarray(_mapped(value)[0].reshape(-1)[:64]).tobytes()
            checksum = crc32(f"{name} {value.shape} {value.dtype}".encode() + first, checksum)
        return f"{self.config.architecture} {checksum:08x}"

    @property
    def kinds(self) -> Mapping[str, int]:
        """Dtype -> bytes of the tensors stored in it, the most first."""
        found: dict[str, int] = {}
        for value in self.tensors.values():
            kind = str(ow.as_dtype(value.dtype))
            found[kind] = found.get(kind, 0) + nbytes_of(value)
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Stacked:
    """The matrices of a layer's experts, which folders store one by one. ``numpy.asarray`` makes one array of them,
    anew each time; shape, dtype and bytes are known without it."""

    parts: Sequence[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(*[part.dtype for part in self.parts])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.stack(self.parts, dtype=dtype or self.dtype)


def _mapped(value: Any) -> Sequence[Any]:
    """The arrays over the bytes of a file that a tensor consists of."""
    return value.parts if isinstance(value, Stacked) else [value.data if isinstance(value, ow.Blocks) else value]


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Read a model's metadata and map its tensors; no weights are read.

    Args:
        path: a GGUF file, one of several shards of it, or a folder with ``config.json``, safetensors and
            ``tokenizer.json``.

    Raises:
        FormatError: a file that cannot be read or is damaged, missing or contradicting metadata, a missing or misshapen
            tensor; the message names the file and the tensor.
        UnknownNameError: another architecture.
        DTypeError: a tensor of a type that opweave does not have.
    """
    place = Path(path)
    try:
        return _open(place)
    except OSError as error:
        raise FormatError(f"{place} cannot be read: {error.strerror or error}") from None


def _open(place: Path) -> ModelFile:
    if place.is_dir() and (place / "config.json").exists():
        return _open_folder(place)
    found = read_tensors(place)
    metadata = getattr(found, "metadata", None)
    if not isinstance(metadata, Mapping) or "general.architecture" not in metadata:
        raise FormatError(f"{place} is no model: a GGUF file with general.architecture, or a folder with config.json")
    config = config_from_gguf(place, metadata, found)
    chat = metadata.get("tokenizer.chat_template")
    for part in (found, *getattr(found, "parts", {}).values()):
        part.metadata = {}  # the vocabulary goes when the caller has read it
    tensors = _checked(place, config, found, {name: name for name in found})
    return ModelFile(place, config, tensors, metadata, None, chat if isinstance(chat, str) else None)


def _open_folder(place: Path) -> ModelFile:
    path = place / "config.json"
    values = _read_json(path)
    config = config_from_hugging_face(path, values, _pooling(place))
    if (place / "adapter_config.json").exists():
        raise FormatError(f"{place / 'adapter_config.json'}: adapters are not supported; merge it into the model")
    whole = place / "model.safetensors"  # what else lies beside it, such as a GGUF file, is not the folder's model
    alone = whole.exists() and not (place / "model.safetensors.index.json").exists()
    found = read_tensors(whole if alone else place)
    known = {name: new for name in found if (new := _canonical(name, config)) is not None}
    unknown = [name for name, new in known.items() if new == name]
    if unknown:
        raise FormatError(f"{place}: tensor {unknown[0]!r} (one of {len(unknown)}) is none of {config.architecture}'s")
    sources = {new: old for old, new in known.items()}
    twice = [name for name, new in known.items() if sources[new] != name]
    if twice:
        raise FormatError(f"{place}: tensors {twice[0]!r} and {sources[known[twice[0]]]!r} are the same one")
    sources = _with_experts(sources)
    tensors = _checked(place, config, found, sources)
    settings = _read_json(place / "tokenizer_config.json", optional=True)
    chat: Any = settings.get("chat_template")
    if isinstance(chat, list):  # several, by name
        chat = next((e.get("template") for e in chat if isinstance(e, Mapping) and e.get("name") == "default"), None)
    own = place / "chat_template.jinja"
    if own.exists():
        try:
            chat = own.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{own} is no UTF-8: {error}") from None
    generation = _read_json(place / "generation_config.json", optional=True)
    ends = generation.get("eos_token_id", values.get("eos_token_id"))
    listed = ends if isinstance(ends, list) else [ends]
    tokenizer = place / "tokenizer.json"
    return ModelFile(
        place, config, tensors, settings, tokenizer if tokenizer.exists() else None,
        chat if isinstance(chat, str) else None, tuple(end for end in listed if isinstance(end, int)),
    )  # fmt: skip


def nbytes_of(value: Any) -> int:
    """Bytes of an array, of `opweave.Blocks` or of `Stacked`."""
    return int(value.data.nbytes if isinstance(value, ow.Blocks) else value.nbytes)


def stored_type(name: str, value: Any, wanted: ow.DType) -> ow.DType | None:
    """The type that a tensor is rounded to where ``wanted`` was asked for: q8_0 where its rows do not consist of whole
    blocks of that; ``None``: it stays as it is, as norms, biases, routers and matrices of narrow rows do."""
    if len(value.shape) < 2 or "ffn_gate_inp" in name:
        return None
    return next((kind for kind in (wanted, ow.as_dtype("q8_0")) if value.shape[-1] % kind.block == 0), None)


def encoded_type(kind: str) -> ow.DType:
    """The type of that name; raises `UnknownNameError` or `DTypeError` where values are not rounded to it."""
    wanted = ow.as_dtype(kind)
    rounded("", np.zeros((1, wanted.block), np.float32), wanted)
    return wanted


def rounded(name: str, value: Any, kind: ow.DType) -> Any:
    """A tensor in another type: blocks, f16, bf16 or f32.

    Raises:
        DTypeError: a type that floats are not stored in here, or values beyond its largest.
    """
    if ow.as_dtype(value.dtype) == kind:
        return value
    floats = np.asarray(ow.dequantize(value) if isinstance(value, ow.Blocks) else value, np.float32)
    if kind.name not in ("f16", "bf16", "f32"):
        return ow.quantize(floats, kind)
    with np.errstate(over="ignore"):
        made = floats.astype(kind.numpy)
    lost = np.isfinite(floats) & ~np.isfinite(made)
    if lost.any():
        raise DTypeError(f"{name} has values that {kind} cannot hold, up to {np.abs(floats[lost]).max():.4g}: take f32")
    return made


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    return parse_json(path.read_bytes(), str(path))


def _pooling(place: Path) -> Pooling | None:
    """What a folder of sentence-transformers says about pooling."""
    path = place / "modules.json"
    listed = parse_json(b'{"modules": %b}' % path.read_bytes(), str(path))["modules"] if path.exists() else []
    for module in listed if isinstance(listed, list) else [listed]:
        of = module if isinstance(module, Mapping) else {}
        kind, name = str(of.get("type", module)).rpartition(".")[2], of.get("path", "")
        if kind not in ("Transformer", "Pooling", "Normalize") or (kind == "Pooling" and name != "1_Pooling"):
            raise FormatError(f"{path}: the module {name!r:.60} ({kind[:60]}) is not computed here")
    path = place / "1_Pooling" / "config.json"
    settings = _read_json(path, optional=True)
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    chosen = chosen or ([str(settings["pooling_mode"])] if settings.get("pooling_mode") else [])
    known: dict[str, Pooling] = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "cls": "cls",
                                 "mean": "mean"}  # fmt: skip
    if len(chosen) > 1 or not known.keys() >= set(chosen):
        raise FormatError(f"{path}: tokens are pooled by {', '.join(chosen)[:100]}; here by mean or first token")
    return known[chosen[0]] if chosen else None


# --- which tensors there are ----------------------------------------------------------------------------------------


def expected_tensors(config: Config, names: Collection[str] = ()) -> Shapes:
    """The tensors of a model by name, with their shapes, and whether they may be absent. ``names`` are those of a file:
    its queries, keys and values may come from one matrix."""
    width, size = config.width, config.size
    shapes: Shapes = {"token_embd.weight": ((config.vocabulary, width), False)}
    add = _Adder(shapes, config.biases)
    if not config.causal:
        if config.rope is None:
            add("position_embd.weight", config.context, width)
        # Folders say which biases there are; files do not, and may lack these embeddings too.
        add("token_types.weight", -1, width, optional=config.biases is None or config.architecture != "bert")
        add.norm("token_embd_norm", width)
    else:
        add("output_norm.weight", width)
        add("output.weight", config.vocabulary, width, optional=config.tied)
    q, kv = config.heads * size, config.groups * size
    for i in range(config.layers):
        add.prefix = f"blk.{i}."
        separate = f"blk.{i}.attn_q.weight" in names or config.architecture not in ("phi3", "nomic-bert")
        if not separate or f"blk.{i}.attn_qkv.weight" in names:
            add.linear("attn_qkv", q + 2 * kv, width)
        else:
            add.linear("attn_q", q, width)
            add.linear("attn_k", kv, width)
            add.linear("attn_v", kv, width)
        add.linear("attn_output", width, q)
        if config.causal:
            _decoder_layer(add, config)
        else:
            _encoder_layer(add, config)
    return shapes


class _Adder:
    """Adds tensors of one layer after the other."""

    def __init__(self, shapes: Shapes, biases: tuple[str, ...] | None) -> None:
        self.shapes, self.biases, self.prefix = shapes, biases, ""

    def __call__(self, name: str, *shape: int, optional: bool = False) -> None:
        self.shapes[self.prefix + name] = shape, optional

    def linear(self, name: str, out: int, into: int) -> None:
        self(f"{name}.weight", out, into)
        if self.biases is None or name.replace("qkv", "q") in self.biases:
            self(f"{name}.bias", out, optional=self.biases is None)

    def norm(self, name: str, width: int) -> None:
        self(f"{name}.weight", width)
        self(f"{name}.bias", width)


def _decoder_layer(add: _Adder, config: Config) -> None:
    width, hidden = config.width, config.hidden
    add("attn_norm.weight", width)
    add("ffn_norm.weight", width)
    if config.architecture in ("qwen3", "qwen3moe", "gemma3"):
        add("attn_q_norm.weight", config.size)
        add("attn_k_norm.weight", config.size)
    if config.architecture.startswith("gemma"):
        add("post_attention_norm.weight", width)
        add("post_ffw_norm.weight", width)
    if config.experts:
        add("ffn_gate_inp.weight", config.experts, width)
        add("ffn_gate_exps.weight", config.experts, hidden, width)
        add("ffn_up_exps.weight", config.experts, hidden, width)
        add("ffn_down_exps.weight", config.experts, width, hidden)
        return
    if config.architecture != "phi3":
        add.linear("ffn_gate", hidden, width)
    add.linear("ffn_up", 2 * hidden if config.architecture == "phi3" else hidden, width)
    add.linear("ffn_down", width, hidden)


def _encoder_layer(add: _Adder, config: Config) -> None:
    add.norm("attn_output_norm", config.width)
    add.norm("layer_output_norm", config.width)
    add.linear("ffn_up", config.hidden, config.width)
    add.linear("ffn_down", config.width, config.hidden)
    if config.architecture == "nomic-bert":
        add.linear("ffn_gate", config.hidden, config.width)


def _checked(place: Path, config: Config, found: Mapping[str, Any], sources: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors that the architecture has, of the right shapes; a source is a name, or the names of all experts."""
    entries = _Entries(found, config)
    if config.layers > len(found):
        raise FormatError(f"{place}: the metadata say {config.layers} layers, and there are {len(found)} tensors")
    chosen: dict[str, Any] = {}
    expected = expected_tensors(config, sources)
    others = [name for name in sources if name not in expected and not name.startswith("rope_")]
    if others:  # what a model has and its results need is not left out in silence
        raise FormatError(f"{place}: tensor {others[0]!r} (one of {len(others)}) is none of {config.architecture}'s")
    for name, (shape, optional) in expected.items():
        if name not in sources:
            if optional:
                continue
            also = " (lm_head.weight)" if name == "output.weight" else ""  # the matrix of embeddings is not it
            raise FormatError(f"{place} lacks the tensor {name!r}{also} of shape {list(shape)}, "
                              f"which {config.architecture} needs")  # fmt: skip
        source = sources[name]
        stored = entries.shape(source)
        if len(stored) != len(shape) or any(-1 != want != have for want, have in zip(shape, stored, strict=True)):
            raise FormatError(f"{place}: tensor {name!r} has the shape {list(stored)}, and by the metadata "
                              f"{list(shape)}")  # fmt: skip
        chosen[name] = source
    return _Tensors(place, entries, chosen)


def _with_experts(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Names that folders give each expert (``blk.0.ffn_up_exps.weight#3``) become one, with a tuple of sources."""
    made: dict[str, Any] = {}
    experts: dict[str, dict[int, str]] = {}
    for name, source in sources.items():
        whole, _, number = name.partition("#")
        if number:
            experts.setdefault(whole, {})[int(number)] = source
        else:
            made[name] = source
    for whole, numbered in experts.items():
        if sorted(numbered) == list(range(len(numbered))):
            made[whole] = tuple(numbered[i] for i in range(len(numbered)))
    return made


class _Entries:
    """Reads tensors by their sources."""

    def __init__(self, found: Mapping[str, Any], config: Config) -> None:
        self._found, self._config = found, config

    def shape(self, source: str | tuple[str, ...]) -> tuple[int, ...]:
        if isinstance(source, str):
            return tuple(described(self._found, source).shape)
        shapes = {self.shape(each) for each in source}
        return (len(source), *shapes.pop()) if len(shapes) == 1 else ()

    def read(self, name: str, source: str | tuple[str, ...]) -> Any:
        if isinstance(source, tuple):
            return Stacked([self._found[each] for each in source])
        value = self._found[source]
        if source != name and name.endswith("norm.weight") and self._config.architecture.startswith("gemma"):
            return np.asarray(value, np.float32) + 1  # folders store what Gemma adds to 1
        return value


class _Tensors(Mapping[str, Any]):
    """Tensors by canonical name, each read when it is asked for, and then kept."""

    def __init__(self, place: Path, entries: _Entries, sources: Mapping[str, Any]) -> None:
        self._place, self._entries, self._sources = place, entries, sources
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            value = self._entries.read(name, self._sources[name])
            if isinstance(value, Stacked) and any(isinstance(part, ow.Blocks) for part in value.parts):
                raise FormatError(f"{self._place}: tensor {name!r} is in blocks, expert by expert; floats are stacked")
            if ow.as_dtype(value.dtype).is_float or ow.as_dtype(value.dtype).is_quantized:
                self._read[name] = value
            else:
                raise FormatError(f"{self._place}: tensor {name!r} is {value.dtype}; weights are floats or blocks")
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


# --- names of Hugging Face ------------------------------------------------------------------------------------------

_WHOLE: Final = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight", "embeddings.LayerNorm.bias": "token_embd_norm.bias",
    "emb_ln.weight": "token_embd_norm.weight", "emb_ln.bias": "token_embd_norm.bias",
}  # fmt: skip

_PARTS: Final = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm1": "attn_output_norm", "norm2": "layer_output_norm",
    "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down",
}  # fmt: skip

_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,4})\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")
_EXPERT_PARTS: Final = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_LAYER: Final = re.compile(r"(?:encoder\.)?layers?\.(\d{1,4})\.(.+)\.(weight|bias)$")
_PREFIX: Final = re.compile(r"^(?:language_model\.)?(?:model\.)?(?:language_model\.)?(?:bert\.)?")
_UNUSED: Final = re.compile(r"(?:.*\.)?(?:rotary_emb\.inv_freq|position_ids)$|vision_tower\.|multi_modal_projector\."
                            r"|pooler\.|cls\.")  # fmt: skip
"""What transformers computes anew, an encoder of pictures, and heads of encoders that embeddings do not need."""


def _canonical(name: str, config: Config) -> str | None:
    """GGUF's name for a tensor of a folder, which stays as it is where there is none; ``None``: no result needs it."""
    short = _PREFIX.sub("", name)
    if short in _WHOLE or _UNUSED.match(short):
        return _WHOLE.get(short)
    layer = _LAYER.match(short)
    if layer is None:
        return name
    number, part, kind = layer.groups()
    expert = _EXPERT.match(part)
    if expert is not None:
        return f"blk.{number}.ffn_{_EXPERT_PARTS[expert[2]]}_exps.{kind}#{expert[1]}"
    if part == "post_attention_layernorm":
        known: str | None = "post_attention_norm" if config.architecture.startswith("gemma") else "ffn_norm"
    else:
        known = _PARTS.get(part)
    return name if known is None else f"blk.{number}.{known}.{kind}"
