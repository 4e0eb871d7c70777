"""Files of GGUF, against the ``gguf`` package."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import opweave as ow
from opweave.formats import gguf as reader
from opweave.graph.dtypes import DTYPES, QUANTIZED
from tests.support.files import RNG, write_gguf

PLAIN = ["f64", "f32", "f16", "i64", "i32", "i16", "i8"]
SHAPES = [(3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 1)]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_and_shapes_are_those_that_were_written(tmp_path, name):
    arrays = {f"t{i}": (RNG.standard_normal(s) * 9).astype(DTYPES[name].numpy) for i, s in enumerate(SHAPES)}
    loaded = ow.load_weights(write_gguf(tmp_path / "x.gguf", arrays))
    assert list(loaded) == list(arrays)
    for key, array in arrays.items():
        assert (loaded[key].dtype.name, loaded[key].shape) == (name, array.shape)
        np.testing.assert_array_equal(ow.read(loaded[key]), array)


def test_bf16(tmp_path):
    array = RNG.standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
    path = write_gguf(tmp_path / "x.gguf", {"w": array.view(np.uint8)}, {"w": "bf16"})
    loaded = ow.load_weights(path)["w"]
    assert (loaded.dtype.name, loaded.shape) == ("bf16", (3, 4))
    np.testing.assert_array_equal(ow.read(loaded), array)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_every_block_type_has_the_values_of_the_package(tmp_path, dtype, lead):
    raw = RNG.integers(0, 256, (*(lead or (1,)), 2 * dtype.itemsize), np.uint8)
    raw = raw if lead else raw[0]
    path = write_gguf(tmp_path / "x.gguf", {"w": raw}, {"w": dtype.name})
    loaded = ow.load_weights(path)["w"]
    assert (loaded.dtype, loaded.shape) == (dtype, (*lead, 2 * dtype.block))
    (theirs,) = gguf.GGUFReader(path).tensors
    assert tuple(theirs.shape)[::-1] == loaded.shape
    with np.errstate(all="ignore"):
        want = gguf.dequantize(theirs.data, theirs.tensor_type)
        got = ow.dequantize(ow.Blocks(ow.read(loaded), loaded.shape, loaded.dtype))
    np.testing.assert_array_equal(got, want.reshape(loaded.shape))


def test_the_table_of_types_is_the_packages():
    assert {kind.value: kind.name.lower() for kind in gguf.GGMLQuantizationType} == reader._TYPES
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        name = kind.name.lower()
        known = DTYPES.get(name)
        ours = reader._OTHER_BLOCKS[name] if known is None else (known.block, known.itemsize)
        assert ours == (block, size), name


@pytest.mark.parametrize("name", sorted(reader._OTHER_BLOCKS))
def test_other_block_types_are_named_and_can_be_left_out(tmp_path, name):
    block, size = reader._OTHER_BLOCKS[name]
    tensors = {"odd": np.zeros((2, size), np.uint8), "w": np.ones(3, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", tensors, {"odd": name})
    with pytest.raises(ow.DTypeError, match=f"tensor 'odd' is {name}, which opweave does not have"):
        ow.load_weights(path)
    np.testing.assert_array_equal(ow.read(ow.load_weights(path, names="w")["w"]), [1, 1, 1])
    assert reader.read_gguf(path).tensors["odd"].shape == (2, block)


def test_metadata(tmp_path):
    given = {
        "text": "größe 🙂", "yes": True, "no": False, "count": 7, "factor": 0.5,
        "texts": ["a", "", "ß"], "numbers": [1, -2, 3], "floats": [0.5, 1.5], "flags": [True, False, True],
    }  # fmt: skip
    metadata = ow.load_weights(write_gguf(tmp_path / "x.gguf", {"w": np.ones(2, np.float32)}, **given)).metadata
    assert metadata["general.architecture"] == "llama"
    for key, value in given.items():
        got = metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value, key
    assert type(metadata["yes"]) is bool
    assert metadata["flags"].dtype == np.bool_


@pytest.mark.parametrize("alignment", [8, 32, 1024])
def test_alignment(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(alignment)
    arrays = {f"t{i}": RNG.standard_normal(i + 1).astype(np.float32) for i in range(4)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = ow.load_weights(tmp_path / "x.gguf")
    for name, array in arrays.items():
        np.testing.assert_array_equal(ow.read(loaded[name]), array)


# --- files made byte by byte ------------------------------------------------------------------------------------------


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def whole(pairs: list[bytes], rows: list[bytes], data: bytes = b"", *, version: int = 3, align: int = 32,
          counts: tuple[int, int] | None = None) -> bytes:  # fmt: skip
    tensor_count, pair_count = counts or (len(rows), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(rows)
    return head + bytes(-len(head) % align) + data


F32 = np.arange(8, dtype=np.float32).tobytes()
ARRAY = struct.Struct("<IQ").pack
BAD = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + bytes(60), "begins with b'GGML'"),
    "version": (whole([], [], version=1), "of version 1"),
    "big-endian": (whole([], [], version=3 << 24), "is big-endian"),
    "pairs that are not there": (whole([], [], counts=(0, 1 << 63)), "is cut off"),
    "tensors that are not there": (whole([], [], counts=((1 << 64) - 1, 0)), "cut off"),
    "a long key": (whole([struct.pack("<Q", 1 << 62)], []), "is cut off"),
    "a key that is no text": (whole([pair(b"\xff", 4, b"1234")], []), "no UTF-8"),
    "a type of metadata": (whole([pair(b"k", 13, b"1234")], []), "k is of type 13"),
    "a bool of 2": (whole([pair(b"k", 7, b"\2")], []), "k is bool, but neither 0 nor 1"),
    "bools of 2": (whole([pair(b"k", 9, ARRAY(7, 2) + b"\1\2")], []), "k is bool"),
    "a long array": (whole([pair(b"k", 9, ARRAY(4, 1 << 61))], []), "is cut off"),
    "a long array of texts": (whole([pair(b"k", 9, ARRAY(8, 1 << 61))], []), "is cut off"),
    "depth": (whole([pair(b"k", 9, ARRAY(9, 1) * 2000 + ARRAY(4, 0))], []), "within each other"),
    "a key twice": (whole([pair(b"k", 4, b"1234")] * 2, []), "the key 'k' twice"),
    "alignment 0": (whole([pair(b"general.alignment", 4, bytes(4))], []), "general.alignment is a power of two"),
    "alignment 12": (whole([pair(b"general.alignment", 4, b"\x0c\0\0\0")], []), "power of two, not 12"),
    "alignment is a text": (whole([pair(b"general.alignment", 8, text(b"32"))], []), "power of two"),
    "a tensor twice": (whole([], [row(b"a", [2], 0, 0), row(b"a", [2], 0, 32)], F32 * 2), "the tensor 'a' twice"),
    "a type of tensor": (whole([], [row(b"a", [2], 77, 0)], F32), "'a' is of type 77"),
    "an old type": (whole([], [row(b"a", [2], 4, 0)], F32), "no longer used"),
    "many axes": (whole([], [row(b"a", [2], 0, 0).replace(b"\1\0\0\0", b"\xff\xff\xff\xff")], F32), "is cut off"),
    "broken blocks": (whole([], [row(b"a", [33], 8, 0)], F32 * 9), "no whole blocks of 32"),
    "blocks without axes": (whole([], [row(b"a", [], 8, 0)], F32 * 9), "no whole blocks"),
    "beyond the end": (whole([], [row(b"a", [9], 0, 0)], F32), "may have been cut off"),
    "offset beyond the end": (whole([], [row(b"a", [8], 0, 1 << 63)], F32), "may have been cut off"),
    "lengths that overflow": (whole([], [row(b"a", [1 << 32, 1 << 32], 24, 0)], F32), "more than any memory"),
    "huge and empty": (whole([], [row(b"a", [0, 1 << 62, 1 << 62], 24, 0)], F32), "more than any memory"),
    "overlap": (whole([], [row(b"a", [4], 0, 0), row(b"b", [4], 0, 12)], F32), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(tmp_path, what):
    content, says = BAD[what]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ow.FormatError, match=says) as caught:
        ow.load_weights(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


def test_every_file_that_is_cut_off_is_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"a": np.ones(8, np.float32)}, names=["x", "y"], count=3)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ow.FormatError):
            ow.load_weights(path)


def test_tensors_that_are_not_aligned_are_copied(tmp_path):
    rows = [row(b"a", [1], 24, 0), row(b"b", [2, 1], 0, 1)]
    (tmp_path / "x.gguf").write_bytes(whole([], rows, b"\7" + np.array([1.5, -2.5], np.float32).tobytes()))
    found = reader.read_gguf(tmp_path / "x.gguf")
    assert found["b"].flags.aligned
    np.testing.assert_array_equal(found["b"], [[1.5, -2.5]])
    np.testing.assert_array_equal(found["a"], [7])


def test_a_number_without_axes_and_arrays_within_arrays(tmp_path):
    nested = pair(b"k", 9, ARRAY(9, 2) + ARRAY(4, 1) + b"\5\0\0\0" + ARRAY(8, 1) + text(b"t"))
    (tmp_path / "x.gguf").write_bytes(whole([nested], [row(b"a", [], 0, 0)], F32[4:8], version=2))
    loaded = ow.load_weights(tmp_path / "x.gguf")
    assert [list(part) for part in loaded.metadata["k"]] == [[5], ["t"]]
    assert loaded["a"].shape == ()
    assert ow.read(loaded["a"]) == 1


def test_the_first_bytes_count_more_than_the_suffix(tmp_path):
    path = write_gguf(tmp_path / "sha256-0123", {"w": np.ones(2, np.float32)})
    assert ow.load_weights(path).keys() == {"w"}


PIECES = st.lists(st.one_of(
    st.text(max_size=12), st.text("\0\1a", max_size=20), st.integers(250, 260).map("x".__mul__),
    st.integers(80, 90).map("\u2581".__mul__),
), max_size=60)  # fmt: skip


@given(PIECES, st.sampled_from([16, 100, 1 << 10]), st.integers(1, 40))
@example([""] * 40, 1 << 10, 1)
@example(["x" * 257, "a"], 1 << 10, 9)
@example(["a", "\0" * 7, "\0" * 8 + "b", "c"], 1 << 10, 1)
@example(["x" * 255, "x" * 256, "a"] * 9, 1 << 10, 1)
def test_lists_of_texts_are_those_that_were_written(tmp_path_factory, texts, part, cut):
    """Empty ones, with zeros, as long as lengths of one and of two bytes, in parts of any size; cut off, they are
    refused."""
    listed = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, len(texts))
    path = tmp_path_factory.mktemp("texts") / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + listed + bytes(64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_PART", part)
        assert reader.read_gguf(path).metadata == {"k": texts}
        path.write_bytes(path.read_bytes()[: -64 - cut])
        if cut <= len(listed):
            with pytest.raises(ow.FormatError):
                reader.read_gguf(path)
