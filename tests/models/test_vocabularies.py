"""Vocabularies of GGUF files beside Gemma's: ids as llama.cpp b11549 printed them for the same metadata, and those of
the library ``tokenizers`` after a folder became a file."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds_of_models
from tokenizers.models import BPE

import opweave as ow
from opweave.warning import OpweaveWarning

models = pytest.importorskip("opweave_models")
pytest.importorskip("gguf")

MERGES = ["' s", "Ġ )", "1 2", "12 3", "4 5", "Ġ Ġ", "č Ċ", "Ċ Ċ", "F o", "Fo o", "o B", "Ã ī", "( (", "a Ã", ". ."]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["<s>", "</s>", "<|end|>", "<unk>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEXT = "It's ((12345 )\r\n\n  FooB..<|end|> aÉ xoB"

LINES = [266, 202, 224, 224, 269, 37, 274, 2, 224, 68, 271, 224, 91]
"""Line ends, spaces, FooB.., the control token although its type does not say so, aÉ x."""

IDS = {
    None: [44, 87, 10, 86, 224, 272, 263, 264, 224, 12, *LINES, 270],
    "default": [44, 87, 10, 86, 224, 272, 263, 264, 224, 12, *LINES, 270],
    "gpt-2": [44, 87, 260, 224, 272, 263, 264, 261, *LINES, 270],
    "smollm": [44, 87, 260, 224, 272, 20, 21, 22, 23, 24, 261, *LINES, 270],
    "qwen2": [44, 87, 260, 224, 272, 20, 21, 22, 23, 24, 261, *LINES, 270],
    "llama-bpe": [0, 44, 87, 260, 224, 272, 263, 264, 261, *LINES, 270],
    "dbrx": [44, 87, 260, 224, 272, 263, 264, 261, *LINES, 270],
    "tekken": [0, 44, 87, 260, 224, 272, 20, 21, 22, 23, 24, 261, *LINES, 82, 37],
    "gpt-4o": [44, 87, 260, 224, 272, 263, 264, 261, *LINES, 82, 37],
}

SENTENCES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁▁",
             "<|user|>", "<|end|>", "<|endoftext|>"]  # fmt: skip


WHOLE_KEYS = "tokenizer.huggingface.json", "opweave.end_token_ids"


def tokenizer(model, pieces, kinds, name="m", **keys):
    metadata = {"general.name": name, "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": pieces}
    metadata["tokenizer.ggml.token_type"] = np.array(kinds, np.int32)
    known = {key: value for key, value in keys.items() if value is not None}
    metadata |= {key if key in WHOLE_KEYS else f"tokenizer.ggml.{key}": value for key, value in known.items()}
    return models.read_tokenizer(models.ModelFile(Path("m.gguf"), None, {}, metadata))


@pytest.mark.parametrize("pre", IDS)
def test_byte_pairs_are_split_as_llama_cpp_splits_them(pre):
    found = tokenizer("gpt2", PIECES, [3, 3, 1, 2, *[1] * (len(PIECES) - 4)], merges=MERGES, pre=pre, bos_token_id=0)
    assert found.encode(TEXT) == IDS[pre]
    assert 2 in found.ends
    assert 2 not in found.encode("<|end|>", parse=False)


@pytest.mark.parametrize(
    ("name", "behind"), [("other", [266, 259, 13, 262, 2]), ("Phi-3 mini", [266, 262, 2])]
)  # fmt: skip
def test_sentencepiece_is_that_of_llama_cpp(name, behind):
    """A space before each text and behind control tokens, the unknown token spelled out, beginnings that the metadata
    do not name, and spaces that Phi-3's control tokens swallow."""
    scores = np.array([0.0] * 259 + [-1, -2, -3, -4, -5, -6, -10, -10, -10], np.float32)
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6, 4, 3, 3]
    found = tokenizer("llama", SENTENCES, kinds, name, scores=scores)
    start = [1, 262, 259, 262, 261, 0, 259, 261, 265, *([] if "Phi" in name else [259]), 262]
    assert found.encode("a  ab<unk>b<|user|> a<|end|>\n a</s>") == start + behind
    assert (found.bos, found.eos) == (1, 2)


