"""Sequences, which are lists of values while a graph is traced, and optional values."""

from __future__ import annotations

from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import BoundsError, ShapeError
from opweave_onnx.operators.movement import axis_of
from opweave_onnx.operators.table import operator
from opweave_onnx.trace import Call


@operator("SequenceEmpty", raw=True)
def _empty(call: Call) -> list[Any]:
    return []


@operator("SequenceConstruct", raw=True)
def _construct(call: Call, *inputs: Any) -> list[Any]:
    return list(inputs)


def _place(call: Call, position: Any, n: int) -> int:
    at = int(call.known(position).reshape(()))
    if not -n <= at < n:
        raise BoundsError(f"position {at} in a sequence of {n}")
    return at % n


@operator("SequenceAt", raw=True)
def _at(call: Call, sequence: Any, position: Any) -> Any:
    return sequence[_place(call, position, len(sequence))]


@operator("SequenceInsert", raw=True)
def _insert(call: Call, sequence: Any, value: Any, position: Any = None) -> list[Any]:
    n = len(sequence)
    at = n if position is None else int(call.known(position).reshape(()))
    at = n if at == n else _place(call, np.array(at), n)
    return [*sequence[:at], value, *sequence[at:]]


@operator("SequenceErase", raw=True)
def _erase(call: Call, sequence: Any, position: Any = None) -> list[Any]:
    at = len(sequence) - 1 if position is None else _place(call, position, len(sequence))
    return [*sequence[:at], *sequence[at + 1 :]]


@operator("SequenceLength", raw=True)
def _length(call: Call, sequence: Any) -> Any:
    return np.array(len(sequence), np.int64)


@operator("ConcatFromSequence", raw=True)
def _concat(call: Call, sequence: Any) -> Any:
    if not sequence:
        raise ShapeError("the sequence is empty; its elements give the shape of the result")
    axis, new = call.get("axis", 0), call.get("new_axis", 0)
    first = sequence[0]
    at = axis_of(first, axis, len(first.shape) + bool(new))
    if all(isinstance(v, np.ndarray) for v in sequence):
        return np.stack(sequence, at) if new else np.concatenate(sequence, at)
    tensors = [call.tensor(v) for v in sequence]
    return ow.concat([ow.expand_dims(v, at) for v in tensors] if new else tensors, at)


@operator("SplitToSequence", raw=True)
def _split(call: Call, x: Any, sizes: Any = None) -> list[Any]:
    y = call.tensor(x)
    axis = axis_of(y, call.get("axis", 0))
    n = y.shape[axis]
    if sizes is None:
        parts = list(ow.split(y, [1] * n, axis))
        return parts if call.get("keepdims", 1) else [ow.squeeze(p, axis) for p in parts]
    given = call.known(sizes)
    each = int(given.reshape(-1)[0]) if not given.shape else 0
    lengths = [int(v) for v in given] if given.shape else [min(each, n - i) for i in range(0, n, each)]
    return list(ow.split(y, lengths, axis))


@operator("SequenceMap", raw=True)
def _map(call: Call, sequence: Any, *others: Any) -> Any:
    rows = [
        call.inline(call.node.attributes["body"], element, *[v[i] if isinstance(v, list) else v for v in others])
        for i, element in enumerate(sequence)
    ]
    return tuple([list(column) for column in zip(*rows, strict=True)]) or tuple([[] for _ in call.node.outputs])


# --- optional values ------------------------------------------------------------------------------------------------


@operator("Optional", raw=True)
def _optional(call: Call, value: Any = None) -> Any:
    return value


@operator("OptionalHasElement", raw=True)
def _has_element(call: Call, value: Any = None) -> Any:
    return np.array(value is not None)


@operator("OptionalGetElement", raw=True)
def _get_element(call: Call, value: Any = None) -> Any:
    if value is None:
        raise call.refuse("the optional value is not there")
    return value
