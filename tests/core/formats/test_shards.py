"""Models in several files, one of which is named: files by the packages ``gguf`` and ``safetensors``."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import opweave as ow
from tests.support.files import RNG

GIVEN = {f"t{i}": RNG.standard_normal((3, i + 1), np.float32) for i in range(6)}


def write_split(folder, name="m", given=GIVEN):
    """The files that ``gguf`` makes of a model, two tensors in each."""
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "example", split_max_tensors=2)
    writer.add_uint32("example.context_length", 512)
    for key, array in given.items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(folder.glob(f"{name}-*.gguf"))
    assert [path.name for path in paths] == [f"{name}-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return paths


def write_shards(folder, name="m", suffix="safetensors"):
    paths = [folder / f"{name}-0000{i + 1}-of-00003.{suffix}" for i in range(3)]
    for i, path in enumerate(paths):
        save_file({key: GIVEN[key] for key in list(GIVEN)[2 * i : 2 * i + 2]}, path, {"from": str(i)})
    return paths


def same(loaded, given=GIVEN):
    assert set(loaded) == set(given)
    for key, array in given.items():
        np.testing.assert_array_equal(ow.read(loaded[key]), array)


@pytest.mark.parametrize("write", [write_split, write_shards])
@pytest.mark.parametrize("which", range(3))
def test_one_file_stands_for_the_whole_model(tmp_path, write, which):
    paths = write(tmp_path)
    write(tmp_path, "other")
    same(ow.load_weights(paths[which]))


def test_a_folder_has_the_whole_model_once_and_its_metadata(tmp_path):
    write_split(tmp_path)
    loaded = ow.load_weights(tmp_path)
    same(loaded)
    assert loaded.metadata["example.context_length"] == 512
    assert not [key for key in loaded.metadata if key.startswith("split.")]


@pytest.mark.parametrize("write", [write_split, write_shards])
@pytest.mark.parametrize("gone", range(3))
def test_a_file_that_is_not_there_is_named(tmp_path, write, gone):
    paths = write(tmp_path)
    paths.pop(gone).unlink()
    for path in (*paths, tmp_path):
        with pytest.raises(ow.FormatError, match=f"m-0000{gone + 1}-of-00003.*not there"):
            ow.load_weights(path)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_counts_that_are_not_true(tmp_path, key):
    paths = write_split(tmp_path)
    data = bytearray(paths[1].read_bytes())
    at = data.index(key.encode()) + len(key) + 4  # behind the key its type, then the number
    data[at] += 1
    paths[1].write_bytes(data)
    with pytest.raises(ow.FormatError, match=rf"{paths[1].name}: {key} is "):
        ow.load_weights(paths[0])


def test_files_of_another_name_or_cut_off_or_with_a_tensor_twice(tmp_path):
    paths = write_split(tmp_path)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:-40])
    with pytest.raises(ow.FormatError, match=paths[1].name):
        ow.load_weights(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ow.FormatError, match=r"both m-00002-of-00003.gguf and m-00003-of-00003.gguf have a tensor"):
        ow.load_weights(paths[0])
    (tmp_path / "alone.gguf").write_bytes(data)
    with pytest.raises(ow.FormatError, match=r"alone.gguf is one of several files .*split.count is 3"):
        ow.load_weights(tmp_path / "alone.gguf")
    paths[0].rename(tmp_path / "m-00004-of-00003.gguf")
    with pytest.raises(ow.FormatError, match="file 4 of 3"):
        ow.load_weights(tmp_path / "m-00004-of-00003.gguf")


def test_an_index_beside_the_files_counts(tmp_path):
    paths = write_shards(tmp_path)
    index = tmp_path / "m.safetensors.index.json"
    places = {key: paths[i // 2].name for i, key in enumerate(GIVEN)}
    index.write_text(json.dumps({"weight_map": places, "metadata": {"total_size": 7}}))
    loaded = ow.load_weights(paths[2])
    same(loaded)
    assert loaded.metadata["total_size"] == 7
    index.write_text(json.dumps({"weight_map": {key: file for key, file in places.items() if file != paths[2].name}}))
    with pytest.raises(ow.FormatError, match=r"no tensor that m.safetensors.index.json names"):
        ow.load_weights(paths[2])


def test_a_model_in_one_file_of_one(tmp_path):
    path = tmp_path / "m-00001-of-00001.safetensors"
    save_file(GIVEN, path)
    same(ow.load_weights(path))
