"""Attributes of operations as JSON's types, and back: None, bool, int, float, str, tuples, slices and dtypes.

Numbers, texts and None are written as they are, tuples as lists. What JSON does not have is an object of one entry:
``{"float": "nan"}``, ``{"dtype": "f32"}``, ``{"slice": [start, stop, step]}``. Equal attributes in equal order give
equal JSON, which therefore also serves as a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from opweave.errors import FormatError, SchedulerError
from opweave.graph.dtypes import DTYPES, DType

__all__ = ["decode_attrs", "encode_attrs"]

_MOST_NESTED: Final = 8


def encode_attrs(attrs: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Attributes as JSON's types.

    Args:
        of: what they belong to, for messages.

    Raises:
        SchedulerError: a value of another type, such as the function of `opweave.custom`.
    """
    return {name: _encode(value, name, of) for name, value in attrs.items()}


def _encode(value: Any, name: str, of: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if isfinite(value) else {"float": str(value)}
    if type(value) is tuple:
        return [_encode(v, name, of) for v in value]
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, slice):
        return {"slice": [_encode(v, name, of) for v in (value.start, value.stop, value.step)]}
    hint = (
        "make the function an operation (ow.define_op) in a module that both sides import"
        if callable(value)
        else "operations that are saved have attributes of None, bool, int, float, str, tuples, slices and dtypes"
    )
    raise SchedulerError(f"{of} cannot be saved: its attribute {name!r} is {value!r:.80}; {hint}")


def decode_attrs(encoded: Any) -> dict[str, Any]:
    """The attributes that `encode_attrs` encoded, with tuples for lists.

    Raises:
        FormatError: values that `encode_attrs` does not make, integers of more than 64 bits, more than 8 nested lists.
    """
    if not isinstance(encoded, dict):
        raise FormatError(f"attributes are an object, not {encoded!r:.60}")
    return {name: _decode(value, 0) for name, value in encoded.items()}


def _decode(value: Any, depth: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
        raise FormatError("an attribute is an integer of more than 64 bits")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < _MOST_NESTED and isinstance(value, list):
        return tuple([_decode(v, depth + 1) for v in value])
    match value:
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {"dtype": str(name), **rest} if not rest and name in DTYPES:
            return DTYPES[name]
        case {"slice": [start, stop, step], **rest} if not rest and depth < _MOST_NESTED:
            return slice(*[_decode(v, depth + 1) for v in (start, stop, step)])
    raise FormatError(f"an attribute is {value!r:.60}, which stands for nothing")
