"""`Tokenizer`: text to ids and back, by the library ``tokenizers``, from ``tokenizer.json`` or GGUF's metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from string import hexdigits
from threading import Lock
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from opweave.errors import BoundsError, FormatError, UnknownNameError
from opweave_models.files import ModelFile

__all__ = [
    "END_TOKENS", "VOCABULARY", "WHOLE_TOKENIZER", "Stream", "Tokenizer", "pre_name", "read_tokenizer", "spelled_ends",
]  # fmt: skip

WHOLE_TOKENIZER: Final = "tokenizer.huggingface.json"
"""The key of GGUF for a whole ``tokenizer.json``, which counts before the keys of its parts."""

END_TOKENS: Final = "opweave.end_token_ids"
"""The key for the tokens that end an answer, where they are more than GGUF has keys for."""

VOCABULARY: Final = frozenset(
    [WHOLE_TOKENIZER, *(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))]
)
"""Metadata of GGUF that are as long as the vocabulary."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens in ``tokenizer.ggml.token_type``."""

SPACE: Final = "▁"

_SHOWN: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES: Final = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)}.difference(_SHOWN)))
}
"""Characters with which byte-level vocabularies (GPT-2's) spell bytes."""

BYTE_PIECES: Final = {f"<0x{a}{b}>": bytes.fromhex(a + b) for a in hexdigits for b in hexdigits}
"""Pieces with which SentencePiece's vocabularies spell bytes."""

WHOLE: Final = 1 << 24
"""Parts of texts that are looked up in a vocabulary, before the library gets all of it, which takes as long."""

LONG: Final = 1 << 12
"""Characters of a text from which on the library gives up the interpreter while it works, for other threads."""

_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES: Final = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_LLAMA3: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_MERGED: Final = (*_LLAMA3, "tekken")
"""Values of ``tokenizer.ggml.pre`` with which texts have a first token by default, and whole pieces need no merges."""

_SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe"), (_SHORT + _LETTERS + r"\p{N}{1,3}" + _REST,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_SHORT + _LETTERS + r"\p{N}" + _REST,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    "tekken": (rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASHES,),
    "gpt-4o": (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}" + _SLASHES,
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""``tokenizer.ggml.pre`` -> patterns that split a text one after the other; bytes are merged within the pieces."""

_END_TEXTS: Final = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
                     "<EOT>", "<|eom_id|>")  # fmt: skip
"""Control tokens that end an answer in the formats of chats, as llama.cpp knows them."""


class ScoredPieces:
    """SentencePiece's byte-pair encoding, of which the library gets the pieces that a text contains: of all neighbours
    that make a piece, the pair of the highest score merges.

    What a text becomes depends on these alone. To list the merges of a vocabulary of 262,144 pieces takes seconds, of
    those in a text a few milliseconds.

    Args:
        pieces, kinds, scores: of the tokens, by id.
        unknown: the token that stands for what is neither a piece nor bytes that have tokens.
        prefix: what the library puts before a part of a text.

    Attributes:
        library: a tokenizer of the library, which knows what special tokens are called.
    """

    def __init__(
        self, pieces: Sequence[str], kinds: np.ndarray[Any, Any], scores: np.ndarray[Any, Any], unknown: str | None,
        prefix: str,
    ) -> None:  # fmt: skip
        self.pieces: Final = pieces
        self._ids: Final = dict(zip(pieces, range(len(pieces)), strict=True))
        self._scores: Final = np.where(np.isin(kinds, (NORMAL, UNUSED, USER_DEFINED)), scores, np.nan)
        self._kept: Final = self._ids.keys() & {unknown, *BYTE_PIECES}
        self._longest: Final = max(map(len, pieces))
        self._unknown, self._prefix, self._left = unknown, prefix, WHOLE
        spelled = {self._ids[piece]: BYTE_PIECES[piece] for piece in self._ids.keys() & BYTE_PIECES}
        self._bytes: Final = {i: byte for i, byte in spelled.items() if kinds[i] in (BYTE, NORMAL)}
        named = {pieces[i] for i in np.flatnonzero(kinds != NORMAL).tolist()} | set(_END_TEXTS)
        self.library: Final = Library(self._model(named & self._ids.keys()))

    def prepare(self, text: str | None) -> None:
        """Give the library what a text needs; ``None``: the whole vocabulary, which it also gets after many texts."""
        if self._left <= 0:
            return
        self._left -= self._left if text is None else len(text) * min(len(text), self._longest)
        if text is None or self._left <= 0:
            self.library.model = self._model(self._ids.keys())
            return
        line, known, found = text.replace(" ", SPACE), self._ids.keys(), set(self._kept)
        for at in range(len(line)):
            texts = [line[at:end] for end in range(at + 1, min(len(line), at + self._longest) + 1)]
            found |= known & texts
            if self._prefix:
                found |= known & [self._prefix + text for text in ("", *texts)]
        self.library.model = self._model(found)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens. Bytes that make no character become replacement characters, those beside them do not."""
        some = [i for i in ids if i < len(self.pieces)]
        parts = [self._bytes[i] if i in self._bytes else self.pieces[i].replace(SPACE, " ").encode() for i in some]
        text = b"".join(parts).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._prefix else text

    def _model(self, pieces: Set[str]) -> models.BPE:
        vocabulary = {piece: self._ids[piece] for piece in pieces}
        ids = np.sort(np.fromiter(vocabulary.values(), np.int64))
        ids = ids[~np.isnan(self._scores[ids])]  # of the pieces that merge
        usable = {self.pieces[i] for i in ids.tolist()}
        ordered = [self.pieces[i] for i in ids[np.argsort(-self._scores[ids], kind="stable")].tolist()]
        merges = [(piece[:at], piece[at:]) for piece in ordered for at in range(1, len(piece))
                  if piece[:at] in usable and piece[at:] in usable]  # fmt: skip
        return models.BPE(vocab=vocabulary, merges=merges, unk_token=self._unknown, fuse_unk=True, byte_fallback=True)


