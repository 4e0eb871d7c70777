"""`load_weights`: weights from files of any format that the core or a plugin reads."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from opweave import registry
from opweave.errors import DTypeError, FormatError, OpweaveError, UnknownNameError
from opweave.formats.folder import INDEX, SeveralFiles, read_folder, read_index, read_model
from opweave.formats.tensor_file import StoredTensor, TensorFile
from opweave.graph.arrays import host_array
from opweave.graph.blocks import Blocks
from opweave.graph.dtypes import DTYPES, DTypeLike, as_dtype
from opweave.graph.leaf import Spec
from opweave.graph.tensor import Tensor
from opweave.leaves import OptionalPattern, Weights, Where, weights

__all__ = ["chosen_names", "described", "load_weights", "read_tensors"]

Names = str | Sequence[str]

FLOAT8: Final = (DTYPES["f8_e4m3"], DTYPES["f8_e5m2"], DTYPES["f8_e8m0"])
"""Floats of 8 bits in files of quantized models. bf16 holds every value of theirs."""


def load_weights(
    path: str | os.PathLike[str],
    device: Where | Mapping[str, Where] = None,
    *,
    names: Names = "*",
    dtype: DTypeLike | None = None,
) -> Weights:
    """Weights from a file or folder: `opweave.weights` of the arrays that are in it.

    Files are mapped: devices that compute in host memory use the bytes where they lie, others get them when they are
    uploaded, and what no program uses is never read. So a file must not be changed as long as programs use it. Shapes
    are row-major, those of GGUF too (which lists axes the other way round). Quantized tensors stay quantized.

    Args:
        path: a file of safetensors or GGUF, or of a format that a plugin reads (the hook ``opweave_formats``); an index
            (``*.safetensors.index.json``) or a folder with one: the tensors that it names, with an `OpweaveWarning`
            where its files have others; any other folder: those of all files of weights in it. One file of a model in
            several (``m-00001-of-00003.gguf``) stands for all.
        device: where to keep them; a device, or glob patterns, as of `opweave.weights`.
        names: a glob pattern, or several: only tensors whose name matches one of them.
        dtype: as of `opweave.weights`. Tensors of f8_e4m3, f8_e5m2 and f8_e8m0 need it, because no device but ``host``
            computes in these types. bf16 holds every value of theirs.

    Returns:
        The weights in the order of the file. Their ``metadata`` is what the file contains besides tensors: a dict of
        texts (safetensors); of numbers, bools, texts, lists of texts and NumPy arrays (GGUF).

    Raises:
        FormatError: a file that is damaged, cut off or not of its format; an index that names what is not there; two
            files of a folder with a tensor of one name; a model in several files of which some are not there, or whose
            files say something else about their count, their numbers or the count of tensors.
        UnknownNameError: no such device, a format that neither the core nor a plugin reads, or a pattern that matches
            no name.
        DTypeError: a type that opweave does not have, or one of the floats of 8 bits without ``dtype``: the message
            names tensor and type; or ``path`` or ``names`` is no text.
        ShapeError: a tensor of more than 8 axes.
        AllocationError: a device has not enough free memory; nothing stays allocated.
        OSError: the file is not there, or cannot be read.
    """
    found = read_tensors(path)
    arrays = {name: _wide(path, name, found[name], dtype) for name in chosen_names(found, names)}
    made = weights(arrays, device, dtype=dtype)
    made.metadata = getattr(found, "metadata", {})
    return made


def read_tensors(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The tensors of a file or folder, found as `load_weights` does it.

    Returns:
        Name -> array, `Blocks` or whatever else `opweave.weights` takes. From the readers of the core it has the
        attribute ``metadata``.

    Raises:
        FormatError, UnknownNameError, OSError: as `load_weights`.
        DTypeError: ``path`` is no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise DTypeError(f"weights are loaded from a path, not from {type(path).__name__}")
    place = Path(path)
    if place.name.endswith(INDEX) and not place.is_dir():
        return read_index(place, _read_file)
    return read_folder(place, _read_file, _is_weights) if place.is_dir() else read_model(place, _read_file)


def _read_file(path: Path) -> Mapping[str, Any]:
    known = registry.REGISTRY.file_format(path)
    if known.load_weights is None:
        raise FormatError(f"{path}: files of {known.name} contain no weights")
    try:
        found = known.load_weights(path)
    except (OpweaveError, OSError):
        raise
    except Exception as error:  # the reader of a plugin
        raise FormatError(f"{path}: reading it as {known.name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise FormatError(f"{path}: the reader of {known.name} gave {type(found).__name__}, no mapping of names")
    return found


def _is_weights(path: Path) -> bool:
    with suppress(UnknownNameError):
        return registry.REGISTRY.file_format(path).load_weights is not None
    return False


def chosen_names(found: Collection[str], patterns: Names) -> list[str]:
    """The names that match one of the patterns, in the order of ``found``. Raises `UnknownNameError` for a pattern that
    matches none, `DTypeError` for a pattern that is no text."""
    wanted = list(patterns) if isinstance(patterns, Collection) and not isinstance(patterns, str) else [patterns]
    if not all(isinstance(pattern, str) for pattern in wanted):
        raise DTypeError(f"names= takes a glob pattern or several, not {patterns!r:.80}")
    for pattern in wanted:
        if found and not isinstance(pattern, OptionalPattern) and not any(fnmatchcase(n, pattern) for n in found):
            raise UnknownNameError("tensor", pattern, found, "It is a pattern of names, and matches none.")
    return [name for name in found if any(fnmatchcase(name, pattern) for pattern in wanted)]


def described(found: Mapping[str, Any], name: str) -> StoredTensor:
    """Dtype, shape and place of a tensor, also of one whose type opweave does not have. Files of the core's formats are
    not read for it. The offset is -1 where it is not known."""
    if isinstance(found, SeveralFiles):
        return described(found.parts[name], name)
    if isinstance(found, TensorFile):
        return found.tensors[name]
    value = found[name]
    if isinstance(value, Blocks):
        return StoredTensor(str(value.dtype), tuple(value.shape), -1, value.data.nbytes)
    if not isinstance(value, (Tensor, Spec)):
        value = host_array(value, copy=False)
    dtype = as_dtype(value.dtype)
    return StoredTensor(dtype.name, tuple(value.shape), -1, getattr(value, "nbytes", 0))


def _wide(path: str | os.PathLike[str], name: str, value: Any, dtype: DTypeLike | None) -> Any:
    """The value; of `FLOAT8` its copy in ``dtype``."""
    kind = next((known for known in FLOAT8 if getattr(value, "dtype", None) == known.numpy), None)
    if kind is None:
        return value
    if dtype is None:
        raise DTypeError(
            f"{os.fspath(path)}: tensor {name!r} is {kind}, in which only the device host computes; dtype='bf16' "
            "converts it without loss"
        )
    return value.astype(as_dtype(dtype).numpy)
