"""Graphs from bytes that `opweave.graph.saving` made. The bytes are not trusted.

Every node is built by the shape rule of its operation. A node whose shape or dtype differs from the saved one, and a
view that reaches out of the bytes of its source, raise `FormatError`. Values of leaves are views of the given bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np

from opweave.errors import FormatError, SchedulerError, UnknownNameError
from opweave.graph.arrays import host_array
from opweave.graph.attribute_rules import check_attributes
from opweave.graph.attributes import decode_attrs
from opweave.graph.container import aligned, unpack
from opweave.graph.dtypes import DTYPES, DType, as_dtype, u8
from opweave.graph.layout import Shape, Strides, array_shape, check_shape, nbytes, span
from opweave.graph.leaf import Leaf, LeafKind
from opweave.graph.opdef import OPS
from opweave.graph.scope import SCOPE
from opweave.graph.tensor import Tensor, constant, input, new_leaf, node, view_node

__all__ = ["decode", "leaf_tensor"]

Array = np.ndarray[Any, Any]
_NEW: Final = "(being loaded)"
"""The scope of nodes that are made here, until they get their own; it tells them apart from nodes that lived before."""


def decode(data: Any, weights: Mapping[str, Any], leaves: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The outputs of a graph that was saved.

    Args:
        data: the bytes.
        weights: name -> tensor or array, for weights whose values were left out.
        leaves: the leaves of the graph in the order in which they were saved; ``None``: they are made from the bytes.

    Raises:
        FormatError: bytes that `opweave.graph.saving.encode` did not make.
        UnknownNameError: an operation that is not defined here, or a weight that ``weights`` lacks.
        SchedulerError: one of the weights has another shape or dtype than was saved.
    """
    header, raw = unpack(data)
    loader = _Loader(header, raw, weights, leaves)
    try:
        for row in _list(header.get("tensors"), dict):
            loader.add(row)
        return [loader.tensors[_number(i, len(loader.tensors))] for i in _list(header.get("outputs"), int)]
    except (FormatError, SchedulerError, UnknownNameError):
        raise
    # Shape rules expect attributes as builders make them, and raise any exception for others.
    except Exception as error:
        raise FormatError(f"the saved graph contradicts itself at tensor {len(loader.tensors)}: {error}") from error


def leaf_tensor(leaf: Leaf, shape: Shape, dtype: DType) -> Tensor:
    """The tensor around ``leaf``; for an input or a scalar constant the existing one, if an equal one lives."""
    if leaf.kind == "input":
        return input(leaf.name, shape, dtype, borrowed=leaf.borrowed)
    if leaf.kind == "constant" and leaf.data is not None and not shape:
        return constant(leaf.data)
    return new_leaf(leaf, check_shape(shape, dtype), dtype)


