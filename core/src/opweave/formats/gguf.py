"""Files of GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little-endian: counts,
typed metadata, a table of tensors, then their bytes, each aligned."""

from __future__ import annotations

from math import prod
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numpy as np

from opweave.errors import FormatError
from opweave.formats.tensor_file import Bytes, StoredTensor, TensorFile, check_tensors, map_file
from opweave.graph.dtypes import DTYPES

__all__ = ["read_gguf"]

_ALIGNMENT: Final = 32
"""Bytes, where the metadata names no other one."""

_TYPES: Final = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
}  # fmt: skip
"""Types of tensors by their numbers."""

_OTHER_BLOCKS: Final = {"q8_1": (32, 40), "q8_k": (256, 292), "q1_0": (128, 18)}
"""Elements and bytes of a block of the types that opweave does not decode: their tensors are listed, but not loaded."""

_NUMBERS: Final = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: Struct("<I"), 5: Struct("<i"),
    6: Struct("<f"), 7: Struct("<B"), 10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
"""Types of metadata by their numbers; 7 is bool."""
_BOOL, _STRING, _ARRAY, _U32, _U64 = 7, 8, 9, _NUMBERS[4], _NUMBERS[10]

_PART: Final = 1 << 10
"""Bytes of a list of texts that are cut at a time, at first; up to 64 times as many where all of them are texts."""

_DEPTH: Final = 8
"""Nested arrays that are read at most; models have none."""