class Tokenizer:
    """Text to ids and back.

    Attributes:
        bos, eos: ids of the tokens that begin and end a text; ``None`` where there is none.
        ends: ids of all tokens that end an answer.
        add_bos, add_eos: whether `encode` adds them.
    """

    def __init__(
        self, library: Library, bos: int | None, eos: int | None, ends: Iterable[int], add_bos: bool, add_eos: bool,
        scored: ScoredPieces | None = None,
    ) -> None:  # fmt: skip
        self._library, self._scored, self._lock = library, scored, Lock()
        self.bos, self.eos, self.ends = bos, eos, frozenset(ends)
        self.add_bos, self.add_eos = add_bos, add_eos
        self._special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}

    def __len__(self) -> int:
        return self._library.get_vocab_size() if self._scored is None else len(self._scored.pieces)

    @property
    def library(self) -> Library:
        """The tokenizer of the library ``tokenizers``, with the whole vocabulary."""
        with self._lock:
            if self._scored is not None:
                self._scored.prepare(None)
            return self._library

    def encode(self, text: str, *, special: bool = True, parse: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            text: any text; half characters, which UTF-8 cannot express, become the replacement character.
            special: add the tokens that begin and end a text, as the model has it.
            parse: control tokens that the text spells out (``<|im_end|>``) become these tokens; ``False``: a text of
                somebody else cannot end its turn.
        """
        if not isinstance(text, str):
            raise BoundsError(f"a text is a str, not {text!r:.60}")
        text = text.encode("utf-8", "replace").decode("utf-8")
        with self._lock:
            if self._scored is not None:
                self._scored.prepare(text)
            self._library.encode_special_tokens = not parse
            if len(text) < LONG:
                ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
            else:
                ids = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if special:
            begin = [self.bos] if self.add_bos and self.bos is not None else []
            end = [self.eos] if self.add_eos and self.eos is not None else []
            ids = [*begin, *ids, *end]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; ``special``: control tokens are written too."""
        text: str
        if min(ids, default=0) < 0:
            raise BoundsError(f"tokens are ids from 0, not {ids!r:.60}")
        if self._scored is None:
            text = self._library.decode(list(ids), skip_special_tokens=not special)
        else:
            text = self._scored.decode([i for i in ids if special or i not in self._special])
        return text

    def piece(self, token: int) -> str:
        """A token as the vocabulary spells it; "" of an id that it does not have."""
        if self._scored is None:
            return self._library.id_to_token(token) or ""
        return self._scored.pieces[token] if 0 <= token < len(self._scored.pieces) else ""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds within a text, in UTF-8: several may make one character; control tokens as spelled."""
        first = self.decode([token], special=True)  # without the space that some kinds take from a text's beginning
        text, piece = self.decode([token, token], special=True)[len(first) :], self.piece(token)
        if "\ufffd" not in text:
            return text.encode()
        if piece in BYTE_PIECES:
            return BYTE_PIECES[piece]
        return bytes(map(BYTES.__getitem__, piece)) if BYTES.keys() >= set(piece) else text.encode()

    @cached_property
    def guided(self) -> Any:
        """The vocabulary as llguidance reads it, which takes seconds where it is large. Raises `ImportError`."""
        import llguidance

        return llguidance.LLTokenizer(self.library.to_str(), eos_token=min(self.ends, default=None))

    def stream(self, before: Sequence[int] = ()) -> Stream:
        """A decoder of an answer, token by token, behind the ids before it."""
        return Stream(self, before)


class Stream:
    """Decodes tokens as they come: each gives the text that is certain by then, which may be none."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._ids = tokenizer, list(before[-1:])
        # Text begins otherwise than it goes on, so that tokens are decoded together with those before them.
        self._first, self._given = 0, len(self._ids)

    def add(self, token: int) -> str:
        """The new text; "" within a character of several tokens."""
        self._ids.append(token)
        text = self.finish()
        if not text or text.endswith("\ufffd"):
            return ""
        self._first, self._given = self._given, len(self._ids)
        return text

    def finish(self) -> str:
        """What was held back: bytes that make no whole character, as replacement characters."""
        given, ids = self._tokenizer.decode(self._ids[self._first : self._given]), self._ids[self._first :]
        return self._tokenizer.decode(ids)[len(given) :]


def read_tokenizer(file: ModelFile) -> Tokenizer:
    """The tokenizer of a model.

    Raises:
        FormatError: a vocabulary that is missing, damaged or contradicts itself.
        UnknownNameError: a kind of vocabulary, or of splitting text, that is not known here.
    """
    if file.tokenizer_json is not None:
        return _from_json(file)
    if "tokenizer.ggml.model" not in file.metadata:
        raise FormatError(f"{file.path} has no tokenizer: neither tokenizer.json nor tokenizer.ggml.model")
    try:
        return _from_gguf(file)
    except (FormatError, UnknownNameError):
        raise
    except Exception as error:  # the library raises plain exceptions
        raise FormatError(f"{file.path}: its vocabulary makes no tokenizer: {error}") from error


def _from_json(file: ModelFile) -> Tokenizer:
    path, settings = file.tokenizer_json, file.metadata
    assert path is not None
    library = _of_json(str(path), path.read_bytes())

    def token(key: str) -> int | None:
        value = settings.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        return library.token_to_id(value) if isinstance(value, str) else None

    # What the library's post-processor adds to a text says what the model wants.
    around = library.encode("a", add_special_tokens=True).ids
    plain = library.encode("a", add_special_tokens=False).ids
    front = around[0] if around[:1] != plain[:1] and around else None
    back = around[-1] if around[-1:] != plain[-1:] and around else None
    bos, eos = token("bos_token") if front is None else front, token("eos_token") if back is None else back
    ends = {*file.ends, *([] if eos is None else [eos]), *spelled_ends(library)}
    return Tokenizer(library, bos, eos, ends, front is not None, back is not None)


def _of_json(name: str, data: bytes) -> Library:
    try:
        library = Library.from_buffer(data)
    except Exception as error:  # the library raises plain exceptions
        raise FormatError(f"{name} is no tokenizer: {error}") from None
    library.no_padding()
    library.no_truncation()
    return library


def spelled_ends(library: Library) -> list[int]:
    """The ids of tokens that end an answer by what they are called."""
    found = (library.token_to_id(text) for text in _END_TEXTS)
    return [token for token in found if token is not None]


# --- from GGUF ------------------------------------------------------------------------------------------------------


def _from_gguf(file: ModelFile) -> Tokenizer:
    data, path = file.metadata, file.path
    pieces = data.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, list) or set(map(type, pieces)) != {str}:
        raise FormatError(f"{path}: tokenizer.ggml.tokens are texts")
    kinds = _column(path, data, "tokenizer.ggml.token_type", len(pieces), NORMAL)
    model = data["tokenizer.ggml.model"]
    makers: dict[str, Callable[..., Library | ScoredPieces]]
    makers = {"llama": _sentencepiece, "gpt2": _byte_pairs, "bert": _word_pieces, "t5": _unigram}
    if model not in makers:
        raise UnknownNameError("tokenizer", str(model)[:60], makers, f"(in {path})", listed=True)
    scored = None
    if WHOLE_TOKENIZER in data:
        library = _of_json(f"{path}: {WHOLE_TOKENIZER}", str(data[WHOLE_TOKENIZER]).encode())
        if max(library.get_vocab().values(), default=0) >= len(pieces):
            raise FormatError(f"{path}: {WHOLE_TOKENIZER} has more tokens than the vocabulary, {len(pieces):,}")
    else:
        made = makers[model](path, data, pieces, kinds)
        library, scored = (made.library, made) if isinstance(made, ScoredPieces) else (made, None)
        _add_tokens(library, data, pieces, kinds)

    def token(key: str, default: int | None = None) -> int | None:
        known = default if default is not None and default < len(pieces) else None
        value = data.get(f"tokenizer.ggml.{key}_token_id", known)
        if value is None or (isinstance(value, int) and 0 <= value < len(pieces)):
            return value
        raise FormatError(f"{path}: tokenizer.ggml.{key}_token_id is no id of the vocabulary: {value!r:.60}")

    if model == "bert":
        bos, eos = token("cls", token("bos", 101)), token("seperator", 102)
    else:
        bos, eos = token("bos", 1 if model == "llama" else None), token("eos", {"llama": 2, "t5": 1}.get(model))
    listed = data.get(END_TOKENS, [])
    if not isinstance(listed, (list, np.ndarray)) or not all(0 <= end < len(pieces) for end in listed):
        raise FormatError(f"{path}: {END_TOKENS} are ids of the vocabulary, not {listed!r:.60}")
    stops = {eos, token("eot"), token("eom"), *map(int, listed), *spelled_ends(library)} - {None}
    adds_bos = data.get("tokenizer.ggml.add_bos_token", model == "llama" or (model == "gpt2" and _pre(data) in _MERGED))
    adds_eos = data.get("tokenizer.ggml.add_eos_token", model in ("bert", "t5"))
    if model == "bert":  # the separator ends every text
        adds_bos, adds_eos = True, True
    return Tokenizer(library, bos, eos, stops, adds_bos is True, adds_eos is True, scored)  # type: ignore[arg-type]


