"""`opweave.load_weights`: folders, choosing, placing, and formats that plugins bring."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import opweave as ow
from opweave import registry
from tests.support.devices import Separate
from tests.support.files import RNG, write_gguf

F = np.float32


def arrays(*names: str) -> dict[str, np.ndarray]:
    return {name: RNG.standard_normal((3, 4)).astype(F) for name in names}


def same(loaded: ow.Weights, given: dict[str, np.ndarray]) -> None:
    assert set(loaded) == set(given)
    for name, array in given.items():
        np.testing.assert_array_equal(ow.read(loaded[name]), array)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def bytes_of(tensor: ow.Tensor) -> np.ndarray:
    assert tensor.leaf is not None
    assert tensor.leaf.data is not None
    return tensor.leaf.data


# --- using ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_host_devices_use_the_bytes_where_they_lie(tmp_path, suffix):
    given = arrays("a", "b")
    path = tmp_path / f"x.{suffix}"
    (save_file if suffix == "safetensors" else lambda arrays, path: write_gguf(path, arrays))(given, path)
    loaded = ow.load_weights(path, device="host")
    for tensor in loaded.values():
        data = bytes_of(tensor)
        assert not data.flags.owndata
        assert not data.flags.writeable
        assert tensor.leaf is not None
        assert tensor.leaf.placement is not None
        assert address(tensor.leaf.placement.buffer.host_bytes(0, 48).obj) == address(data)
    x = RNG.standard_normal((2, 4)).astype(F)
    y = ow.linear(ow.input("x", (2, 4)), loaded["a"])
    with ow.Scheduler("host") as scheduler:
        np.testing.assert_allclose(scheduler.build(y).run(x=x), x @ given["a"].T, rtol=1e-5)


def test_quantized_weights_of_a_file_multiply(tmp_path):
    blocks = ow.quantize(RNG.standard_normal((8, 64)), "q8_0")
    path = write_gguf(tmp_path / "x.gguf", {"w": blocks.data}, {"w": "q8_0"})
    x = RNG.standard_normal((2, 64)).astype(F)
    y = ow.linear(ow.input("x", (2, 64)), ow.load_weights(path)["w"])
    with ow.Scheduler("host") as scheduler:
        np.testing.assert_allclose(scheduler.build(y).run(x=x), x @ ow.dequantize(blocks).T, rtol=1e-4, atol=1e-4)


def test_they_are_placed_and_converted_like_arrays(tmp_path):
    given, one, two = arrays("layers.0.w", "layers.1.w"), Separate("one"), Separate("two")
    save_file(given, tmp_path / "x.safetensors")
    loaded = ow.load_weights(tmp_path / "x.safetensors", {"*.0.*": one, "*": two}, dtype="bf16")
    where = {name: t.leaf and t.leaf.placement and t.leaf.placement.buffer.device for name, t in loaded.items()}
    assert where == {"layers.0.w": one, "layers.1.w": two}
    same(loaded, {name: array.astype(ml_dtypes.bfloat16) for name, array in given.items()})
    with pytest.raises(ow.UnknownNameError, match="a pattern of device="):
        ow.load_weights(tmp_path / "x.safetensors", {"layer.*": one})
    general = {ow.optional("*experts*"): two, ow.optional("*.0.*"): one}
    loaded = ow.load_weights(tmp_path / "x.safetensors", general)
    assert [t.leaf and t.leaf.device for t in loaded.values()] == ["one", None]
    with pytest.raises(ow.DTypeError, match="a pattern is a text"):
        ow.optional(None)


def test_names_choose_by_pattern(tmp_path):
    given = arrays("layers.0.w", "layers.0.b", "layers.1.w", "head")
    save_file(given, tmp_path / "x.safetensors")
    for names, wanted in [
        ("layers.0.*", {"layers.0.w", "layers.0.b"}),
        (["*.b", "head"], {"layers.0.b", "head"}),
        ("*", set(given)),
        ([], set()),
    ]:
        assert set(ow.load_weights(tmp_path / "x.safetensors", names=names)) == wanted
    with pytest.raises(ow.UnknownNameError, match=r"'layers\.2\.\*'.*pattern of names, and matches none"):
        ow.load_weights(tmp_path / "x.safetensors", names=["head", "layers.2.*"])
    with pytest.raises(ow.DTypeError, match="names= takes a glob pattern"):
        ow.load_weights(tmp_path / "x.safetensors", names=[3])
    with pytest.raises(ow.DTypeError, match="names= takes a glob pattern or several, not None"):
        ow.load_weights(tmp_path / "x.safetensors", names=None)
    assert set(ow.load_weights(tmp_path / "x.safetensors", names=["head", ow.optional("x")])) == {"head"}


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    first, second = arrays("a", "b"), arrays("c")
    save_file(first, tmp_path / "model-1.safetensors", {"format": "np"})
    save_file(second, tmp_path / "model-2.safetensors", {"format": "other", "more": "yes"})
    places = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(second, "model-2.safetensors")
    write_index(tmp_path, places)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, {**first, **second}


def write_index(folder, places, name="model.safetensors.index.json", **more):
    text = json.dumps({"metadata": {"total_size": 144}, "weight_map": places, **more})
    (folder / name).write_text(text)
    return folder / name


def test_a_folder_with_an_index(sharded):
    folder, given = sharded
    for path in (folder, str(folder), folder / "model.safetensors.index.json"):
        loaded = ow.load_weights(path)
        same(loaded, given)
        assert loaded.metadata == {"total_size": 144, "format": "np", "more": "yes"}


def test_what_an_index_does_not_name_is_left_out_with_a_warning(sharded):
    folder, given = sharded
    first = {name: given[name] for name in ("a", "b")}
    save_file({**first, "beside": np.ones(1, F)}, folder / "model-1.safetensors")
    with pytest.warns(ow.OpweaveWarning, match="the tensor 'beside' in model-1.safetensors is left out") as told:
        same(ow.load_weights(folder), given)
    assert told[0].filename == __file__
    save_file({**first, "c": np.ones(1, F), "beside": np.ones(1, F)}, folder / "model-1.safetensors")
    with pytest.warns(ow.OpweaveWarning, match="'beside' in model-1.safetensors and 1 more are left out"):
        same(ow.load_weights(folder), given)  # the c of the other file


def test_the_index_named_model_counts(sharded):
    folder, given = sharded
    write_index(folder, {"c": "model-2.safetensors"}, "model.fp16.safetensors.index.json")
    same(ow.load_weights(folder), given)
    assert set(ow.load_weights(folder / "model.fp16.safetensors.index.json")) == {"c"}
    (folder / "model.safetensors.index.json").rename(folder / "other.safetensors.index.json")
    with pytest.raises(ow.FormatError, match="has several models: load one of"):
        ow.load_weights(folder)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"a": "../model-1.safetensors"}, "no name of a file beside it"),
        ({"a": "/etc/passwd"}, "no name of a file beside it"),
        ({"a": ".."}, "no name of a file beside it"),
        ({"a": "x\\y"}, "no name of a file beside it"),
        ({"a": 3}, "no name of a file beside it"),
        ({"a": "model-3.safetensors"}, "names the file 'model-3.safetensors', which is not there"),
        ({"a": "model-2.safetensors"}, "there is no tensor 'a' in model-2.safetensors"),
        (["a"], "has no weight_map"),
    ],
)
def test_an_index_that_lies(sharded, places, says):
    folder, _ = sharded
    with pytest.raises(ow.FormatError, match=says):
        ow.load_weights(write_index(folder, places))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"{", b"\xff", b"[" * 100_000])
def test_an_index_that_is_none(sharded, text):
    (sharded[0] / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ow.FormatError, match=r"index\.json"):
        ow.load_weights(sharded[0])


def test_a_folder_of_several_files(tmp_path):
    one, two, three = arrays("a"), arrays("b"), arrays("c")
    save_file(one, tmp_path / "1.safetensors")
    save_file(two, tmp_path / "2.safetensors")
    write_gguf(tmp_path / "3.gguf", three)
    (tmp_path / "README.md").write_text("# files")
    (tmp_path / "inner").mkdir()
    loaded = ow.load_weights(tmp_path)
    same(loaded, {**one, **two, **three})
    assert loaded.metadata["general.architecture"] == "llama"
    save_file(two, tmp_path / "4.safetensors")
    with pytest.raises(ow.FormatError, match=r"both 2\.safetensors and 4\.safetensors have a tensor 'b'"):
        ow.load_weights(tmp_path)


def test_what_holds_no_weights(tmp_path):
    with pytest.raises(ow.FormatError, match="has no files of weights"):
        ow.load_weights(tmp_path)
    with pytest.raises(FileNotFoundError):
        ow.load_weights(tmp_path / "nothing.safetensors")
    (tmp_path / "x.bin").write_bytes(b"abc")
    known = r"there are: \.gguf, .*\.safetensors.* \(plugins may add others\)"
    with pytest.raises(ow.UnknownNameError, match=rf"no file format named '\.bin'; {known}$"):
        ow.load_weights(tmp_path / "x.bin")
    with pytest.raises(ow.DTypeError, match="from a path, not from int"):
        ow.load_weights(3)


# --- formats of plugins -----------------------------------------------------------------------------------------------

PLUGIN = """
from opweave.registry import FileFormat, hookimpl

