"""Files of safetensors, against the library that defines them."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from safetensors.torch import save_file

import opweave as ow
from opweave.formats.safetensors import read_safetensors
from tests.support.files import entry, raw_safetensors

TYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
SHAPES = [(), (3,), (2, 3), (2, 3, 4, 5), (0,), (2, 0, 3), (1,) * 8]


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))).reshape(shape) % 2 if dtype == torch.bool else
            torch.arange(int(np.prod(shape))).reshape(shape) - 3 * (dtype != torch.uint8)).to(dtype)  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_every_dtype_and_shape_that_torch_writes(tmp_path, name):
    tensors = {f"t{i}": values(TYPES[name], shape) for i, shape in enumerate(SHAPES)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt", "ключ": "größe"})
    loaded = ow.load_weights(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert loaded.metadata == {"format": "pt", "ключ": "größe"}
    for key, tensor in tensors.items():
        assert (loaded[key].dtype.name, loaded[key].shape) == (name, tuple(tensor.shape))
        want = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if name == "bf16" else tensor.numpy()
        np.testing.assert_array_equal(ow.read(loaded[key]), want)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
@pytest.mark.parametrize("target", ["bf16", "f32"])
def test_one_byte_floats_are_converted_without_loss_or_named(tmp_path, kind, target):
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind))
    save_file({"w": every, "other": torch.ones(2)}, tmp_path / "x.safetensors")
    short = f"f8_{kind.split('_')[1][:4]}"
    with pytest.raises(ow.DTypeError, match=rf"x.safetensors: tensor 'w' is {short}, .*dtype='bf16'"):
        ow.load_weights(tmp_path / "x.safetensors")
    assert ow.load_weights(tmp_path / "x.safetensors", names="other").keys() == {"other"}
    loaded = ow.load_weights(tmp_path / "x.safetensors", dtype=target)["w"]
    assert loaded.dtype.name == target
    np.testing.assert_array_equal(ow.read(loaded).astype(np.float32), every.float().numpy())


@pytest.mark.parametrize(("dtype", "bits"), [("C64", 64), ("F4", 4)])
def test_types_that_opweave_does_not_have_are_named_and_can_be_left_out(tmp_path, dtype, bits):
    size = bits * 2 // 8
    header = {"odd": entry(dtype, [2], 0, size), "w": entry("U8", [3], size, size + 3)}
    path = raw_safetensors(tmp_path / "x.safetensors", header, bytes(size) + b"abc")
    assert set(safetensors.safe_open(path, "np").keys()) == {"odd", "w"}
    with pytest.raises(ow.DTypeError, match=f"tensor 'odd' is {dtype.lower()}, which opweave does not have"):
        ow.load_weights(path)
    np.testing.assert_array_equal(ow.read(ow.load_weights(path, names="w")["w"]), list(b"abc"))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_of_every_size_are_loaded(tmp_path, dtype):
    values = np.array([0, 1, np.iinfo(dtype).max], dtype)
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": values}, path)
    found = ow.read(ow.load_weights(path)["w"])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)


def test_arrays_are_the_mapped_bytes_unless_the_file_does_not_align_them(tmp_path):
    header = {"bytes": entry("U8", [1], 0, 1), "odd": entry("F32", [2], 1, 9), "even": entry("F32", [1], 9, 13)}
    for padding in range(4):
        text = str(header).replace("'", '"').encode()
        text += b" " * (-(len(text) + 8) % 4 + padding)
        data = np.array([1.5, -2.5, 3.5], np.float32).tobytes()
        path = raw_safetensors(tmp_path / f"{padding}.safetensors", text, b"x" + data)
        found = read_safetensors(path)
        arrays = {name: found[name] for name in found}
        np.testing.assert_array_equal(arrays["odd"], np.array([1.5, -2.5], np.float32))
        np.testing.assert_array_equal(arrays["even"], np.array([3.5], np.float32))
        mapped = arrays["bytes"].__array_interface__["data"][0]
        inside = {n: 0 <= a.__array_interface__["data"][0] - mapped < 13 for n, a in arrays.items()}
        assert all(a.flags.aligned and not a.flags.writeable for a in arrays.values())
        assert inside == {"bytes": True, "odd": padding == 3, "even": padding == 3}


ONE = {"a": entry("U8", [2], 0, 2)}
BAD: dict[str, tuple[Any, bytes, str]] = {
    "nothing": (b"", b"", "does not begin with"),
    "no JSON": (b"{'a': 1}", b"", "the header is no valid JSON"),
    "no object": (b'["a"]', b"", "does not begin with"),
    "no UTF-8": (b'{"\xff": 1}', b"", "no valid JSON"),
    "UTF-16": ('{"a": 1}'.encode("utf-16-le"), b"", "no valid JSON"),
    "half a character": (rb'{"\ud800": {}}', b"", "no valid JSON"),
    "depth": (b'{"a":' + b"[" * 200_000, b"", "no valid JSON"),
    "digits": (b'{"a":' + b"9" * 5000 + b"}", b"", "no valid JSON"),
    "twice": (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],'
              b'"data_offsets":[2,4]}}', b"abcd", "the key 'a' is there twice"),
    "entry is a list": ({"a": [1]}, b"", "tensor 'a' has no dtype"),
    "entry lacks something": ({"a": {"dtype": "U8", "shape": []}}, b"", "tensor 'a' has no dtype"),
    "entry has more": ({"a": {**ONE["a"], "more": 1}}, b"ab", "tensor 'a' has no dtype"),
    "dtype": ({"a": entry("F23", [1], 0, 1)}, b"a", "the dtype 'F23'"),
    "dtype is a list": ({"a": entry([], [1], 0, 1)}, b"a", r"the dtype \[\]"),  # type: ignore[arg-type]
    "negative length": ({"a": entry("U8", [-2, -1], 0, 2)}, b"ab", "the shape"),
    "fraction": ({"a": entry("U8", [2.0], 0, 2)}, b"ab", "the shape"),
    "length is true": ({"a": entry("U8", [True], 0, 1)}, b"a", "the shape"),
    "shape is a number": ({"a": entry("U8", 2, 0, 2)}, b"ab", "the shape"),
    "huge": ({"a": entry("U8", [1 << 40], 0, 1 << 40)}, b"ab", "may have been cut off"),
    "huge and empty": ({"a": entry("U8", [0, 1 << 62, 1 << 62], 0, 0)}, b"", "more than any memory holds"),
    "larger than 64 bits": ({"a": entry("U8", [1 << 70, 0], 0, 0)}, b"", "the shape"),
    "negative offset": ({"a": entry("U8", [2], -2, 0)}, b"ab", "the data_offsets"),
    "backwards": ({"a": entry("U8", [2], 2, 0)}, b"ab", "the data_offsets"),
    "three offsets": ({"a": {**ONE["a"], "data_offsets": [0, 1, 2]}}, b"ab", "the data_offsets"),
    "another size": ({"a": entry("F32", [1], 0, 2)}, b"ab", "does not take 2 bytes"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc", "'a' and 'b' overlap"),
    "gap": ({**ONE, "b": entry("U8", [2], 3, 5)}, b"abcde", "1 bytes behind the header belong to no tensor"),
    "more behind": (ONE, b"abc", "1 bytes behind the header belong to no tensor"),
    "cut off": (ONE, b"a", "may have been cut off"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__ maps texts"),
    "metadata is a list": ({"__metadata__": []}, b"", "__metadata__ maps texts"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(tmp_path, what):
    header, data, says = BAD[what]
    with pytest.raises(ow.FormatError, match=says) as caught:
        ow.load_weights(raw_safetensors(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 100, 10**8, 10**8 + 1, 1 << 40, (1 << 64) - 1])
def test_a_header_of_another_length_than_it_says(tmp_path, length):
    with pytest.raises(ow.FormatError):
        ow.load_weights(raw_safetensors(tmp_path / "x.safetensors", ONE, b"ab", length))


def test_every_file_that_is_cut_off_is_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:size])
        with pytest.raises(ow.FormatError, match=r"x\.safetensors"):
            ow.load_weights(tmp_path / "x.safetensors")


def test_bool_bytes_are_0_or_1(tmp_path):
    path = raw_safetensors(tmp_path / "x.safetensors", {"a": entry("BOOL", [2], 0, 2)}, b"\0\2")
    with pytest.raises(ow.FormatError, match="tensor 'a' is bool, but has bytes other than 0 and 1"):
        ow.load_weights(path)


def test_more_axes_than_there_are(tmp_path):
    path = raw_safetensors(tmp_path / "x.safetensors", {"a": entry("U8", [1] * 9, 0, 1)}, b"a")
    with pytest.raises(ow.ShapeError, match=r"tensor 'a': .* 9 axes"):
        ow.load_weights(path)


@pytest.mark.parametrize("name", ["", " ", "a b", "\0", "../x", "größe", "🙂", "a\nb", '"', "*", "[x]", "x" * 5000])
def test_names_of_any_characters(tmp_path, name):
    save_file({name: torch.ones(2), "plain": torch.zeros(2)}, tmp_path / "x.safetensors")
    loaded = ow.load_weights(tmp_path / "x.safetensors")
    assert set(loaded) == {name, "plain"}
    np.testing.assert_array_equal(ow.read(loaded[name]), [1, 1])


def test_order_of_the_entries_does_not_matter(tmp_path):
    parts = {"a": entry("U8", [1], 0, 1), "b": entry("U8", [0], 1, 1), "c": entry("U8", [2], 1, 3)}
    for i, order in enumerate(itertools.permutations(parts)):
        path = raw_safetensors(tmp_path / f"{i}.safetensors", {name: parts[name] for name in order}, b"xyz")
        found = read_safetensors(path)
        assert {name: bytes(found[name]) for name in found} == {"a": b"x", "b": b"", "c": b"yz"}
