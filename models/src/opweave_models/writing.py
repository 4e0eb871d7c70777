"""`quantize_gguf`: a GGUF file with matrices in another type of blocks, written by the package ``gguf``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import FormatError, Unavailable
from opweave.progress import shown
from opweave_models.files import block_type, nbytes_of, open_model

__all__ = ["quantize_gguf"]


def quantize_gguf(source: Path, target: Path, kind: str) -> None:
    """Write ``target``, a copy of ``source`` whose matrices are blocks of ``kind``, where their rows consist of whole
    ones (else of q8_0). Norms, biases and routers stay. Metadata are copied.

    Raises:
        FormatError: ``source`` is no GGUF file, or damaged.
        DTypeError: a type that values are not quantized to.
        Unavailable: the package ``gguf`` is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise Unavailable("GGUF files are written by the package gguf", remedy="pip install gguf") from None
    opened = open_model(source)
    if opened.tokenizer_json is not None or source.is_dir():
        raise FormatError(f"{source} is no GGUF file; a folder is quantized while it is loaded (--quantize)")
    wanted = ow.as_dtype(kind)
    writer = gguf.GGUFWriter(target, opened.metadata["general.architecture"])
    reader = gguf.GGUFReader(source)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for name in shown(list(opened.tensors), "quantizing"):
        value: Any = opened.tensors[name]
        chosen = block_type(name, value, wanted)
        if chosen is not None and ow.as_dtype(value.dtype) != chosen:
            floats = ow.dequantize(value) if isinstance(value, ow.Blocks) else value
            value = ow.quantize(np.asarray(floats, np.float32), chosen)
        if isinstance(value, ow.Blocks):
            raw = np.frombuffer(value.data, np.uint8)
            rows = raw.reshape(*value.shape[:-1], nbytes_of(value) // int(np.prod(value.shape[:-1])))
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[str(value.dtype).upper()])
        else:
            kept = np.asarray(value)
            writer.add_tensor(name, kept if kept.dtype in (np.float32, np.float16) else kept.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
