"""A group of steps as an ONNX model: what it is made of (`Structure`), its model, its operands in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import onnxruntime

from opweave.contract import Arg, Call, Group, Step, Usage
from opweave.errors import UnsupportedOpError
from opweave.graph.dtypes import DType, f32, f64
from opweave.graph.layout import Shape, dense_strides, nbytes
from opweave.graph.precision import Precision
from opweave_ort.kernels import KERNELS
from opweave_ort.model import ONNX_TYPES, Model, Operand, computed
from opweave_ort.runtime import PACK_VARIABLE, RUNTIME, flag
from opweave_ort.sessions import SESSIONS, Session
from opweave_ort.weights import PACKED, Form, Piece, form_of, pack, pieces
from opweave_ort.windows import Window, cover, show

if TYPE_CHECKING:
    from opweave_ort.stream import OrtStream

__all__ = ["Node", "Source", "Structure", "bind_group", "structure_of", "write"]


class Source(NamedTuple):
    """What comes in: an operand, as a dense array that begins at its first element.

    Attributes:
        dtype, shape: of the array.
        weight: identity of the weight that the session holds, ``None`` for what is bound for each plan.
        form: of a quantized weight.
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
        dtype, shape: of its result.
        operands: for each operand the number of its value (sources first, then the results of nodes), its window and
            its shape.
        live: whether the result is an output.
        precision: that its kernel computes in.
    """

    op: str
    attrs: tuple[tuple[str, Any], ...]
    dtype: DType
    shape: Shape
    operands: tuple[tuple[int, Window], ...]
    live: bool
    precision: Precision = "exact"


class Structure(NamedTuple):
    """All that a session depends on: equal structures share one."""

    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]


class Bound(NamedTuple):
    """A structure with its memory.

    Attributes:
        sources: the operand of each source.
        staged: for sources whose operand is not dense and in no dense array: whether they are copied before each run.
        outputs: the operands of the live results.
    """

    structure: Structure
    sources: list[Arg]
    staged: list[bool]
    outputs: list[Arg]


# --- from steps to a structure --------------------------------------------------------------------------------------


def structure_of(group: Group) -> Bound:
    """What a group consists of, and its operands in memory."""
    sources: list[Source] = []
    args: list[Arg] = []
    staged: list[bool] = []
    seen: dict[Any, tuple[int, Window]] = {}
    made: dict[int, tuple[int, Arg]] = {}
    nodes: list[Node] = []
    outputs: list[Arg] = []

    def outside(arg: Arg, precision: Precision) -> tuple[int, Window]:
        form: Form = form_of(arg.dtype, precision) if arg.dtype.is_quantized else ""
        key = (id(arg.buffer), arg.offset, arg.dtype, arg.shape, arg.strides, form)
        if key in seen:
            return seen[key]
        window = _window(arg, 0)
        shape = arg.shape if arg.dtype.is_quantized else _covered(arg, window)
        if shape is None:
            lead = window.lead
            window = Window(0, window.shape, _dense(lead, window.strides))
            shape = lead
            staged.append(True)
        else:
            staged.append(False)
        sources.append(Source(arg.dtype, shape, _identity(arg), form))
        args.append(arg)
        seen[key] = (len(sources) - 1, window)
        return seen[key]

    # Sources first: the numbers of results begin after all of them.
    produced = {step.out.value for step in group.steps if step.out.value >= 0}
    for step in group.steps:
        for arg in step.srcs:
            if arg.value not in produced:
                outside(arg, _precision(step))
    for step in group.steps:
        precision = _precision(step)
        operands = []
        for arg in step.srcs:
            if arg.value in made:
                number, out = made[arg.value]
                operands.append((number, _window(arg, (arg.offset - out.offset) // out.dtype.itemsize)))
            else:
                operands.append(outside(arg, precision))
        live = step.out.buffer is not None
        attrs = tuple(sorted(step.attrs.items()))
        nodes.append(Node(step.op, attrs, step.out.dtype, step.out.shape, tuple(operands), live, precision))
        if live:
            outputs.append(step.out)
        if step.out.value >= 0:
            made[step.out.value] = (len(sources) + len(nodes) - 1, step.out)
    return Bound(Structure(tuple(sources), tuple(nodes)), args, staged, outputs)


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


def _dense(shape: Shape, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense array of that shape, but 0 where the given ones are."""
    result, stride = [], 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        result.append(stride if s else 0)
        stride *= n
    return tuple(reversed(result))


