"""Files of weights made by the libraries that define their formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

RNG = np.random.default_rng(11)


def raw_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header: an object, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: Any, first: Any, last: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def write_gguf(
    path: Path, tensors: Mapping[str, Any], quantized: Mapping[str, str] | None = None, **metadata: Any
) -> Path:
    """A file by the ``gguf`` package.

    Args:
        quantized: names of tensors, given as bytes, and their block types.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, array in tensors.items():
        kind = (quantized or {}).get(name)
        writer.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
