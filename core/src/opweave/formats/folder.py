"""Models in several files: those that an index names, or all files of weights in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from opweave.errors import FormatError, UnknownNameError
from opweave.formats.tensor_file import parse_json

__all__ = ["INDEX", "SeveralFiles", "read_folder", "read_index"]

Tensors = Mapping[str, Any]
Read = Callable[[Path], Tensors]

INDEX: Final = ".safetensors.index.json"
"""How the name of the index of a model in several files ends."""


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
    parts: dict[str, Tensors] = {}
    files = [path for path in files if is_weights(path)]
    if not files:
        raise FormatError(f"{folder} has no files of weights, such as *.safetensors or *.gguf")
    opened = {path: read(path) for path in files}
    for path, tensors in opened.items():
        for name in tensors:
            if name in parts:
                other = next(known for known, found in opened.items() if found is parts[name])
                raise FormatError(
                    f"{folder}: both {other.name} and {path.name} have a tensor {name!r}; load one of the files"
                )
            parts[name] = tensors
    return SeveralFiles(parts, _joined(opened.values()))


def read_index(index: Path, read: Read) -> SeveralFiles:
    """The tensors that an index names (``*.safetensors.index.json``), from the files beside it.

    Raises:
        FormatError: the index is not valid, or names files or tensors that are not there.
        OSError: a file cannot be read.
    """
    content = parse_json(index.read_bytes(), str(index))
    places, own = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(places, dict) or not isinstance(own, dict):
        raise FormatError(f"{index} has no weight_map of names to files")
    opened: dict[str, Tensors] = {}
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", ".", "..") or PurePath(file).name != file or "\\" in file:
            raise FormatError(f"{index}: tensor {name!r} is in {file!r:.80}, which is no name of a file beside it")
        if file not in opened:
            if not (index.parent / file).is_file():
                raise FormatError(f"{index} names the file {file!r:.80}, which is not there")
            opened[file] = read(index.parent / file)
        if name not in opened[file]:
            raise FormatError(f"{index}: there is no tensor {name!r} in {file}")
    return SeveralFiles({name: opened[file] for name, file in places.items()}, _joined(opened.values(), own))


def _joined(files: Any, first: Mapping[str, Any] | None = None) -> dict[str, Any]:
    metadata = dict(first or {})
    for tensors in files:
        for key, value in getattr(tensors, "metadata", {}).items():
            metadata.setdefault(key, value)
    return metadata