class _Loader:
    """Builds the tensors of one header, one after the other."""

    def __init__(
        self, header: dict[str, Any], raw: Array, weights: Mapping[str, Any], leaves: Sequence[Tensor] | None
    ) -> None:
        self.tensors: list[Tensor] = []
        self._sites = _list(header.get("sites"), str)
        self._buffers = _cut(raw, _list(header.get("buffers"), int))
        self._weights = weights
        self._leaves = None if leaves is None else iter(leaves)
        self._groups: dict[int, object] = {}

    def add(self, row: dict[str, Any]) -> None:
        dtype, shape = DTYPES[_text(row["dtype"])], tuple(_list(row["shape"], int))
        if "op" in row:
            made = self._node(row)
        elif self._leaves is not None:
            made = next(self._leaves)
        else:
            made = self._leaf(row, shape, dtype)
        # Compared as texts, because 2.0 and True equal 2 and 1 and are no lengths.
        if repr(made.shape) != repr(shape) or made.dtype is not dtype:
            raise FormatError(f"{made.describe()} was saved as {dtype}{list(shape)}")
        self.tensors.append(made)

    def _node(self, row: dict[str, Any]) -> Tensor:
        op = OPS.get(_text(row["op"]))
        if op is None:
            hint = "Import the module that defines it (ow.define_op) before the graph is loaded."
            raise UnknownNameError("operation", row["op"], OPS, hint)
        srcs = tuple([self.tensors[_number(i, len(self.tensors))] for i in _list(row["srcs"], int)])
        attrs = decode_attrs(row["attrs"])
        check_attributes(op, attrs, srcs)
        token = SCOPE.set(_NEW)
        try:
            if op.is_view:
                shape = check_shape(op.infer(*srcs, **attrs)[0], u8)
                made = view_node(op, srcs[0], attrs, shape, *_window(row, shape, srcs[0], attrs), srcs[1:])
            else:
                made = node(op, srcs, attrs)
        finally:
            SCOPE.reset(token)
        if made.scope is _NEW:  # else an equal node lived, which keeps its name
            self._describe(made, row)
        return made

    def _describe(self, made: Tensor, row: dict[str, Any]) -> None:
        made.scope, made.given_name = _text(row.get("scope", "")), _text(row.get("name", ""))
        made.built_at = self._sites[_number(row["site"], len(self._sites))]

    def _leaf(self, row: dict[str, Any], shape: Shape, dtype: DType) -> Tensor:
        kind: Any = _text(row["leaf"])
        name = _text(row["key"])
        array = self._array(row["data"], shape, dtype) if "data" in row else None
        if kind == "weight" and array is None and self._weights:
            return self._given(name, shape, dtype)
        if kind not in get_args(LeafKind):
            raise FormatError(f"there is no leaf of the kind {kind!r:.40}")
        leaf = Leaf(kind, name, array, borrowed=row.get("borrowed") is True)
        if kind == "state":
            leaf.fill = decode_attrs({"fill": row["fill"]})["fill"]
            if type(leaf.fill) not in (bool, int, float):
                raise FormatError(f"the state {name!r:.40} is filled with {leaf.fill!r:.40}, which is no number")
            host_array(leaf.fill, dtype, copy=False)  # which refuses what the dtype does not hold
            leaf.data = None if array is None else array.copy()
        if "group" in row:
            leaf.group = self._groups.setdefault(_number(row["group"], 1 << 32), object())
        made = leaf_tensor(leaf, shape, dtype)
        if made.leaf is leaf and kind != "input":
            self._describe(made, row)
        return made

    def _given(self, name: str, shape: Shape, dtype: DType) -> Tensor:
        if name not in self._weights:
            raise UnknownNameError("weight", name, self._weights)
        value = self._weights[name]
        if not isinstance(value, Tensor):
            array = host_array(value, copy=False)
            value = new_leaf(Leaf("weight", name, array), array.shape, as_dtype(array.dtype))
        if value.shape != shape or value.dtype is not dtype:
            raise SchedulerError(f"the weight {name!r} was saved as {dtype}{list(shape)}, not as {value.describe()}")
        return value

    def _array(self, number: Any, shape: Shape, dtype: DType) -> Array:
        raw = self._buffers[_number(number, len(self._buffers))]
        size = nbytes(check_shape(shape, dtype), dtype)
        if raw.nbytes != size:
            raise FormatError(f"{dtype}{list(shape)} takes {size:,} bytes, and {raw.nbytes:,} were saved")
        if dtype.kind == "b" and raw.size and raw.max() > 1:
            raise FormatError("the saved values of a bool are neither 0 nor 1")
        array = raw.view(dtype.numpy).reshape(array_shape(shape, dtype))
        return array if array.flags.aligned else array.copy()


# --- checks ---------------------------------------------------------------------------------------------------------


def _list(value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(type(v) is kind for v in value):
        raise FormatError(f"the saved graph has {value!r:.60} where a list of {kind.__name__} belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FormatError(f"the saved graph has {value!r:.60} where a text belongs")
    return value


def _number(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise FormatError(f"the saved graph refers to number {value!r:.60} of {below}")
    return value


def _cut(raw: Array, sizes: list[int]) -> list[Array]:
    """The buffers of the given numbers of bytes, one after the other."""
    buffers = []
    start = 0
    for size in sizes:
        if size < 0 or start + size > raw.size:
            raise FormatError(f"the saved graph is cut off: {size:,} bytes at {start:,} of {raw.size:,}")
        buffers.append(raw[start : start + size])
        start = aligned(start + size)
    return buffers


def _window(row: dict[str, Any], shape: Shape, source: Tensor, attrs: dict[str, Any]) -> tuple[Strides, int]:
    """Strides and offset of a view, which has to lie within the bytes of the root of its source."""
    saved, offset = row["window"]
    strides, item = tuple(_list(saved, int)), source.dtype.itemsize
    if row["op"] == "transpose":  # the strides of a transposed quantized matrix are no multiples of its blocks
        axes = attrs["axes"]
        fits = sorted(axes) == list(range(source.ndim)) and offset == source.offset
        fits = fits and strides == tuple([source.strides[a] for a in axes])
    else:
        check_shape(shape, source.dtype)
        fits = type(offset) is int and len(strides) == len(shape) and min((offset, *strides)) >= 0
        fits = fits and not any(n % item for n in (offset, *strides))
        fits = fits and (0 in shape or offset + span(shape, strides, source.dtype) <= source.root.nbytes)
    if not fits:
        raise FormatError(f"the view {row['op']} does not fit into {source.root.describe()}")
    return strides, offset