def _add_tokens(
    library: Library, data: Mapping[str, Any], pieces: Sequence[str], kinds: np.ndarray[Any, Any]
) -> None:  # fmt: skip
    """Have the library find control tokens, and those that somebody added, as wholes."""
    special = {*np.flatnonzero((kinds == CONTROL) | (kinds == UNKNOWN)).tolist(), *spelled_ends(library)}
    named = str(data.get("general.name")).lower()
    # Phi-3's own tokenizer takes the spaces behind these tokens away; GGUF has no key for it.
    strips = set(pieces) - {"<unk>", "<s>", "<|endoftext|>"} if "phi3" in named.replace("-", "") else set()

    def added(ids: Iterable[int]) -> list[AddedToken]:
        return [AddedToken(pieces[i], normalized=False, rstrip=pieces[i] in strips) for i in ids]

    library.add_special_tokens(added(sorted(special)))
    library.add_tokens(added(i for i in np.flatnonzero(kinds == USER_DEFINED).tolist() if i not in special))


def _column(path: object, data: Mapping[str, Any], key: str, count: int, default: float) -> np.ndarray[Any, Any]:
    column = data.get(key)
    if column is None:
        return np.full(count, default)
    if not isinstance(column, np.ndarray) or column.shape != (count,):
        raise FormatError(f"{path}: {key} has a number for each of {count:,} tokens")
    return column


