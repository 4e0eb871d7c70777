"""GGUF files written from folders: they say the same as transformers, and as llama.cpp where it is installed."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import opweave as ow
from opweave.ops.encoding import ENCODED
from tests.models.test_decoders import distance, expected
from tests.support.small_models import KINDS, make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")

IDS = np.random.default_rng(3).integers(3, 260, 40).tolist()
SAYABLE: dict[str, Any] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen3moe": {"norm_topk_prob": True},
    "phi3": {"sliding_window": None},  # which llama.cpp leaves out
}
"""What GGUF's readers take for granted."""


def logits(path, context=128, ids=IDS, **options):
    options = {"kv": "f32", "precision": "exact", **options}
    with models.load(path, "cpu", context=context, **options) as llm, llm.session() as session:
        session.feed(ids)
        return session.logits(), llm.tokenizer.encode("in the one other\n 12345 ünï")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_becomes_a_file_that_says_the_same(kind, tmp_path):
    from opweave_models.writing import write_gguf

    reference = make_folder(kind, tmp_path, **SAYABLE.get(kind, {}))
    path = tmp_path / "m.gguf"
    write_gguf(tmp_path, path)
    truth = expected(reference, IDS)[-1]
    found, ids = logits(path)
    assert distance(found, truth) < 1e-5
    with models.load(tmp_path, "cpu", context=16) as folder:
        assert ids == folder.tokenizer.encode("in the one other\n 12345 ünï")
    theirs = llama_cpp(path)
    if kind == "phi3-long":
        found, _ = logits(path, 256)  # llama.cpp's contexts are multiples of 256: the factors are those of long ones
    known = np.isfinite(theirs)
    assert known.sum() > 250
    truth = shares(found)
    limit = 2e-4 if kind.startswith("gemma") else 1e-5  # llama.cpp looks gelu up in a table of f16
    assert np.abs(truth - theirs)[known].max() < limit * np.abs(truth[known]).max()


def shares(logits):
    """Logarithms of probabilities."""
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


@pytest.mark.parametrize("blocks", ENCODED)
def test_blocks_of_every_type_say_the_same_as_in_llama_cpp(blocks, tmp_path):
    """llama.cpp rounds activations to blocks of 8 bits, as we do for some types unless a program is exact: neither is
    further from the exact program than rounding takes it."""
    from opweave_models import commands

    make_folder("llama", tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    path = tmp_path / "m.gguf"
    commands.quantize(tmp_path, path, blocks)
    assert blocks in models.open_model(path).kinds
    truth, rounded = shares(logits(path)[0]), shares(logits(path, precision="int8")[0])
    theirs = llama_cpp(path)
    known = np.isfinite(theirs)
    assert known.sum() > 250
    off = np.abs(theirs - truth)[known].max()
    assert off < 0.006 * np.abs(truth).max()
    assert np.abs(rounded - truth).max() < 1.5 * off


def llama_cpp(path, ids=IDS):
    """llama.cpp's logarithms of the probabilities of the next token, by id; -inf where it lists none."""
    library = pytest.importorskip("xllamacpp", reason="our side was compared; llama.cpp is not here")
    options = library.CommonParams()
    options.model.path, options.n_ctx, options.warmup, options.verbosity = str(path), 128, False, -1
    options.cache_type_k = options.cache_type_v = library.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = library.Server(options)
    # It lists nothing behind a token that is no whole character, so that a letter is chosen.
    request = {"prompt": ids, "n_predict": 1, "n_probs": 300, "temperature": 0, "logit_bias": [[70, 100.0]]}
    body = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(request).encode())
    with urllib.request.urlopen(body) as response:
        answer = json.load(response)
    found = np.full(300, -np.inf)
    for each in answer["completion_probabilities"][0]["top_logprobs"]:
        found[each["id"]] = each["logprob"]
    return found


