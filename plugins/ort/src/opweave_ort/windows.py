"""Windows of a dense value (slices, transposes, broadcasts of it, in any order) as ONNX's operators."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from opweave.graph.layout import Shape, Strides
from opweave_ort.model import Model

__all__ = ["Window", "cover", "show"]


class Window(NamedTuple):
    """A window of a dense value, in elements: where it begins, its shape, and its stride along each axis."""

    offset: int
    shape: Shape
    strides: Strides

    @property
    def lead(self) -> Shape:
        """The shape without repetitions: 1 where the stride is 0."""
        return tuple([1 if not s else n for n, s in zip(self.shape, self.strides, strict=True)])


def cover(window: Window) -> Shape | None:
    """The shape of the dense array that begins with the window's first element and contains it, such that `show` cuts
    the window out by slices; ``None`` if there is none. It may end behind the window's last element."""
    strides = sorted({s for n, s in zip(window.shape, window.strides, strict=True) if n > 1 and s}, reverse=True)
    lengths = {s: n for n, s in zip(window.shape, window.strides, strict=True) if n > 1}
    if sum(n > 1 and s > 0 for n, s in zip(window.shape, window.strides, strict=True)) > len(strides):
        return None  # two axes of equal stride overlap
    shape = []
    outer = None
    for stride in strides:
        if outer is None:
            shape.append(lengths[stride])
        elif outer % stride or lengths[stride] > outer // stride:
            return None
        else:
            shape.append(outer // stride)
        outer = stride
    if outer is not None and outer > 1:
        shape.append(outer)
    return tuple(shape)


def show(model: Model, value: str, have: Shape, window: Window) -> str:
    """Cut the window out of a dense value of shape ``have``. The result has the shape `Window.lead`."""
    lead = window.lead
    axes = [i for i, n in enumerate(lead) if n > 1]
    if not axes:
        if prod(have) > 1:
            value = model("Slice", model.reshape(value, (prod(have),)), model.integers(window.offset),
                          model.integers(window.offset + 1), model.integers(0))  # fmt: skip
        return value if have == lead else model.reshape(value, lead)
    order = sorted(axes, key=lambda i: -window.strides[i])
    cuts = (_cut(prod(have), units, window, order) for units in _chains(have, [window.strides[i] for i in order]))
    cut = next((found for found in cuts if found is not None), None)
    if cut is None:
        return _gathered(model, value, have, window)
    base, starts, stops, steps, kept = cut
    if base != have:
        value = model.reshape(value, base)
    sliced = [i for i, n in enumerate(base) if (starts[i], stops[i], steps[i]) != (0, n, 1)]
    if sliced:
        value = model(
            "Slice",
            value,
            *[model.integers(*[values[i] for i in sliced]) for values in (starts, stops)],
            model.integers(*sliced),
            model.integers(*[steps[i] for i in sliced]),
        )
    # The axes of the base that no axis of the window runs along have length 1 now.
    shape = tuple([lead[order[kept.index(i)]] if i in kept else 1 for i in range(len(base))])
    if order == sorted(order):
        return value if shape == lead else model.reshape(value, lead)
    plain = tuple([lead[i] for i in order])
    if shape != plain:
        value = model.reshape(value, plain)
    value = model("Transpose", value, perm=[order.index(i) for i in sorted(order)])
    return value if len(order) == len(lead) else model.reshape(value, lead)


def _chains(have: Shape, strides: list[int]) -> Iterator[list[int]]:
    """Lists of strides, largest first, of axes into which the value may be divided: each divides the one before."""
    own, stride = {1}, 1
    for n in reversed(have):
        own.add(stride)
        stride *= n
    for candidates in (own | {*strides}, {1, *strides}, own):
        chain: list[int] = []
        for unit in sorted(candidates, reverse=True):
            if (chain[-1] if chain else stride) % unit == 0:
                chain.append(unit)
        yield chain


def _cut(
    total: int, units: list[int], window: Window, order: list[int]
) -> tuple[Shape, list[int], list[int], list[int], list[int]] | None:
    """Shape, starts, stops, steps and the axes that the window's axes, in their order, run along; ``None`` if an axis
    leaves its range."""
    around = [total, *units[:-1]]
    base = tuple([a // u for a, u in zip(around, units, strict=True)])
    starts, rest = [], window.offset
    for unit in units:
        starts.append(rest // unit)
        rest %= unit
    stops, steps, kept = [s + 1 for s in starts], [1] * len(units), []
    for axis in order:
        stride, n = window.strides[axis], window.shape[axis]
        at = next((i for i, unit in enumerate(units) if stride % unit == 0 and unit <= stride and i not in kept), None)
        if at is None:
            return None
        step = stride // units[at]
        starts_at = starts[at]
        stops[at], steps[at] = starts_at + (n - 1) * step + 1, step
        if stops[at] > base[at]:
            return None
        kept.append(at)
    if kept != sorted(kept):
        return None
    return base, starts, stops, steps, kept


def _gathered(model: Model, value: str, have: Shape, window: Window) -> str:
    """A window that slices cannot cut out, such as a diagonal: by the index of each element."""
    ids = np.full(window.lead, window.offset, np.int64)
    for axis, (n, stride) in enumerate(zip(window.lead, window.strides, strict=True)):
        ids += (np.arange(n) * stride).reshape(-1, *[1] * (len(window.lead) - 1 - axis))
    return model("Gather", model.reshape(value, (prod(have),)), model.constant(ids), axis=0)
