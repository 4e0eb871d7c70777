"""The formats that the core reads, returned by the same hook as those of plugins. The registry imports this module by
its name."""

from __future__ import annotations

from collections.abc import Iterable

from opweave.formats.gguf import read_gguf
from opweave.formats.safetensors import read_safetensors
from opweave.registry import FileFormat, hookimpl


@hookimpl(trylast=True)  # a plugin that reads the same files comes first
def opweave_formats() -> Iterable[FileFormat]:
    return [
        FileFormat("safetensors", (".safetensors",), load_weights=read_safetensors),
        FileFormat("GGUF", (".gguf",), load_weights=read_gguf, magic=b"GGUF"),
        # Also by its suffix, so that its reader reports what is wrong with the first bytes of such a file.
        FileFormat("GGUF", (".gguf",), load_weights=read_gguf),
    ]