def test_word_pieces_keep_case_where_the_metadata_say_so():
    pieces, kinds = ["[PAD]", "[UNK]", "▁Ab", "▁ab", "▁É", "▁E", "▁e"], [3, 3, 1, 1, 1, 1, 1]
    known = {"unknown_token_id": 1, "cls_token_id": 0, "seperator_token_id": 0}
    assert tokenizer("bert", pieces, kinds, **known).encode("Ab É ?", special=False) == [3, 6, 1]
    cased = {"normalizer.lowercase": False}
    assert tokenizer("bert", pieces, kinds, **known, **cased).encode("Ab É ?", special=False) == [2, 4, 1]
    accents = cased | {"normalizer.strip_accents": True}
    assert tokenizer("bert", pieces, kinds, **known, **accents).encode("Ab É ?", special=False) == [2, 5, 1]
    with pytest.raises(ow.FormatError, match=r"m\.gguf: tokenizer\.ggml\.unknown_token_id"):
        tokenizer("bert", pieces, kinds)


def test_unigrams_have_spaces_as_the_metadata_say():
    pieces, kinds = ["<unk>", "</s>", "▁", "a", "▁a", "▁▁"], [2, 3, 1, 1, 1, 1]
    scores = np.array([0, 0, -2, -2, -1, -1], np.float32)
    plain = tokenizer("t5", pieces, kinds, scores=scores)
    assert (plain.encode("a  a"), plain.eos) == ([3, 2, 4, 1], 1)
    assert tokenizer("t5", pieces, kinds, scores=scores, add_space_prefix=True).encode("a  a") == [4, 2, 4, 1]
    merged = tokenizer("t5", pieces, kinds, scores=scores, remove_extra_whitespaces=True)
    assert merged.encode(" a   a  ") == [4, 4, 1]


def byte_level(**options):
    return json.loads(pre_tokenizers.ByteLevel(**options).__getstate__())


def test_ways_to_split_have_the_name_that_says_all_of_them():
    from opweave_models.tokenizer import pre_name

    digits = json.loads(pre_tokenizers.Digits(individual_digits=True).__getstate__())
    plain = byte_level(add_prefix_space=False)
    assert pre_name("t", plain) == "gpt-2"
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    split = {"type": "Split", "pattern": {"Regex": words + r"|\s+(?!\S)|\s+"}, "behavior": "Isolated"}
    threes = {"pretokenizers": [split, byte_level(add_prefix_space=False, use_regex=False)]}
    assert pre_name("t", threes, True) == "llama-bpe"
    assert pre_name("t", threes, False) == "dbrx"
    assert pre_name("t", {"pretokenizers": [digits, plain]}) == "smollm"
    runs = {**digits, "individual_digits": False}
    for other in (byte_level(add_prefix_space=True), byte_level(add_prefix_space=False, use_regex=False),
                  {"pretokenizers": [runs, plain]}, None):  # fmt: skip
        with pytest.raises(ow.FormatError, match="t: text is split by"):
            pre_name("t", other)


