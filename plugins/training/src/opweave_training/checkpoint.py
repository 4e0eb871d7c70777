"""Checkpoints: one safetensors file with everything that a training needs to go on as if it had never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import get_ident
from typing import IO, Any, Final

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from opweave.errors import CheckpointError
from opweave.graph.dtypes import DTYPES
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import read_leaf, write_state

__all__ = ["check_writable", "restore", "write_checkpoint"]

_NAMES: Final = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8",
    "u8": "U8", "bool": "BOOL",
}  # fmt: skip
"""dtypes as the format calls them."""


def write_checkpoint(path: str | os.PathLike[str], states: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write states and facts. Whoever reads ``path`` finds the file that was there or the new one, never a part: the
    name passes to it after it was written and synced.

    Args:
        path: of the file.
        states: name -> state.
        facts: what JSON can hold.

    Raises:
        CheckpointError: the file cannot be written.
    """
    target = Path(path)
    arrays = {name: read_leaf(tensor) for name, tensor in states.items()}
    text = json.dumps(dict(facts))
    checksum = _checksum(text, {name: array.tobytes() for name, array in arrays.items()})
    data = save(arrays, {"opweave": text, "checksum": checksum})
    try:
        with _in_place_of(target) as file:
            file.write(data)
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {target} cannot be written: {error}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise what `write_checkpoint` would for want of the package, or of a folder to write to."""
    target = Path(path)
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        why = "it is a folder" if target.is_dir() else "its folder is missing, or may not be written to"
        raise CheckpointError(f"the checkpoint {target} cannot be written: {why}")


@contextmanager
def _in_place_of(target: Path) -> Iterator[IO[bytes]]:
    """A new file that is synced and takes the place of ``target`` at the end of the block, unless the block fails.
    Until then it has no name, where the system knows such files: nothing is left of it if the process is killed."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.{get_ident()}")
    try:
        handle = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except (AttributeError, OSError):
        handle = None
    try:
        with open(beside if handle is None else handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if handle is not None:
                beside.unlink(missing_ok=True)
                # src_dir_fd, which an absolute path ignores, makes Python follow the link to the file.
                os.link(f"/proc/self/fd/{handle}", beside, src_dir_fd=handle)
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _checksum(text: str, contents: Mapping[str, bytes]) -> str:
    """A digest of the facts and of all arrays: the format itself checks lengths, not contents."""
    digest = blake2b(text.encode(), digest_size=16)
    for name in sorted(contents):
        digest.update(name.encode())
        digest.update(contents[name])
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that the new name of a file in it survives a crash, where the system can do that."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def restore(
    path: str | os.PathLike[str], states: Mapping[str, Tensor], structure: str, sums: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Set states to what a checkpoint holds and return its facts. Nothing is set unless everything fits.

    Args:
        path: of the file.
        states: name -> state.
        structure: what the fact ``"structure"`` has to be.
        sums: name -> state that becomes 0 if the checkpoint does not hold it.

    Raises:
        CheckpointError: the file is missing, damaged, or of another training.
    """
    try:
        data = Path(path).read_bytes()
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        facts: dict[str, Any] = json.loads(metadata["opweave"])
        if metadata["checksum"] != _checksum(metadata["opweave"], {n: e["data"] for n, e in found.items()}):
            raise ValueError("its contents do not have their checksum")
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {type(error).__name__}: {error}") from error
    known = {**states, **(sums or {})}
    if extra := sorted(found.keys() - known):
        raise CheckpointError(f"the checkpoint {path} has {extra[0]!r}, which this training does not")
    arrays = {}
    for name, tensor in known.items():
        entry = found.get(name)
        if entry is None and name not in states:
            arrays[name] = np.zeros(tensor.shape, tensor.dtype.numpy)
            continue
        if entry is None or tuple(entry["shape"]) != tensor.shape or entry["dtype"] != _NAMES[tensor.dtype.name]:
            there = "nothing" if entry is None else f"{entry['dtype']}{list(entry['shape'])}"
            raise CheckpointError(f"the checkpoint {path} has {there} for {name!r}, which is {tensor.describe()}")
        arrays[name] = np.frombuffer(bytearray(entry["data"]), DTYPES[tensor.dtype.name].numpy).reshape(tensor.shape)
    if facts.get("structure") != structure:
        raise CheckpointError(f"the checkpoint {path} is of another training: its optimizer, options or data differ")
    for name, tensor in known.items():
        write_state(tensor, arrays[name])
    return facts
