"""Models in several files: those that an index names, those with a number in their name (``-00001-of-00003``), or all
files of weights in a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from opweave.errors import FormatError, UnknownNameError
from opweave.formats.tensor_file import TensorFile, parse_json
from opweave.warning import warn_caller

__all__ = ["INDEX", "SeveralFiles", "read_folder", "read_index", "read_model"]

Tensors = Mapping[str, Any]
Read = Callable[[Path], Tensors]

INDEX: Final = ".safetensors.index.json"
"""How the name of the index of a model in several files ends."""

_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(gguf|safetensors)", re.DOTALL)
"""Names of the files of a model in several files: that of the model, the number of the file from 1 on, their count."""

_SPLIT: Final = ("split.no", "split.count", "split.tensors.count")
"""What GGUF files say about this: the number of the file from 0 on, their count, the count of all tensors."""


class SeveralFiles(Mapping[str, Any]):
    """The tensors of several files by name.

    Attributes:
        parts: name -> the tensors of the file that it is in.
        metadata: what the files contain besides tensors; if several have a key, the value of the first counts.
    """

    def __init__(self, parts: Mapping[str, Tensors], metadata: Mapping[str, Any]) -> None:
        self.parts, self.metadata = parts, metadata

    def __getitem__(self, name: str) -> Any:
        try:
            return self.parts[name][name]
        except KeyError:
            raise UnknownNameError("tensor", str(name), self.parts) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def read_folder(folder: Path, read: Read, is_weights: Callable[[Path], bool]) -> SeveralFiles:
    """All tensors of a folder: those that its index names, else those of all files of weights in it.

    Args:
        read: returns the tensors of one file.
        is_weights: returns whether a file contains weights.

    Raises:
        FormatError: it has no files of weights, or several indices; two files have a tensor of one name.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    indices = [path for path in files if path.name.endswith(INDEX)]
    preferred = [path for path in indices if path.name == f"model{INDEX}"] or indices
    if len(preferred) > 1:
        raise FormatError(f"{folder} has several models: load one of {', '.join(path.name for path in preferred)}")
    if preferred:
        return read_index(preferred[0], read)
    files = [path for path in files if is_weights(path)]
    if not files:
        raise FormatError(f"{folder} has no files of weights, such as *.safetensors or *.gguf")
    opened: dict[Path, Tensors] = {}
    known: set[Path] = set()
    for path in files:
        if path not in known:
            shards = shards_of(path)
            known.update(shards)
            opened[path] = _read_shards(shards, read) if shards else _read_alone(path, read)
    return _united(folder, opened, _joined(opened.values()))


def read_model(path: Path, read: Read) -> Tensors:
    """The tensors of a file, or of the whole model where the file is one of several.

    A file is one of several if its name says so (``m-00001-of-00003.gguf``), or if it is GGUF with a ``split.count``
    above 1. If there is an index of this name beside files of safetensors, it says where the tensors are.

    Raises:
        FormatError: a file of the model is not there, the index does not name this file, or what the files say about
            their count, numbers and tensors is wrong; two of them have a tensor of one name.
        OSError: a file cannot be read.
    """
    shards = shards_of(path)
    if not shards:
        return _read_alone(path, read)
    match = _SHARD.fullmatch(path.name)
    index = path.with_name(f"{match[1]}{INDEX}") if match and match[4] == "safetensors" else None
    if index is None or not index.is_file():
        return _read_shards(shards, read)
    if path.name not in _weight_map(index)[0].values():
        raise FormatError(f"{path} has no tensor that {index.name} names; it is not of that model")
    return read_index(index, read)