def _covered(arg: Arg, window: Window) -> Shape | None:
    """The shape of the dense array in memory that the operand is cut out of, if its buffer goes as far."""
    lead = window.lead
    if window.strides == _dense(lead, window.strides):
        return lead
    shape = cover(window)
    assert arg.buffer is not None
    if shape is None or arg.offset + int(np.prod(shape)) * arg.dtype.itemsize > arg.buffer.size:
        return None
    return shape


def _identity(arg: Arg) -> Hashable:
    """What tells a weight from others, ``None`` for operands that may change."""
    buffer = arg.buffer
    assert buffer is not None
    if buffer.usage is not Usage.WEIGHTS:
        return None
    return id(buffer), arg.offset, arg.strides


# --- from a structure to a model ------------------------------------------------------------------------------------


def write(structure: Structure) -> Model:
    """The model of a structure: inputs ``in0``, ..., initializers ``w0``, ..., each with the number of its source among
    its kind, and one output for each live node, in order."""
    model = Model()
    values: list[tuple[str, DType, Shape]] = []
    inputs = 0
    for number, source in enumerate(structure.sources):
        names = []
        for piece in source.pieces:
            if source.weight is None:
                names.append(model.input(f"in{inputs}", piece.dtype, piece.shape))
                inputs += 1
            else:
                names.append(model.weight(f"w{number}{piece.name}", piece.dtype, piece.shape))
        values.append((" ".join(names), source.dtype, source.shape))
    for node in structure.nodes:
        operands = [_operand(model, *values[number], window) for number, window in node.operands]
        target = computed(node.dtype)
        out = Operand("", target, node.shape, node.shape, node.dtype)
        kernel = _kernel(node, operands)
        name = model.cast(kernel(model, node.op, out, *operands, **dict(node.attrs)), target, node.dtype)
        if node.live:
            name = model.output(name, node.dtype, node.shape)
        values.append((name, node.dtype, node.shape))
    return model


def _operand(model: Model, value: str, dtype: DType, have: Shape, window: Window) -> Operand:
    if dtype.is_quantized:
        return Operand(value, dtype, have, have, dtype)
    target = computed(dtype)
    name = model.cast(value, dtype, target)
    if have != window.lead or window.offset or window.strides != _dense(window.lead, window.strides):
        name = show(model, name, have, window)
    return Operand(name, target, window.shape, window.lead, dtype)


def _kernel(node: Node, operands: list[Operand]) -> Callable[..., str]:
    """The emitter for a node."""
    args = [Arg(None, 0, o.stored, o.shape, (0,) * len(o.shape)) for o in operands]
    out = Arg(None, 0, node.dtype, node.shape, (0,) * len(node.shape))
    step = Step(node.op, out, tuple(args), dict(node.attrs), precision=node.precision)
    kernel = KERNELS.find(step)
    if kernel is None:
        raise UnsupportedOpError(f"ONNX Runtime does not run {node.op}", {"ort": str(KERNELS.why_not(step))})
    return cast("Callable[..., str]", kernel.factory)


# --- binding --------------------------------------------------------------------------------------------------------


def bind_group(stream: OrtStream, group: Group) -> Call:
    """The call that runs a group: its session, found by its structure, bound to the group's memory."""
    device = stream.device
    for step in group.steps:
        why = device._why_not(step)
        if why is not None:
            raise UnsupportedOpError(f"{device.name} does not run {step.op}", {device.name: why})
    bound = structure_of(group)
    key = (stream.provider, tuple(stream.provider_options.items()), stream.threads or RUNTIME.threads, bound.structure)
    session = SESSIONS.get(key, partial(_session, stream, bound))
    inputs, before = [], []
    kept: list[Any] = []
    for source, arg, staged in zip(bound.structure.sources, bound.sources, bound.staged, strict=True):
        if source.weight is not None:
            continue
        if source.form:
            arrays = {p.name: np.empty(p.shape, p.dtype.numpy) for p in source.pieces}
            before.append(partial(_repack, arg.view, source, arrays))
            kept += arrays.values()
            inputs += [(p.dtype, p.shape, arrays[p.name].ctypes.data) for p in source.pieces]
            continue
        address = arg.address
        if staged:
            stage = np.empty(source.shape, arg.dtype.numpy)
            lead = tuple([slice(0, 1) if not s else slice(None) for s in arg.strides])
            before.append(partial(np.copyto, stage, arg.view[lead]))
            kept.append(stage)
            address = stage.__array_interface__["data"][0]
        inputs.append((source.dtype, source.shape, address))
    outputs = [(out.dtype, out.shape, out.address) for out in bound.outputs]
    binding = session.bind(inputs, outputs)
    return _call(session, binding, before, kept, _remark(bound, session))