@pytest.mark.parametrize("kind", ["llama", "llama-3.1", "phi3-long", "mixtral", "gemma3"])
@pytest.mark.parametrize("shards", [0, 7])
def test_a_file_becomes_another_one_that_says_the_same_also_from_shards(kind, shards, tmp_path):
    import gguf

    from opweave_models.writing import write_gguf

    make_folder(kind, tmp_path, **SAYABLE.get(kind, {}))
    whole, again, small = (tmp_path / f"{name}.gguf" for name in ("whole", "again", "small"))
    write_gguf(tmp_path, whole)
    source = whole
    if shards:
        read = gguf.GGUFReader(whole)
        writer = gguf.GGUFWriter(tmp_path / "part.gguf", models.open_model(whole).metadata["general.architecture"],
                                 split_max_tensors=shards)  # fmt: skip
        for field in read.fields.values():
            if field.name != "general.architecture" and not field.name.startswith("GGUF."):
                inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        for tensor in read.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = sorted(tmp_path.glob("part-*.gguf"))[-1]
    write_gguf(source, again)
    write_gguf(source, small, "q8_0")
    expected, ids = logits(whole, 256)
    for path in (source, again):
        found, others = logits(path, 256)
        np.testing.assert_array_equal(found, expected)
        assert others == ids
    write_gguf(tmp_path, tmp_path / "direct.gguf", "q8_0")
    np.testing.assert_array_equal(logits(small, 256)[0], logits(tmp_path / "direct.gguf", 256)[0])
    np.testing.assert_equal(dict(models.open_model(again).metadata), dict(models.open_model(whole).metadata))


@pytest.mark.parametrize(("kind", "what"), [("qwen3moe", "normalize_experts"), ("gemma2", "scale")])
def test_what_gguf_cannot_say_is_refused(tmp_path, kind, what):
    from opweave_models.writing import write_gguf

    make_folder(kind, tmp_path)
    with pytest.raises(ow.FormatError, match=f"GGUF cannot say that {what} is"):
        write_gguf(tmp_path, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_matrices_become_floats_of_another_type_as_numpy_rounds_them(tmp_path, kind):
    import gguf

    from opweave_models import commands

    make_folder("llama", tmp_path)
    source, blocks, made, again = (tmp_path / f"{name}.gguf" for name in ("source", "blocks", "made", "again"))
    commands.convert(tmp_path, source)
    commands.quantize(tmp_path, blocks, "q4_0")
    commands.quantize(source, made, kind)
    commands.quantize(blocks, again, kind)
    numpy = ow.as_dtype(kind).numpy
    for before, after in ((source, made), (blocks, again)):
        floats = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(before).tensors}
        for tensor in gguf.GGUFReader(after).tensors:
            expected = floats[tensor.name]
            matrix = expected.ndim > 1
            assert tensor.tensor_type.name == (kind.upper() if matrix else "F32")
            found = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(found, expected.astype(numpy).astype(np.float32) if matrix else expected)
    if kind == "bf16":  # what is stored in a half type stays in it
        commands.convert(made, tmp_path / "same.gguf")
        assert models.open_model(tmp_path / "same.gguf").kinds == models.open_model(made).kinds
    with models.load(source, "cpu", context=64, quantize=kind) as llm:
        assert {w.dtype.name for w in llm.weights.values() if w.ndim > 1} == {kind}
        assert llm.plan.shares[0].weights == sum(w.nbytes for w in llm.weights.values())
        with llm.session() as session:
            session.feed(IDS)
            np.testing.assert_array_equal(session.logits(), logits(made, precision="int8", kv="f16", context=64)[0])


def test_values_beyond_a_type_and_types_that_hold_no_floats_are_refused(tmp_path):
    from opweave_models.files import rounded

    for largest, kind in ((65520.0, "f16"), (3.4e38, "bf16")):
        values = np.array([[1.0, largest], [-np.inf, 0.0]], np.float32)
        with pytest.raises(ow.DTypeError, match=f"blk.0 has values that {kind} cannot hold"):
            rounded("blk.0", values, ow.as_dtype(kind))
        values[0, 1] = 65504.0
        assert rounded("blk.0", values, ow.as_dtype(kind))[1, 0] == -np.inf
    with pytest.raises(ow.DTypeError):
        rounded("blk.0", values, ow.as_dtype("i8"))