def read(path):
    import numpy
    return dict(numpy.load(path))

@hookimpl
def opweave_formats():
    return [
        FileFormat("NumPy archive", (".npz",), load_weights=read, magic=b"PK"),
        FileFormat("ours", (".safetensors",), load_weights=lambda path: {"theirs": numpy_ones()}),
        FileFormat("model", (".model",), plan=read),
        FileFormat("list", (".list",), load_weights=lambda path: [1]),
    ]

def numpy_ones():
    import numpy
    return numpy.ones(2, numpy.float32)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A folder for files, and a registry with the plugin, which no other test sees."""
    (tmp_path / "acme.py").write_text(PLUGIN)
    known = ow.Registry(environ={}, search=[])
    known.load(tmp_path / "acme.py")
    monkeypatch.setattr(registry, "REGISTRY", known)
    return tmp_path


def test_plugins_bring_formats(plugin):
    given = arrays("a", "b")
    np.savez(plugin / "x.npz", **given)
    same(ow.load_weights(plugin / "x.npz"), given)
    assert ow.load_weights(plugin / "x.npz").metadata == {}
    save_file(given, plugin / "x.safetensors")
    assert set(ow.load_weights(plugin / "x.safetensors")) == {"theirs"}, "plugins come before the core"


def test_readers_of_plugins_that_fail(plugin):
    (plugin / "x.npz").write_bytes(b"PK and no archive")
    with pytest.raises(ow.FormatError, match=r"x\.npz: reading it as NumPy archive failed: ValueError"):
        ow.load_weights(plugin / "x.npz")
    (plugin / "x.model").write_bytes(b"")
    with pytest.raises(ow.FormatError, match="files of model contain no weights"):
        ow.load_weights(plugin / "x.model")
    (plugin / "x.list").write_bytes(b"")
    with pytest.raises(ow.FormatError, match="gave list, no mapping of names"):
        ow.load_weights(plugin / "x.list")