def _sentencepiece(
    path: object, data: Mapping[str, Any], pieces: list[str], kinds: np.ndarray[Any, Any]
) -> ScoredPieces:
    scores = _column(path, data, "tokenizer.ggml.scores", len(pieces), 0.0)
    unknown = data.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = data.get("tokenizer.ggml.add_space_prefix", True) is True
    name = pieces[unknown] if isinstance(unknown, int) else None
    made = ScoredPieces(pieces, kinds, scores, name, SPACE if prefix else "")
    spaces = [normalizers.Replace(" ", SPACE)]
    made.library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return made


def _byte_pairs(path: object, data: Mapping[str, Any], pieces: list[str], kinds: np.ndarray[Any, Any]) -> Library:
    """GPT-2's byte-pair encoding: pieces of text by a pattern, within which merges are listed."""
    lines = data.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise FormatError(f"{path} lacks tokenizer.ggml.merges")
    merges = [tuple(line.split(" ", 1)) for line in lines]
    if any(len(pair) != 2 for pair in merges):
        raise FormatError(f"{path}: tokenizer.ggml.merges are two pieces each, separated by a space")
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    library = Library(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=_pre(data) in _MERGED))
    library.pre_tokenizer = _splitting(path, _pre(data))
    library.decoder = decoders.ByteLevel()
    return library


