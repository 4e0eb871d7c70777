"""``opweave weights``: lists the tensors of a file or folder of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from rich.text import Text

from opweave.cli.output import Row, print_json, print_rows, quiet_stdout
from opweave.errors import FormatError
from opweave.formats.load import chosen_names, described, read_tensors
from opweave.graph.dtypes import DTYPES
from opweave.registry.discovery import core_version
from opweave.units import human_bytes

__all__ = ["show_weights"]

_FEW: Final = 8
"""Entries of an array of metadata that are shown."""


def show_weights(path: str, names: Sequence[str], *, as_json: bool) -> None:
    """Print name, dtype, shape and bytes of each tensor whose name matches one of the patterns (none: of all).

    Raises:
        FormatError: the file is damaged, not of its format, or cannot be read.
        UnknownNameError: nobody reads its format, or a pattern matches no name.
    """
    with quiet_stdout():
        try:
            found = read_tensors(path)
        except OSError as error:
            raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
        tensors = {name: described(found, name) for name in chosen_names(found, names or "*")}
        metadata = getattr(found, "metadata", {})
    total = sum(stored.nbytes for stored in tensors.values())
    if as_json:
        listed = [
            {"name": name, "dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes, "supported": t.dtype in DTYPES}
            for name, t in tensors.items()
        ]
        print_json({"opweave": core_version(), "path": path, "metadata": {k: _plain(v) for k, v in metadata.items()},
                    "tensors": listed, "bytes": total})  # fmt: skip
        return
    rows = [
        Row([Text(name, "bold cyan"), Text(t.dtype, "" if t.dtype in DTYPES else "yellow"),
             Text("×".join(map(str, t.shape)) or "-"), Text(human_bytes(t.nbytes))], [])
        for name, t in tensors.items()
    ]  # fmt: skip
    kinds = Counter(t.dtype for t in tensors.values())
    summary = [f"{len(tensors)} tensors, {human_bytes(total)}: "
               + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())]  # fmt: skip
    if others := sorted(kinds.keys() - DTYPES.keys()):
        summary.append(f"not types of opweave: {', '.join(others)}")
    summary += [f"{key}: {_short(value)}" for key, value in metadata.items()]
    print_rows(["tensor", "dtype", "shape", "bytes"], rows, indent=3, footer="\n".join(summary))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _short(value: Any) -> str:
    if isinstance(value, (list, np.ndarray)) and len(value) > _FEW:
        return f"{_plain(value[:_FEW])} and {len(value) - _FEW:,} more"
    text = str(_plain(value))
    return text if len(text) <= 400 else f"{text[:400]}..."
