"""The formats that the core reads, returned by the same hook as those of plugins. The registry imports this module by
its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opweave.registry import FileFormat, hookimpl


@hookimpl(trylast=True)  # a plugin that reads the same files comes first
def opweave_formats() -> Iterable[FileFormat]:
    return [
        FileFormat("safetensors", (".safetensors",), load_weights=_safetensors),
        FileFormat("GGUF", (".gguf",), load_weights=_gguf, magic=b"GGUF"),
        # Also by its suffix, so that its reader reports what is wrong with the first bytes of such a file.
        FileFormat("GGUF", (".gguf",), load_weights=_gguf),
    ]


def _safetensors(path: Path) -> Mapping[str, Any]:
    from opweave.formats.safetensors import read_safetensors

    return read_safetensors(path)


def _gguf(path: Path) -> Mapping[str, Any]:
    from opweave.formats.gguf import read_gguf

    return read_gguf(path)