def write_folder(path, shapes, config, library):
    drawn = np.random.default_rng(0)
    save_file({name: drawn.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
              path / "model.safetensors")  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    library.save(str(path / "tokenizer.json"))


def test_a_cased_encoder_becomes_a_file_with_the_same_ids(tmp_path):
    from tokenizers.processors import TemplateProcessing

    from opweave_models.writing import write_gguf

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Ab", "ab", "##c", "é"]
    library = Tokenizer(kinds_of_models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(words[:4])
    library.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    config = {"model_type": "bert", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8,
              "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip
    layer = "encoder.layer.0."
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (8, 8),
        "embeddings.position_embeddings.weight": (16, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
    }
    shapes |= {f"embeddings.LayerNorm.{kind}": (8,) for kind in ("weight", "bias")}
    shapes |= {f"{layer}{name}.LayerNorm.{kind}": (8,) for name in ("attention.output", "output")
               for kind in ("weight", "bias")}  # fmt: skip
    for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                 "intermediate.dense", "output.dense"):  # fmt: skip
        shapes |= {f"{layer}{name}.weight": (8, 8), f"{layer}{name}.bias": (8,)}
    write_folder(tmp_path, shapes, config, library)
    write_gguf(tmp_path, tmp_path / "m.gguf")
    found = models.read_tokenizer(models.open_model(tmp_path / "m.gguf"))
    for text in ("Ab abc É é zz", "[SEP] Abc"):
        assert found.encode(text) == library.encode(text).ids


def write_llama(path, library, ends=None):
    """A folder of a small llama with a tokenizer."""
    count = library.get_vocab_size()
    config = {"model_type": "llama", "vocab_size": count, "hidden_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 16,
              "tie_word_embeddings": True, "eos_token_id": ends}  # fmt: skip
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (count, 8), "model.norm.weight": (8,)}
    shapes |= {f"model.layers.0.{name}.weight": (8, 8) for name in names}
    shapes |= {f"model.layers.0.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    write_folder(path, shapes, config, library)


def byte_pairs(normalizer=None, added=()):
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    library = Tokenizer(kinds_of_models.BPE({piece: i for i, piece in enumerate(PIECES)}, pairs))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_special_tokens(PIECES[:4])
    library.add_tokens(list(added))
    return library


def sentence_pieces(normalizer=None, splitting=None, added=()):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "x", "▁a", "ab", "▁▁"]
    pairs = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    model = kinds_of_models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs, unk_token="<unk>", fuse_unk=True,
                                byte_fallback=True)  # fmt: skip
    library = Tokenizer(model)
    if normalizer is not None:
        library.normalizer = normalizer
    if splitting is not None:
        library.pre_tokenizer = splitting
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(pieces[:3])
    library.add_tokens(list(added))
    return library


SPACES = normalizers.Replace(" ", "▁")
FLAGS = {flag: {flag: True} for flag in ("lstrip", "rstrip", "single_word")}
TOKENIZERS: dict[str, tuple[Tokenizer, str | None]] = {
    "byte pairs": (byte_pairs(), None),
    "added": (byte_pairs(added=[AddedToken("<x>", normalized=False)]), None),
    "normalized": (byte_pairs(normalizers.NFC()), r"normalized by \['NFC'\]"),
    "spaces": (sentence_pieces(SPACES), None),
    "prepended": (sentence_pieces(normalizers.Sequence([normalizers.Prepend("▁"), SPACES])), None),
    "first": (sentence_pieces(None, pre_tokenizers.Metaspace("▁", "first", split=False)), "split by Metaspace"),
    "always": (sentence_pieces(None, pre_tokenizers.Metaspace("▁", "always")), "split by Metaspace"),
    **{f"bytes {flag}": (byte_pairs(added=[AddedToken("<x>", normalized=False, **FLAGS[flag])]), f"'<x>' has {flag}")
       for flag in FLAGS},
    **{flag: (sentence_pieces(SPACES, None, [AddedToken("<x>", normalized=False, **FLAGS[flag])]), f"'<x>' has {flag}")
       for flag in FLAGS},
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_folder_and_its_file_give_the_same_ids_and_what_gguf_cannot_say_is_told(name, tmp_path, recwarn):
    """What GGUF has no key for is in the whole ``tokenizer.json`` that the file has then."""
    from opweave_models.writing import write_gguf

    library, told = TOKENIZERS[name]
    write_llama(tmp_path, library)
    write_gguf(tmp_path, tmp_path / "m.gguf")
    found = [str(each.message) for each in recwarn if issubclass(each.category, OpweaveWarning)]
    assert len(found) == (told is not None)
    assert all(re.search(told or "", text) for text in found)
    write_gguf(tmp_path / "m.gguf", tmp_path / "again.gguf", "q8_0")
    draw = random.Random(name)
    some = ["<x>", "<x> ", " <x>", "a", "b", "ab", " ", "  ", "e\u0301", "x", "\n", "<s>", "</s> ", "12345", "🦙", "▁"]
    for path in (tmp_path / "m.gguf", tmp_path / "again.gguf"):
        made = models.read_tokenizer(models.open_model(path))
        for _ in range(300):
            text = "".join(draw.choices(some, k=draw.randrange(1, 9)))
            ids = library.encode(text, add_special_tokens=False).ids
            assert made.encode(text, special=False) == ids
            if name != "prepended":  # whose decoder here keeps the space that was put before the text
                assert made.decode(ids, special=True) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("data", ["no json", '{"version": "1.0"}', json.dumps(json.loads(byte_pairs().to_str()))])
def test_a_whole_tokenizer_that_is_none_or_of_another_vocabulary_is_refused(data):
    with pytest.raises(ow.FormatError, match=r"m\.gguf: tokenizer\.huggingface\.json (is no|has more) token"):
        tokenizer("llama", ["a"], [1], **{"tokenizer.huggingface.json": data})


@pytest.mark.parametrize("ends", [[2], [2, 9], [2, 9, 5], [2, 9, 5, 7, 8]])
def test_all_tokens_that_end_an_answer_are_in_the_file(ends, tmp_path):
    from opweave_models.writing import write_gguf

    write_llama(tmp_path, sentence_pieces(SPACES), ends)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8")
    write_gguf(tmp_path, tmp_path / "m.gguf")
    for path in (tmp_path, tmp_path / "m.gguf"):
        assert models.read_tokenizer(models.open_model(path)).ends == set(ends)


@pytest.mark.parametrize("listed", [[3], [-1], 2, ["</s>"]])
def test_ends_that_are_no_tokens_are_refused(listed):
    with pytest.raises(ow.FormatError, match=r"m\.gguf: "):
        tokenizer("llama", ["<unk>", "<s>", "</s>"], [2, 3, 3], **{"opweave.end_token_ids": listed})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*b"ABC", 0xC2, 0xC3, 0xA9, 0xE2, 0x96, 0xF0, 0x9F, 0xA6, 0x99]), max_size=9))