def shards_of(path: Path) -> list[Path]:
    """The files of the model of which this is one of several by its name, in their order; else none.

    Raises:
        FormatError: some of them are not there, or the number is not one from 1 to the count.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None or not path.is_file() or int(match[3]) == 1 == int(match[2]):
        return []
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise FormatError(f"{path}: its name says that it is file {number} of {count}")
    names = [f"{match[1]}-{i:05}-of-{match[3]}.{match[4]}" for i in range(1, count + 1)]
    there = {other.name for other in path.parent.iterdir() if other.is_file()}
    if missing := [name for name in names if name not in there]:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise FormatError(f"{path} is one of {count} files of a model; {', '.join(missing[:4])}{more} are not there")
    return [path.with_name(name) for name in names]


def _read_alone(path: Path, read: Read) -> Tensors:
    """The tensors of a file whose name does not say that it is one of several."""
    tensors = read(path)
    count = tensors.metadata.get("split.count", 1) if isinstance(tensors, TensorFile) else 1
    if not isinstance(count, str) and not any(_is_number(count, one) for one in (0, 1)):  # texts are of safetensors
        raise FormatError(
            f"{path} is one of several files of a model (split.count is {count!r:.80}), which are found by their names "
            "only: name them as m-00001-of-00003.gguf"
        )
    return tensors


def _read_shards(shards: list[Path], read: Read) -> SeveralFiles:
    """The tensors of a model in several files. Its metadata is without what describes single files (`_SPLIT`)."""
    opened = {path: read(path) for path in shards}
    found = _united(shards[0].parent, opened, _joined(opened.values()))
    for number, (path, tensors) in enumerate(opened.items()):
        said = getattr(tensors, "metadata", {})
        for key, true in zip(_SPLIT, (number, len(shards), len(found)), strict=True):
            if path.suffix == ".gguf" and not _is_number(said.get(key, true), true):
                raise FormatError(
                    f"{path}: {key} is {said[key]!r:.80}, but by the names and tensors of the files {true}"
                )
    if shards[0].suffix == ".gguf":
        found.metadata = {key: value for key, value in found.metadata.items() if key not in _SPLIT}
    return found


def _is_number(value: Any, true: int) -> bool:
    return isinstance(value, int) and value == true


def _united(folder: Path, opened: Mapping[Path, Tensors], metadata: Mapping[str, Any]) -> SeveralFiles:
    """The tensors of several files; raises `FormatError` where two of them have one of the same name."""
    parts: dict[str, Tensors] = {}
    for path, tensors in opened.items():
        for name in tensors:
            if name in parts:
                other = next(known for known, found in opened.items() if found is parts[name])
                raise FormatError(
                    f"{folder}: both {other.name} and {path.name} have a tensor {name!r}; load one of the files"
                )
            parts[name] = tensors
    return SeveralFiles(parts, metadata)


def read_index(index: Path, read: Read) -> SeveralFiles:
    """The tensors that an index names (``*.safetensors.index.json``), from the files beside it. Warns where these files
    have others, which are left out.

    Raises:
        FormatError: the index is not valid, or names files or tensors that are not there.
        OSError: a file cannot be read.
    """
    places, own = _weight_map(index)
    there = {other.name for other in index.parent.iterdir() if other.is_file()}
    opened: dict[str, Tensors] = {}
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", ".", "..") or PurePath(file).name != file or "\\" in file:
            raise FormatError(f"{index}: tensor {name!r} is in {file!r:.80}, which is no name of a file beside it")
        if file not in opened:
            if file not in there:
                raise FormatError(f"{index} names the file {file!r:.80}, which is not there")
            opened[file] = read(index.parent / file)
        if name not in opened[file]:
            raise FormatError(f"{index}: there is no tensor {name!r} in {file}")
    if beside := [(name, file) for file, tensors in opened.items() for name in tensors if places.get(name) != file]:
        (name, file), count = beside[0], len(beside)
        more = f" and {count - 1} more are" if count > 1 else " is"
        warn_caller(f"{index}: the tensor {name!r} in {file}{more} left out, since the index does not name it")
    return SeveralFiles({name: opened[file] for name, file in places.items()}, _joined(opened.values(), own))


def _weight_map(index: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Names to files, and the metadata, as an index has them."""
    content = parse_json(index.read_bytes(), str(index))
    places, own = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(places, dict) or not isinstance(own, dict):
        raise FormatError(f"{index} has no weight_map of names to files")
    return places, own


def _joined(files: Any, first: Mapping[str, Any] | None = None) -> dict[str, Any]:
    metadata = dict(first or {})
    for tensors in files:
        for key, value in getattr(tensors, "metadata", {}).items():
            metadata.setdefault(key, value)
    return metadata
