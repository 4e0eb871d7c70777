"""Files of ``safetensors`` (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header,
the header, then the bytes of all tensors without gaps."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

from opweave.errors import FormatError
from opweave.formats.tensor_file import StoredTensor, TensorFile, check_tensors, map_file, parse_json

__all__ = ["read_safetensors"]

_LONGEST_HEADER: Final = 100_000_000
"""Bytes; the limit of the format."""

_BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "U64": 64, "U32": 32, "U16": 16, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
"""Bits of an element. The names of the types that opweave has are the same in lower case."""


def read_safetensors(path: Path) -> TensorFile:
    """The tensors of a file, over its mapped bytes.

    Raises:
        FormatError: the file is no valid one: its header is cut off or does not fit the tensors, tensors overlap or
            leave gaps.
        OSError: it cannot be read.
    """
    data = map_file(path)
    if data.size < 8:
        raise FormatError(f"{path} is no safetensors file: it has {data.size} bytes")
    length = int.from_bytes(data[:8].tobytes(), "little")
    start = 8 + length
    if length > _LONGEST_HEADER or start > data.size:
        raise FormatError(
            f"{path} is no safetensors file, or cut off: its header has {length:,} bytes, of {data.size:,} in the file"
        )
    if data[8:9].tobytes() != b"{":
        raise FormatError(f"{path} is no safetensors file: its header does not begin with {{")
    header = parse_json(data[8:start].tobytes(), f"{path}: the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ maps texts to texts, but here it is {metadata!r:.80}")
    tensors = {name: _stored(path, name, entry, start) for name, entry in header.items()}
    check_tensors(path, tensors, data.size)
    used = sum(stored.nbytes for stored in tensors.values())
    if start + used != data.size:  # since none overlap, this means gaps
        raise FormatError(f"{path}: {data.size - start - used:,} bytes behind the header belong to no tensor")
    return TensorFile(path, data, tensors, metadata)


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """A tensor as the header describes it. All of the description is checked but whether it overlaps other tensors."""
    what = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what} has no dtype, shape and data_offsets, but {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise FormatError(f"{what} has the dtype {dtype!r:.80}; the format has {', '.join(_BITS)}")
    if not _are_lengths(shape):
        raise FormatError(f"{what} has the shape {shape!r:.80}; lengths are integers from 0 on")
    if not _are_lengths(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{what} has the data_offsets {offsets!r:.80}, which are no range of bytes")
    nbytes = offsets[1] - offsets[0]
    if prod(shape) * _BITS[dtype] != 8 * nbytes:
        raise FormatError(f"{what}: {dtype}{shape!r:.80} does not take {nbytes:,} bytes, as its data_offsets say")
    return StoredTensor(dtype.lower(), tuple(shape), start + offsets[0], nbytes)


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 64 for v in values)