def _pre(data: Mapping[str, Any]) -> str:
    return str(data.get("tokenizer.ggml.pre", "default"))


def _splitting(path: object, pre: str) -> pre_tokenizers.PreTokenizer:
    if pre not in _SPLITS:
        raise UnknownNameError("way to split text", pre[:60], _SPLITS, f"(tokenizer.ggml.pre of {path})")
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def pre_name(path: object, splitting: Any, whole: bool = False) -> str:
    """The value of ``tokenizer.ggml.pre`` for the ``pre_tokenizer`` of a ``tokenizer.json``; ``whole`` pieces need no
    merges there. Raises `FormatError` for one that splits text in a way that is not known here."""
    found: list[Any] = []
    for step in splitting.get("pretokenizers", [splitting]) if isinstance(splitting, Mapping) else []:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "ByteLevel" and step.get("add_prefix_space") is False:
            found += [_GPT2] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits") is True:
            found.append(r"\p{N}")
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(pattern.get("Regex") if isinstance(pattern, Mapping) else pattern)
        else:
            found.append(f"{kind} {pattern or ''}")
    for name, patterns in _SPLITS.items():
        if (patterns, name in _MERGED) == (tuple(found), whole):
            return name
    raise FormatError(f"{path}: text is split by {str(found)[:100]}, for which GGUF's readers have no name here")


def _word_pieces(path: object, data: Mapping[str, Any], pieces: list[str], kinds: np.ndarray[Any, Any]) -> Library:
    """BERT's word pieces. GGUF marks beginnings of words, where the library marks what continues one."""

    def spelled(i: int, piece: str) -> str:
        if kinds[i] == CONTROL or (piece.startswith("[") and piece.endswith("]") and len(piece) > 2):
            return piece
        return piece[1:] if piece.startswith(SPACE) else f"##{piece}"

    vocabulary: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        vocabulary.setdefault(spelled(i, piece), i)
    unknown = data.get("tokenizer.ggml.unknown_token_id", 100)
    if not isinstance(unknown, int) or not 0 <= unknown < len(pieces):
        raise FormatError(f"{path}: tokenizer.ggml.unknown_token_id is no id of the vocabulary: {unknown!r:.60}")
    known = spelled(unknown, pieces[unknown])
    library = Library(models.WordPiece(vocab=vocabulary, unk_token=known, max_input_chars_per_word=100))
    lower = data.get("tokenizer.ggml.normalizer.lowercase", True) is True
    strip = data.get("tokenizer.ggml.normalizer.strip_accents", lower) is True
    library.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    return library


def _unigram(path: object, data: Mapping[str, Any], pieces: list[str], kinds: np.ndarray[Any, Any]) -> Library:
    """SentencePiece's unigram model: the pieces with the largest sum of scores."""
    scores = _column(path, data, "tokenizer.ggml.scores", len(pieces), 0.0)
    unknown = data.get("tokenizer.ggml.unknown_token_id", 0)
    library = Library(models.Unigram(list(zip(pieces, map(float, scores), strict=True)), unknown, False))
    charsmap = data.get("tokenizer.ggml.precompiled_charsmap")
    steps: list[Any] = [] if charsmap is None else [normalizers.Precompiled(charsmap.tobytes())]
    merged = data.get("tokenizer.ggml.remove_extra_whitespaces") is True
    steps += [normalizers.Replace(Regex(p), to) for p, to in (("^ +| +$", ""), (" {2,}", " "))] if merged else []
    library.normalizer = normalizers.Sequence(steps)
    prefix = "always" if merged or data.get("tokenizer.ggml.add_space_prefix") is True else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prefix)
    library.decoder = decoders.Metaspace(SPACE, prefix)
    return library
