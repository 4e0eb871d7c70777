"""`ways`: along which axes an operation can be computed in parts, and which parts of its sources each one needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from opweave.graph.tensor import Tensor

__all__ = ["SAME", "SUM", "Way", "ways"]

SUM: Final = -1
"""In `Way.out`: each part is a partial sum of the whole result."""

SAME: Final = -2
"""In `Way.srcs`: each part needs the part of its own device, however the source is cut, and all of one that is not."""


class Way(NamedTuple):
    """One way to compute a node in parts.

    Attributes:
        out: the axis of the result of which each computes a part, or `SUM`; of nodes that write a state that of the
            region.
        srcs: for each source the axis of which it needs the same part, ``None``: it needs all of it, or `SAME`.
    """

    out: int
    srcs: tuple[int | None, ...]


def ways(node: Tensor) -> Iterator[Way]:
    """All ways to compute a node in parts; none for operations that need everything at once."""
    assert node.op is not None
    if node.op.pointwise:
        for axis in range(node.ndim):
            yield Way(axis, (axis,) * len(node.srcs))
        return
    found = WAYS.get(node.op.name)
    if found is not None:
        yield from found(node)


# --- products -------------------------------------------------------------------------------------------------------


def _linear(node: Tensor) -> Iterator[Way]:
    x, _, *bias = node.srcs
    last = x.ndim - 1
    yield Way(last, (None, 0, *[0 for _ in bias]))
    yield Way(SUM, (last, 1, *[None for _ in bias]))
    for axis in range(last):
        yield Way(axis, (axis, None, *[None for _ in bias]))


def _matmul(node: Tensor) -> Iterator[Way]:
    n = node.ndim
    yield Way(n - 1, (None, n - 1))
    yield Way(SUM, (n - 1, n - 2))
    yield Way(n - 2, (n - 2, None))
    for axis in range(n - 2):
        yield Way(axis, (axis, axis))


def _attention(node: Tensor) -> Iterator[Way]:
    """Attention and its gradient, which has the gradient of the result as one more operand."""
    masked = node.attrs["masked"]
    plain = 3 + (node.op is not None and node.op.name == "attention_backward")
    rest = len(node.srcs) - plain
    if not node.attrs["max_bias"]:  # the slopes of ALiBi depend on the number of heads
        yield Way(1, (*(1,) * plain, *((1, 0) if masked else (0,))[:rest]))
    yield Way(0, (*(0,) * plain, *((0, None) if masked else (None,))[:rest]))


def _expert_linear(node: Tensor) -> Iterator[Way]:
    yield Way(2, (None, 1, None))
    yield Way(SUM, (2, 2, None))
    yield Way(SUM, (None, 0, None))  # each device computes the rows of its experts, and 0 for the others
    yield Way(0, (0, None, 0))


def _embedding(node: Tensor) -> Iterator[Way]:
    table, ids = node.srcs
    for axis in range(1, table.ndim):
        yield Way(ids.ndim + axis - 1, (axis, None))
    yield Way(SUM, (0, None))  # each device looks up the ids of its rows, and 0 for the others
    for axis in range(ids.ndim):
        yield Way(axis, (None, axis))


# --- writing a state ------------------------------------------------------------------------------------------------


def _index_copy(node: Tensor) -> Iterator[Way]:
    for axis in range(1, node.srcs[0].ndim):
        yield Way(axis, (axis, None, axis))


def _assign(node: Tensor) -> Iterator[Way]:
    for axis in range(node.srcs[0].ndim):
        yield Way(axis, (axis, axis))


# --- along rows -----------------------------------------------------------------------------------------------------


def _rows(node: Tensor) -> Iterator[Way]:
    """Operations over the last axis, whose further sources have the shape of the first one or belong to that axis."""
    x = node.srcs[0]
    for axis in range(x.ndim - 1):
        yield Way(axis, tuple([axis if s.shape == x.shape else None for s in node.srcs]))


def _head_softmax(node: Tensor) -> Iterator[Way]:
    x, _, *mask = node.srcs
    for axis in range(x.ndim - 1):
        if axis != x.ndim - 3:
            yield Way(axis, (axis, None, *[axis for _ in mask]))
        elif not node.attrs["max_bias"]:
            yield Way(axis, (axis, 0, *[axis for _ in mask]))


def _rope(node: Tensor) -> Iterator[Way]:
    x, positions, *factors = node.srcs
    shift = positions.ndim - (x.ndim - 1)  # sections have an axis of their own before
    for axis in range(x.ndim - 1):
        yield Way(axis, (axis, axis + shift, *[None for _ in factors]))


def _reduce(node: Tensor) -> Iterator[Way]:
    x, axes = node.srcs[0], node.attrs["axes"]
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    for out, axis in enumerate(kept):
        yield Way(out, (axis,))
    if node.op is not None and node.op.name == "sum":
        for axis in axes:
            yield Way(SUM, (axis,))


def _concat(node: Tensor) -> Iterator[Way]:
    for axis in range(node.ndim):
        if axis != node.attrs["axis"]:
            yield Way(axis, (axis,) * len(node.srcs))


# --- views ----------------------------------------------------------------------------------------------------------


def _transpose(node: Tensor) -> Iterator[Way]:
    for out, axis in enumerate(node.attrs["axes"]):
        yield Way(out, (axis,))


def _broadcast_to(node: Tensor) -> Iterator[Way]:
    x = node.srcs[0]
    shift = node.ndim - x.ndim
    for axis in range(x.ndim):
        if x.shape[axis] == node.shape[axis + shift]:
            yield Way(axis + shift, (axis,))


def _reshape(node: Tensor) -> Iterator[Way]:
    """Axes that begin groups of axes with equally many elements: cutting the first axis of a group cuts the other
    group at the same elements, if at whole steps of its first axis."""
    have, want = node.srcs[0].shape, node.shape
    if 0 in have:
        return
    i = j = 0
    while i < len(have) and j < len(want):
        first = i, j
        a, b = have[i], want[j]
        while a != b:
            if a < b:
                i += 1
                a *= have[i]
            else:
                j += 1
                b *= want[j]
        # Leading axes of length 1 have nothing to cut.
        x = next((k for k in range(first[0], i + 1) if have[k] > 1), None)
        y = next((k for k in range(first[1], j + 1) if want[k] > 1), None)
        if x is not None and y is not None:
            yield Way(y, (x,))
        i, j = i + 1, j + 1


def _slice(node: Tensor) -> Iterator[Way]:
    """Axes of which everything is kept."""
    axis = out = 0
    for key in node.attrs.get("key", ()):  # other windows than slices cannot be cut
        if key is None:
            out += 1
        elif isinstance(key, tuple):
            start, stop, step = key
            if (start, step) == (0, 1) and stop == node.srcs[0].shape[axis]:
                yield Way(out, (axis,))
            axis, out = axis + 1, out + 1
        else:
            axis += 1


def _after(node: Tensor) -> Iterator[Way]:
    """All axes; of what the others have to do first, each part waits for that of its own device."""
    for axis in range(node.ndim):
        yield Way(axis, (axis, *[SAME] * (len(node.srcs) - 1)))


WAYS: Final[dict[str, Callable[[Tensor], Iterator[Way]]]] = {
    "linear": _linear, "matmul": _matmul, "attention": _attention, "attention_backward": _attention,
    "expert_linear": _expert_linear, "embedding": _embedding, "head_softmax": _head_softmax, "rope": _rope,
    "concat": _concat, "index_copy": _index_copy, "assign": _assign, "accumulate": _assign,
    "transpose": _transpose, "broadcast_to": _broadcast_to, "reshape": _reshape, "slice": _slice, "after": _after,
    **dict.fromkeys((
        "softmax", "log_softmax", "layer_norm", "rms_norm", "l2_norm", "dequantize", "quantize", "softmax_backward",
        "log_softmax_backward", "layer_norm_backward", "rms_norm_backward",
    ), _rows),
    **dict.fromkeys(("sum", "prod", "mean", "max", "min", "var"), _reduce),
}  # fmt: skip
"""Operation -> its ways; those of elementwise operations are all axes."""
