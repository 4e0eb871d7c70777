"""``opweave weights``."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.files import entry, raw_safetensors, write_gguf
from tests.support.text import words


@pytest.fixture
def model(tmp_path):
    w, q = np.ones((3, 4), np.float32), np.zeros((2, 68), np.uint8)
    tokens = [f"t{i}" for i in range(20)]
    return str(
        write_gguf(tmp_path / "x.gguf", {"layers.0.w": w, "layers.0.q": q}, {"layers.0.q": "q8_0"}, tokens=tokens)
    )


def test_table(run, model):
    code, out, err = run("weights", model, columns=100)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["tensor", "dtype", "shape", "bytes"]
    assert lines[1] == ["layers.0.w", "f32", "3×4", "48", "B"]
    assert lines[2] == ["layers.0.q", "q8_0", "2×64", "136", "B"]
    assert words("2 tensors, 184 B: 1 f32, 1 q8_0") in words(out)
    assert words("general.architecture: llama") in words(out)
    assert words("'t7'] and 12 more") in words(out)


def test_json_and_patterns(run, model):
    document = json.loads(run("weights", model, "*.q", "--json")[1])
    assert document["tensors"] == [
        {"name": "layers.0.q", "dtype": "q8_0", "shape": [2, 64], "bytes": 136, "supported": True}
    ]
    assert (document["path"], document["bytes"]) == (model, 136)
    assert len(document["metadata"]["tokens"]) == 20


def test_types_that_opweave_does_not_have_are_listed(run, tmp_path):
    path = raw_safetensors(
        tmp_path / "x.safetensors", {"a": entry("C64", [1], 0, 8), "f": entry("F4", [2], 8, 9)}, b"123456789"
    )
    _, out, _ = run("weights", str(path))
    assert words("not types of opweave: c64, f4") in words(out)
    assert [t["supported"] for t in json.loads(run("weights", str(path), "--json")[1])["tensors"]] == [False, False]


def test_a_folder(run, tmp_path):
    for i in range(3):
        save_file({f"w{i}": np.ones(i + 1, np.float32)}, tmp_path / f"{i}.safetensors")
    assert [t["name"] for t in json.loads(run("weights", str(tmp_path), "--json")[1])["tensors"]] == ["w0", "w1", "w2"]


def test_names_cannot_disturb_the_terminal(run, tmp_path):
    save_file({"\x1b[2Jw": np.ones(1, np.float32)}, tmp_path / "x.safetensors", {"note": "\x1b]0;title\x07"})
    out = run("weights", str(tmp_path / "x.safetensors"))[1]
    assert "\x1b" not in out
    assert "\x07" not in out


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.gguf", b"GGUF", "x.gguf is cut off"),
        ("x.safetensors", b"abc", "is no safetensors file"),
        ("x.bin", b"abc", "there is no file format named '.bin'"),
        ("x.gguf", None, "cannot read"),
    ],
)
def test_what_is_wrong_is_said_on_standard_error(run, tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = run("weights", str(tmp_path / name))
    assert (code, out) == (1, "")
    assert words(says) in words(err)


def test_a_pattern_that_matches_nothing(run, model):
    code, _, err = run("weights", model, "layer.*")
    assert code == 1
    assert words("there is no tensor named 'layer.*'") in words(err)