def test_bytes_make_characters_where_they_can_also_beside_some_that_do_not(values):
    """As llama.cpp writes them; in pieces as at once."""
    made = tokenizer("llama", SENTENCES, [2, 3, 3, *[6] * 256, *[1] * 6, 4, 3, 3], add_space_prefix=False)
    ids = [3 + value for value in values]
    assert made.decode(ids) == bytes(values).decode("utf-8", "replace")
    stream = made.stream()
    assert "".join(map(stream.add, ids)) + stream.finish() == made.decode(ids)


LETTERS = "ab ▁é"
SCORED = ["<unk>", "<|end|>", "<0xC3>", "<0xA9>", "<0x20>", *LETTERS.replace(" ", ""),
          *(a + b for a in "ab▁" for b in "ab▁"), "▁ab", "aba", "bab", "▁a▁b", "abab"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(LETTERS, max_size=12) | st.sampled_from(["<|end|>", "z"]), max_size=4).map("".join),
    st.lists(st.integers(0, 9), min_size=len(SCORED), max_size=len(SCORED)), st.booleans(), st.booleans(),
)  # fmt: skip
def test_texts_have_the_ids_that_the_whole_vocabulary_gives(text, scores, prefix, parse):
    keys = {"scores": np.array(scores, np.float32), "add_space_prefix": prefix, "unknown_token_id": 0}
    first, whole = (tokenizer("llama", SCORED, [2, 3, 6, 6, 6, *[1] * (len(SCORED) - 5)], **keys) for _ in range(2))
    assert whole.library.get_vocab_size() == len(SCORED)
    ids = first.encode(text, parse=parse)
    assert ids == whole.encode(text, parse=parse)
    for special in (False, True):
        assert first.decode(ids, special=special) == whole.library.decode(ids, skip_special_tokens=not special)


def test_after_long_texts_the_library_has_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr(models.tokenizer, "WHOLE", 2 * 2 + 5 * 5)
    found = tokenizer("llama", SCORED, [2, 3, 6, 6, 6, *[1] * (len(SCORED) - 5)], add_space_prefix=False)
    built: list[int] = []

    def build(vocab, **options):
        built.append(len(vocab))
        return BPE(vocab=vocab, **options)

    monkeypatch.setattr(models.tokenizer.models, "BPE", build)
    for text in ("aa", "ab ba", "ab"):
        found.encode(text)
    assert len(built) == 2, "the third text needs no model of its own"
    assert built[0] < built[1] == len(SCORED)


def test_bytes_may_be_spelled_in_small_letters():
    pieces, kinds = ["<unk>", "<s>", "</s>", "<0xc3>", "<0xA9>", "a"], [2, 3, 3, 6, 6, 1]
    found = tokenizer("llama", pieces, kinds, add_space_prefix=False)
    assert found.decode([5, 3, 4, 5]) == "aéa"
    assert found.token_bytes(3) == b"\xc3"