def _session(stream: OrtStream, bound: Bound) -> Session:
    weights: dict[str, Any] = {}
    keep: list[Any] = []
    repacked = _packed_by_the_library(bound.structure) if flag(PACK_VARIABLE, True) else 0
    for number, (source, arg) in enumerate(zip(bound.structure.sources, bound.sources, strict=True)):
        if source.weight is not None:
            assert arg.buffer is not None
            keep.append(arg.buffer)
            if source.form:
                packed = PACKED.get(arg, source.form)
                keep.append(packed)
                repacked += packed.nbytes
                weights |= {f"w{number}{p.name}": _shared(packed.arrays[p.name], p.dtype) for p in source.pieces}
            else:
                weights[f"w{number}"] = _value(arg)
    structure = bound.structure
    wide = any(node.dtype is f64 for node in structure.nodes)
    model = write(structure).serialized()
    return Session(model, weights, stream.provider, stream.provider_options, stream.threads, keep, wide, repacked)


def _packed_by_the_library(structure: Structure) -> int:
    """Bytes of the copies that ONNX Runtime makes of the f32 weights of products, in the order of its kernels."""
    weights = {node.operands[1][0] for node in structure.nodes if node.op in ("linear", "matmul")}
    found = [s for i, s in enumerate(structure.sources) if i in weights and s.weight is not None and not s.form]
    return sum([nbytes(s.shape, f32) for s in found if computed(s.dtype) is f32])


def _repack(data: np.ndarray[Any, Any], source: Source, into: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Repack weights that are no constant ones, and may be others in each run."""
    for name, array in pack(data, source.dtype, source.form).items():
        np.copyto(into[name], array)


def _shared(array: np.ndarray[Any, Any], dtype: DType) -> Any:
    """ONNX Runtime's value over the same memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])


def _value(arg: Arg) -> Any:
    """The weight as ONNX Runtime's value over the same memory; a copy where it is in no dense array."""
    assert arg.buffer is not None
    shape = _covered(arg, _window(arg, 0))
    if shape is None:
        lead = tuple([slice(0, 1) if not s else slice(None) for s in arg.strides])
        array = np.ascontiguousarray(arg.view[lead])
    else:
        array = arg.buffer.view(arg.offset, arg.dtype, shape, dense_strides(shape, arg.dtype))
    return _shared(array, arg.dtype)


def _call(session: Session, binding: Any, before: Sequence[Call], kept: Sequence[Any], remark: str) -> Call:
    """The run of a session on bound memory, after the calls ``before``; keeps alive what is bound."""
    run = partial(session.native.run_with_iobinding, binding)
    call: Any = partial(_in_order, before, run) if before else run
    call.kept, call.remark, call.library_bytes = (session, kept), remark, session.repacked
    return cast("Call", call)


def _in_order(before: Sequence[Call], run: Call) -> None:
    for call in before:
        call()
    run()


def _remark(bound: Bound, session: Session) -> str:
    """What `Program.explain` shows: the session, and the memory that it takes beside that of the program."""
    count = len(bound.structure.nodes)
    parts = [f"{count} {'step' if count == 1 else 'steps'} in one session"]
    if session.repacked:
        parts.append(f"with {session.repacked:,} bytes of repacked weights")
    sources = zip(bound.structure.sources, bound.staged, strict=True)
    if copied := sum([staged and source.weight is None for source, staged in sources]):
        parts.append(f"that copies {copied} strided operands before each run")
    return " ".join(parts)