def test_commands_write_files(tmp_path, capsys):
    from opweave_models import commands

    make_folder("llama-wide", tmp_path)
    whole, small, again = (tmp_path / name for name in ("whole.gguf", "small.gguf", "again.gguf"))
    commands.convert(tmp_path, whole)
    commands.quantize(tmp_path, small, "q8_0")
    commands.quantize(whole, again, "q8_0")
    assert capsys.readouterr().out.count("gguf: ") == 3
    assert set(models.open_model(small).kinds) == {"q8_0", "f32"}
    np.testing.assert_array_equal(logits(small)[0], logits(again)[0])
    assert 0 < distance(logits(small)[0], logits(whole)[0]) < 0.02


FALLBACK = "matrices are in q8_0, since their rows are no whole blocks of 256, as q4_k has"
STAY = "matrices stay as they were: routers, or rows of no whole blocks"


@pytest.mark.parametrize(("hidden", "kind", "says"), [
    (96, "q4_k", {"q8_0": FALLBACK}), (256, "q4_k", {"q8_0": FALLBACK}), (80, "q4_k", {"q8_0": FALLBACK, "f32": STAY}),
    (80, "q8_0", {"f32": STAY}), (96, "q8_0", {}), (96, "f16", {}),
])  # fmt: skip
def test_what_is_rounded_to_another_type_than_was_asked_for_is_told(tmp_path, hidden, kind, says):
    make_folder("llama", tmp_path, intermediate_size=hidden)
    out = tmp_path / "m.gguf"
    lines = quantize(tmp_path, out, kind).output.splitlines()
    types = [ow.as_dtype(value.dtype).name for value in models.open_model(out).tensors.values() if len(value.shape) > 1]
    told = [line for line in lines if "matrices" in line]
    for line, (stored, said) in zip(told, says.items(), strict=True):
        assert line.startswith(f"{types.count(stored)} of {len(types)} {said}")


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("kind", ["iq1_s", "iq1_m", "i32", "f64", "nothing"])
def test_types_that_nothing_is_rounded_to_are_refused_whatever_the_rows_are(tmp_path, width, kind):
    make_folder("llama", tmp_path, hidden_size=width)
    done = quantize(tmp_path, tmp_path / "m.gguf", kind)
    assert isinstance(done.exception, ow.DTypeError | ow.UnknownNameError)
    assert kind in str(done.exception)
    assert not (tmp_path / "m.gguf").exists()
    for use in (models.load, models.plan_placement):
        with pytest.raises(type(done.exception), match=kind):
            use(models.open_model(tmp_path), "cpu", quantize=kind)


def quantize(folder, out, kind):
    from opweave_models import commands

    app = typer.Typer()
    commands.add(app)
    return CliRunner().invoke(app, ["models", "quantize", str(folder), str(out), kind])


@pytest.mark.parametrize(
    ("command", "suffix"), [(["convert"], "gguf"), (["convert"], "safetensors"), (["quantize", "q8_0"], "gguf")]
)
@pytest.mark.parametrize("length", [1, 300])
def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path, command, suffix, length):
    """The disk is full, or no file can have the name."""
    from opweave_models import commands

    resource = pytest.importorskip("resource")
    make_folder("llama", tmp_path)
    there = sorted(tmp_path.iterdir())
    out = tmp_path / f"{'x' * length}.{suffix}"
    app = typer.Typer()
    commands.add(app)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        done = CliRunner().invoke(app, ["models", command[0], str(tmp_path), str(out), *command[1:]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(done.exception, ow.PathError)
    assert f"{out} cannot be written: " in str(done.exception)
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("command", [["convert"], ["quantize", "q8_0"]])
@pytest.mark.parametrize(("out", "says"), [("there.gguf", "is there"), (".", "is there"), ("no/x.gguf", "no folder")])
def test_files_that_could_not_be_written_are_a_wrong_call(tmp_path, monkeypatch, command, out, says):
    from opweave_models import commands

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").write_text("as before")
    app = typer.Typer()
    commands.add(app)
    done = CliRunner().invoke(app, ["models", command[0], "missing.gguf", out, *command[1:]])
    assert done.exit_code == 2
    assert says in done.output
    assert (tmp_path / "there.gguf").read_text() == "as before"
