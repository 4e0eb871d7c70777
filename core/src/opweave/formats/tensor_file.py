"""What the readers of files of tensors share: the mapped bytes, the table of tensors, and its checks."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from opweave.errors import DTypeError, FormatError, OpweaveError, UnknownNameError
from opweave.graph.blocks import Blocks
from opweave.graph.dtypes import DTYPES, bool_
from opweave.graph.layout import check_shape

__all__ = ["StoredTensor", "TensorFile", "check_tensors", "map_file", "parse_json"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ADDRESSES: Final = 1 << 63


class StoredTensor(NamedTuple):
    """A tensor as the table of a file describes it.

    Attributes:
        dtype: the short name, as of a `DType`; of a type that opweave does not have, the format's name in lower case.
        shape: in elements, the last axis varies fastest.
        offset: of its first byte, from the beginning of the file.
        nbytes: its size in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFile(Mapping[str, Any]):
    """The tensors of one file by name: arrays, or `Blocks` if quantized, over the mapped bytes.

    Arrays are read-only. They are made when they are asked for; the bytes are not read, except where the file does not
    align a tensor to its elements: then the array is a copy.

    Attributes:
        path: of the file.
        tensors: name -> the entry in the table of the file; also tensors of types that opweave does not have.
        metadata: what the file contains besides its tensors.
    """

    def __init__(
        self, path: Path, data: Bytes, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any]
    ) -> None:
        self.path, self.tensors, self.metadata = path, tensors, metadata
        self._data = data

    def __getitem__(self, name: str) -> np.ndarray[Any, Any] | Blocks:
        """The array or blocks of a tensor.

        Raises:
            UnknownNameError: the file has no such tensor.
            DTypeError: a type that opweave does not have.
            ShapeError: more than 8 axes.
            FormatError: a bool tensor with bytes other than 0 and 1.
        """
        try:
            stored = self.tensors[name]
        except KeyError:
            raise UnknownNameError("tensor", str(name), self.tensors, f"(in {self.path})") from None
        dtype, what = DTYPES.get(stored.dtype), f"{self.path}: tensor {name!r}"
        if dtype is None:
            raise DTypeError(
                f"{what} is {stored.dtype}, which opweave does not have; it has {', '.join(DTYPES)}: convert the file, "
                "or leave such tensors out (names=)"
            )
        raw = self._data[stored.offset : stored.offset + stored.nbytes]
        try:
            shape = check_shape(stored.shape, dtype)
        except OpweaveError as error:
            raise type(error)(f"{what}: {error}") from None
        if dtype.is_quantized:
            return Blocks(raw, shape, dtype)
        if dtype is bool_ and raw.size and raw.max() > 1:
            raise FormatError(f"{what} is bool, but has bytes other than 0 and 1")
        array = raw.view(dtype.numpy).reshape(shape)
        if array.flags.aligned:
            return array
        array = array.copy()
        array.flags.writeable = False
        return array

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def map_file(path: Path) -> Bytes:
    """The bytes of a file, mapped read-only; raises `FormatError` if there are none, `OSError` if it cannot be read."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise FormatError(f"{path} is empty")
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def check_tensors(path: Path, tensors: Mapping[str, StoredTensor], end: int) -> None:
    """Raise `FormatError` if tensors overlap, extend beyond ``end``, or have lengths that no address space holds."""
    for name, stored in tensors.items():
        if prod(n for n in stored.shape if n) * 16 >= _ADDRESSES:  # 16 bytes: more than any element
            raise FormatError(f"{path}: tensor {name!r} has the shape {list(stored.shape)}, more than any memory holds")
        if stored.offset + stored.nbytes > end:
            raise FormatError(
                f"{path}: tensor {name!r} ends at byte {stored.offset + stored.nbytes:,}, and the file at {end:,}; "
                "it may have been cut off"
            )
    there = sorted((s.offset, s.offset + s.nbytes, name) for name, s in tensors.items() if s.nbytes)
    for (_, reached, one), (first, _, other) in pairwise(there):
        if first < reached:
            raise FormatError(f"{path}: tensors {one!r} and {other!r} overlap")


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object that ``text`` is in UTF-8. Raises `FormatError` if it is none, or if an object in it has a key
    twice; ``what`` names the text in the message."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        for key in found:
            key.encode()  # JSON can write halves of characters, which are no text
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is no valid JSON: {error}") from None
    return found
