"""Mutated files: each is read, and then as the library of its format reads it, or refused by an error of ours; and none
makes the reader take much more memory than the file has bytes.

``OPWEAVE_FUZZ_CASES`` sets how many mutations of each format are tried.
"""

# mypy: no-check-untyped-defs

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import opweave as ow
from opweave.formats.gguf import read_gguf
from opweave.formats.load import read_tensors
from opweave.formats.safetensors import read_safetensors
from tests.support.files import RNG, write_gguf

CASES = int(os.environ.get("OPWEAVE_FUZZ_CASES", "400"))
MEMORY = 1 << 18
"""Bytes that reading may take beside eight times the file: what Python needs for its objects and messages."""

EXTREMES = [
    0,
    1,
    2,
    7,
    31,
    32,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63,
    2**64 - 1,
]
WORDS = [b"[", b"]", b"{", b"}", b'"', b":", b",", b"-1", b"1e999", b"null", b"true", b"0", b"99999999999999999999",
         b"F32", b"BF16", b"U8", b"\\ud800", b"\\u0000", b"__metadata__", b"[" * 3000, b" ", b"\xff", b"0.5",
         b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},']  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, whole numbers, words of headers, parts removed, repeated, moved or cut off."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        # The headers are at the beginning; only they can be wrong.
        at = rng.randrange(max(1, len(data) if rng.random() < 0.3 else min(len(data), 400)))
        end = min(len(data), at + rng.randint(1, 24))
        kind = rng.randrange(9)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) % 2**32)
        elif kind == 4:
            data[at:at] = rng.choice(WORDS)
        elif kind == 5:
            del data[at:end]
        elif kind == 6:
            data[at:at] = data[at:end]
        elif kind == 7:
            del data[rng.randrange(len(data) + 1) :]
        else:
            digits = [i for i in range(min(len(data), 400)) if 48 <= data[i] <= 57]
            if digits:
                data[rng.choice(digits)] = 48 + rng.randrange(10)
    return bytes(data)


def with_mutated_header(content: bytes, rng: random.Random) -> bytes:
    """Mutations of a safetensors header whose length is right."""
    length = int.from_bytes(content[:8], "little")
    header = mutated(content[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def safetensors_of(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: (tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
            for name, t in tensors.items()}  # fmt: skip


def gguf_of(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    with np.errstate(all="ignore"):
        return {t.name: (tuple(map(int, t.shape[::-1])), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def ours(found) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (v.shape, (v.data if isinstance(v, ow.Blocks) else v).tobytes()) for name, v in found.items()}


def check(path: Path, content: bytes, read: Callable, theirs: Callable) -> bool:
    """Whether a file is read."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        found = read(path)
        for name in found:
            assert found.tensors[name].offset + found.tensors[name].nbytes <= len(content)
        values = {}
        for name in found:
            try:
                values[name] = found[name]
            except (ow.DTypeError, ow.ShapeError, ow.FormatError):  # types that we do not have, 9 axes, bools of 2
                continue
    except ow.FormatError as error:
        refused = str(error)
    else:
        refused = ""
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * len(content) + MEMORY, content
    if refused:
        assert str(path) in refused
        assert len(refused) < 1000
        return False
    known = theirs(path)
    if len(values) == len(found):
        assert ours(values) == known, content
    return True


def test_safetensors(tmp_path):
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.bfloat16), "flags": torch.ones(5) > 0,
        "empty": torch.zeros(0, 3), "number": torch.tensor(3), "half": torch.ones(2, 2, dtype=torch.float16),
    }  # fmt: skip
    save_file(tensors, tmp_path / "seed.safetensors", {"format": "pt"})
    seed, rng, path = (tmp_path / "seed.safetensors").read_bytes(), random.Random(0), tmp_path / "x.safetensors"
    assert check(path, seed, read_safetensors, safetensors_of)
    ways = [mutated, with_mutated_header]
    taken = sum(check(path, ways[i % 2](seed, rng), read_safetensors, safetensors_of) for i in range(CASES))
    assert 0 < taken < CASES


def test_gguf(tmp_path):
    tensors = {
        "a": RNG.standard_normal((2, 3)).astype(np.float32), "q": RNG.integers(0, 256, (3, 68), np.uint8),
        "k": RNG.integers(0, 256, (1, 144), np.uint8), "n": np.arange(5, dtype=np.int32),
    }  # fmt: skip
    write_gguf(tmp_path / "seed.gguf", tensors, {"q": "q8_0", "k": "q4_k"}, names=["x", "yy"], numbers=[1, 2], yes=True)
    seed, rng, path = (tmp_path / "seed.gguf").read_bytes(), random.Random(0), tmp_path / "x.gguf"
    assert check(path, seed, read_gguf, gguf_of)
    taken = sum(check(path, mutated(seed, rng), read_gguf, gguf_of) for _ in range(CASES))
    assert 0 < taken < CASES


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_random_bytes(tmp_path, suffix):
    rng = random.Random(1)
    for size in range(0, 120, 3):
        (tmp_path / f"x{suffix}").write_bytes((b"GGUF\3\0\0\0" if suffix == ".gguf" else b"") + rng.randbytes(size))
        with pytest.raises(ow.FormatError):
            ow.load_weights(tmp_path / f"x{suffix}")


def test_indices_and_files_of_a_model_in_several(tmp_path):
    """One of the files or the index is mutated, or gone: tensors are read as they are in their files, or an error of
    ours is raised."""
    names = [f"m-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        save_file({f"t{i}": torch.full((3,), float(i)), f"u{i}": torch.zeros(2, i)}, tmp_path / name)
    places = {f"{kind}{i}": name for i, name in enumerate(names) for kind in "tu"}
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": places}))
    seeds = {path: path.read_bytes() for path in tmp_path.iterdir()}
    rng, taken = random.Random(0), 0
    for case in range(CASES):
        path = rng.choice([index, index, *seeds])
        content = (mutated if path == index or case % 2 else with_mutated_header)(seeds[path], rng)
        path.unlink() if case % 50 == 0 else path.write_bytes(content)
        for place in (tmp_path, index, tmp_path / names[0]):
            errors = (ow.OpweaveError,) if place.exists() else (ow.OpweaveError, FileNotFoundError)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ow.OpweaveWarning)
                try:
                    found = read_tensors(place)
                    values = {name: found[name] for name in found}
                except errors:
                    continue
            taken += 1
            if path == index or not index.is_file():
                assert all(set(np.ravel(value).tolist()) <= {0.0, 1.0} for value in values.values())
        path.write_bytes(seeds[path])
    assert 0 < taken < 3 * CASES
