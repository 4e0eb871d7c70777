"""A group of steps apart from its memory (`Structure`): sources, nodes, and which windows of them operands are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, NamedTuple

import numpy as np

from opweave.contract import Arg, Group, Step, Usage
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OPS
from opweave.graph.precision import Precision
from opweave_ort.kernels import KERNELS
from opweave_ort.kernels.indexing import WRITES_OVER
from opweave_ort.limits import limit
from opweave_ort.weights import Form, Piece, form_of, pieces
from opweave_ort.windows import Window, cover

__all__ = [
    "PRODUCTS",
    "Bound",
    "Node",
    "Source",
    "Structure",
    "dense_window",
    "is_within",
    "structure_of",
    "whole_of",
    "writes",
]


PRODUCTS: Final = frozenset({"linear", "matmul"})
"""Operations whose second operand ONNX Runtime packs, if it is a weight of a session."""


CUT_BYTES: Final = limit("cut_bytes", 1 << 20, 1, 1 << 24)
"""Parts of weights up to this size are cut out in the model, of which ONNX Runtime keeps a copy; larger ones are
weights of their own."""


class Source(NamedTuple):
    """An input of a structure: an operand, as a dense array that begins at its first element.

    Attributes:
        dtype, shape: of the array.
        weight: identity of the weight that the session holds, ``None`` for what is bound for each plan.
        form: that of a quantized weight; ``""`` for others.
    """

    dtype: DType
    shape: Shape
    weight: Hashable = None
    form: Form = ""

    @property
    def pieces(self) -> list[Piece]:
        """The arrays that it consists of: one, or those of a repacked weight."""
        if self.form:
            return pieces(self.dtype, self.shape, self.form)
        return [Piece("", self.dtype, self.shape)]


class Node(NamedTuple):
    """A step in a structure.

    Attributes:
        op, attrs: as those of the step.
        dtype, shape: of its result; of the region, where it writes.
        operands: for each operand the number of its value (sources first, then the results of nodes) and its window.
            The region that is written over comes first (`WRITES_OVER`).
        live: whether the result is an output.
        precision: the one in which its kernel computes.
    """

    op: str
    attrs: tuple[tuple[str, Any], ...]
    dtype: DType
    shape: Shape
    operands: tuple[tuple[int, Window], ...]
    live: bool
    precision: Precision = "exact"


class Structure(NamedTuple):
    """What a group computes: equal structures share a session."""

    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]


class Bound(NamedTuple):
    """A structure with its memory.

    Attributes:
        sources: the operand of each source.
        staged: for each source whether its operand is copied before each run: those that are not dense and in no dense
            array, and those whose bytes the group overwrites.
        outputs: the operands of the live results.
    """

    structure: Structure
    sources: list[Arg]
    staged: list[bool]
    outputs: list[Arg]


def structure_of(group: Group) -> Bound:
    """What a group consists of, and its operands in memory."""
    return _Finder(group).bound()


class _Finder:
    """Numbers the sources and results of a group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sources: list[Source] = []
        self.args: list[Arg] = []
        self.staged: list[bool] = []
        self._seen: dict[Any, tuple[int, Window]] = {}
        self._made: dict[int, tuple[int, Arg]] = {}  # value -> the number of its node, and where it lies
        self._written = [s.out for s in group.steps if writes(s)]
        self._packs = any(_packs(step) for step in group.steps)

    def bound(self) -> Bound:
        nodes: list[Node] = []
        for step in self.group.steps:
            precision = _precision(step)
            operands = [self._target(step.out)] if step.op in WRITES_OVER else []
            operands += [self._operand(arg, precision, step) for arg in step.srcs]
            attrs = tuple(sorted(step.attrs.items()))
            live = step.out.buffer is not None
            nodes.append(Node(step.op, attrs, step.out.dtype, step.out.shape, tuple(operands), live, precision))
            if step.out.value >= 0:
                self._made[step.out.value] = (len(nodes) - 1, step.out)
        # Results of nodes have negative numbers until all sources are known.
        count = len(self.sources)
        nodes = [
            n._replace(operands=tuple([(k if k >= 0 else count - 1 - k, window) for k, window in n.operands]))
            for n in nodes
        ]
        outputs = [step.out for step in self.group.steps if step.out.buffer is not None]
        return Bound(Structure(tuple(self.sources), tuple(nodes)), self.args, self.staged, outputs)

    def _operand(self, arg: Arg, precision: Precision, step: Step) -> tuple[int, Window]:
        made = self._made.get(arg.value)
        if made is not None and is_within(arg, made[1]):
            number, out = made
            return -1 - number, _window(arg, (arg.offset - out.offset) // out.dtype.itemsize)
        form: Form = form_of(arg.dtype, precision) if arg.dtype.is_quantized else ""
        if step.op == "cast" and step.out.buffer is not None and _identity(arg) is not None:
            return self._enter(arg, form, keeps=False)  # of a weight, a session would keep the result, too
        whole = None if step.op in PRODUCTS or form else self._weight_around(arg)
        if whole is not None:
            number, _ = self._entered(whole, form)
            return number, _window(arg, (arg.offset - whole.offset) // arg.dtype.itemsize)
        return self._entered(arg, form)

    def _weight_around(self, arg: Arg) -> Arg | None:
        """All of the weight that an operand is a small part of. Which part may depend on the sizes of a program."""
        for i in self.group.constant:
            read = self.group.reads[i]
            if read.buffer is arg.buffer and read.dtype is arg.dtype and is_within(arg, read):
                return read if _identity(read) is not None and arg.nbytes <= CUT_BYTES.value else None
        return None

    def _entered(self, arg: Arg, form: Form) -> tuple[int, Window]:
        key = (id(arg.buffer), arg.offset, arg.dtype, arg.shape, arg.strides, form)
        if key not in self._seen:
            overwritten = any(_overlap(arg, out) for out in self._written)
            self._seen[key] = self._enter(arg, form, overwritten, self._packs or len(arg.shape) > 1)
        return self._seen[key]

    def _target(self, arg: Arg) -> tuple[int, Window]:
        """The region that a step writes over, which is read where it is written."""
        return self._enter(arg, "")

    def _enter(self, arg: Arg, form: Form, overwritten: bool = False, keeps: bool = True) -> tuple[int, Window]:
        window = _window(arg, 0)
        shape = None if overwritten else whole_of(arg)
        if shape is None:
            shape = window.lead
            window = Window(0, window.shape, dense_window(shape, window.strides))
        self.staged.append(overwritten or whole_of(arg) is None)
        self.sources.append(Source(arg.dtype, shape, _identity(arg) if keeps and not overwritten else None, form))
        self.args.append(arg)
        return len(self.sources) - 1, window


def _packs(step: Step) -> bool:
    """Whether a session may pack a weight for a step. Others get scales and biases as inputs, so that layers share
    them."""
    op = OPS.get(step.op)
    return op is not None and op.product and any(_identity(arg) is not None for arg in step.srcs)


def writes(step: Step) -> bool:
    """Whether a step writes into a state."""
    op = OPS.get(step.op)
    return op is not None and op.writes


def is_within(arg: Arg, out: Arg) -> bool:
    """Whether the bytes of a window are among those of another one of the same value."""
    return out.offset <= arg.offset and arg.offset + arg.span <= out.offset + out.span


def _overlap(a: Arg, b: Arg) -> bool:
    return a.address < b.address + b.span and b.address < a.address + a.span


def _precision(step: Step) -> Precision:
    """The precision that the kernel of a step computes in."""
    kernel = KERNELS.find(step)
    return "exact" if kernel is None else kernel.precision


def _window(arg: Arg, offset: int) -> Window:
    if arg.dtype.is_quantized:
        return Window(0, arg.shape, arg.strides)
    size = arg.dtype.itemsize
    strides = tuple([0 if n == 1 else s // size for n, s in zip(arg.shape, arg.strides, strict=True)])
    return Window(offset, arg.shape, strides)


def dense_window(shape: Shape, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense array of that shape, but 0 where the given ones are 0."""
    result, stride = [], 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        result.append(stride if s else 0)
        stride *= n
    return tuple(reversed(result))


def whole_of(arg: Arg) -> Shape | None:
    """The shape of the dense array in memory that the operand is cut out of, if its buffer goes as far."""
    if arg.dtype.is_quantized:
        return arg.shape
    window = _window(arg, 0)
    lead = window.lead
    if window.strides == dense_window(lead, window.strides):
        return lead
    shape = cover(window)
    assert arg.buffer is not None
    if shape is None or arg.offset + int(np.prod(shape)) * arg.dtype.itemsize > arg.buffer.size:
        return None
    return shape


def _identity(arg: Arg) -> Hashable:
    """What tells a weight from others, ``None`` for operands that may change."""
    buffer = arg.buffer
    if buffer is None or buffer.usage is not Usage.WEIGHTS:
        return None
    return id(buffer), arg.offset, arg.strides