def read_gguf(path: Path) -> TensorFile:
    """The tensors of a file, over its mapped bytes. A file lists the axis that varies fastest first; here it is the
    last.

    Raises:
        FormatError: the file is no valid one: it is cut off, of another version, has a name twice, or its table does
            not fit the tensors.
        OSError: it cannot be read.
    """
    data = map_file(path)
    reader = _Reader(path, data)
    magic = reader.take(4, "the magic number")
    if magic != b"GGUF":
        raise FormatError(f"{path} is no GGUF file: it begins with {magic!r}")
    version = reader.number(_U32, "the version")
    if version not in (2, 3):
        kind = "big-endian" if version % 65536 == 0 else f"of version {version}"
        raise FormatError(f"{path} is {kind}; this reads little-endian files of versions 2 and 3")
    tensor_count, pairs = reader.number(_U64, "the counts"), reader.number(_U64, "the counts")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.string("a key of the metadata")
        if key in metadata:
            raise FormatError(f"{path} has the key {key!r} twice")
        metadata[key] = reader.value(reader.number(_U32, key), key)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{path}: general.alignment is a power of two, not {alignment!r:.80}")
    described: dict[str, StoredTensor] = {}
    for _ in range(tensor_count):
        name = reader.string("the name of a tensor")
        if name in described:
            raise FormatError(f"{path} has the tensor {name!r} twice")
        described[name] = reader.tensor(name)
    start = -(-reader.at // alignment) * alignment
    tensors = {name: stored._replace(offset=start + stored.offset) for name, stored in described.items()}
    check_tensors(path, tensors, data.size)
    return TensorFile(path, data, tensors, metadata)


class _Reader:
    """Reads one value after the other. Values that reach over the end of the file raise `FormatError`.

    Attributes:
        at: offset of the next value in bytes.
    """

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.at = path, 0
        self._data, self._view = data, data.data

    def _advance(self, size: int, what: str) -> int:
        """The offset of the next ``size`` bytes, which are then read over; raises `FormatError` if they are not
        there."""
        at = self.at
        if size > self._data.size - at:
            raise FormatError(f"{self.path} is cut off: {what} needs {size:,} bytes at {at:,} of {self._data.size:,}")
        self.at += size
        return at

    def take(self, size: int, what: str) -> bytes:
        at = self._advance(size, what)
        return bytes(self._view[at : at + size])

    def number(self, kind: Struct, what: str) -> Any:
        return kind.unpack_from(self._view, self._advance(kind.size, what))[0]

    def string(self, what: str) -> str:
        try:
            begin = self._advance(self.number(_U64, what), what)
            return str(self._view[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.path}: {what} is no UTF-8: {error}") from None

    def _strings(self, count: int, what: str) -> list[str]:
        """That many texts: a vocabulary has hundreds of thousands, which `string` would read in half a second.

        A length below 256 is a byte and seven zeros. So a part of the file is cut at every seven zeros, and what lies
        between are texts, each with the first byte of the next length, as far as all lengths say so. Where they do not,
        texts are read alone, twice as many each time, so that odd lists take no longer than that."""
        self.at = self._advance(count * _U64.size, what)  # each has a length
        texts: list[str] = []
        part, alone = _PART, 1
        while len(texts) < count:
            data = bytes(self._view[self.at : self.at + part])
            found = data.split(bytes(7), min(count - len(texts), part))[:-1]
            sizes = np.fromiter(map(len, found), np.int64, len(found))
            begins = np.cumsum(sizes + 7)  # of the texts, behind their lengths
            agree = np.frombuffer(data, np.uint8)[begins[:-1] - 8] == sizes[1:] - 1
            most = (len(agree) if agree.all() else int(agree.argmin())) if found and sizes[0] == 1 else 0
            if most:
                try:
                    texts += [str(text[:-1], "utf-8") for text in found[1 : most + 1]]
                except UnicodeDecodeError as error:
                    raise FormatError(f"{self.path}: {what} is no UTF-8: {error}") from None
                self.at += int(begins[most]) - 8
            if most and most == len(agree):
                part, alone = min(2 * part, 64 * _PART), 1
            else:  # a length of 0, or above 255
                texts += [self.string(what) for _ in range(min(alone, count - len(texts)))]
                part, alone = _PART, 2 * alone
        return texts

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A value of the metadata: a number, bool, text, NumPy array of numbers, or list."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        if kind not in _NUMBERS:
            raise FormatError(f"{self.path}: {what} is of type {kind}, which the format does not have")
        value = self.number(_NUMBERS[kind], what)
        return self._flags(np.array(value), what).item() if kind == _BOOL else value

    def _array(self, what: str, depth: int) -> Any:
        kind, count = self.number(_U32, what), self.number(_U64, what)
        if depth == _DEPTH:
            raise FormatError(f"{self.path}: {what} has more than {_DEPTH} arrays within each other")
        if kind == _STRING:
            return self._strings(count, what)
        if kind not in _NUMBERS:
            return [self.value(kind, what, depth + 1) for _ in range(count)]
        dtype = np.dtype(_NUMBERS[kind].format)
        at = self._advance(count * dtype.itemsize, what)
        values = self._data[at : self.at].view(dtype).copy()  # aligned
        return self._flags(values, what) if kind == _BOOL else values

    def _flags(self, values: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
        if (values > 1).any():
            raise FormatError(f"{self.path}: {what} is bool, but neither 0 nor 1")
        return values.astype(np.bool_)

    def tensor(self, name: str) -> StoredTensor:
        """The entry of a tensor in the table, without its name; the offset counts from the first tensor."""
        what = f"tensor {name!r}"
        axes = self.number(_U32, what)
        at = self._advance(axes * _U64.size, what)
        lengths = self._data[at : self.at].view("<u8").tolist()
        number, offset = self.number(_U32, what), self.number(_U64, what)
        if number not in _TYPES:
            raise FormatError(f"{self.path}: {what} is of type {number}, which is not known here, or no longer used")
        dtype, shape = _TYPES[number], tuple(reversed(lengths))
        known = DTYPES.get(dtype)
        block, itemsize = _OTHER_BLOCKS[dtype] if known is None else (known.block, known.itemsize)
        if block > 1 and (not shape or shape[-1] % block):
            raise FormatError(f"{self.path}: {what} has rows that are no whole blocks of {block} elements ({dtype})")
        return StoredTensor(dtype, shape, offset, prod(shape) // block * itemsize)
