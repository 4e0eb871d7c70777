"""A group of steps as an ONNX model in a session, bound to its operands in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import onnxruntime

from opweave.contract import Arg, Call, Group, Step, flops
from opweave.errors import UnsupportedOpError
from opweave.graph.dtypes import DType, f32, f64
from opweave.graph.layout import Shape, dense_strides, nbytes
from opweave_ort.calls import Places, SessionCall
from opweave_ort.kernels import KERNELS, MOVERS
from opweave_ort.kernels.indexing import WRITES_OVER
from opweave_ort.limits import limit
from opweave_ort.model import ONNX_TYPES, Model, Operand, computed
from opweave_ort.patterns import Pattern
from opweave_ort.runtime import PACK_VARIABLE, RUNTIME, flag
from opweave_ort.sessions import SESSIONS, Opened, Session, open_session
from opweave_ort.structure import PRODUCTS, Bound, Node, Source, Structure, dense_window, structure_of, whole_of
from opweave_ort.weights import pack, packed_nbytes
from opweave_ort.windows import Window, show

if TYPE_CHECKING:
    from opweave.runtime.host.threads import ThreadPool
    from opweave_ort.providers import Provider
    from opweave_ort.stream import OrtStream

__all__ = ["bind_group", "is_large", "write"]

LARGE: Final = limit("threaded_work", 1 << 17, 1, 1 << 24)
"""Floating-point operations, or bytes of one operand, above which threads are of use for a step."""

MODELS_KEPT: Final = 16
"""Structures whose models are kept: the slots of a program have equal structures."""

# --- from a structure to a model ------------------------------------------------------------------------------------


@lru_cache(MODELS_KEPT)
def write(structure: Structure) -> Model:
    """The model of a structure: inputs ``in0``, ``in1``, ... in order, initializers ``w`` with the number of their
    source and the name of their piece, and one output for each live node, in order."""
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
        moves = node.op in MOVERS
        operands = [_operand(model, *values[number], window, moves) for number, window in node.operands]
        target = node.dtype if moves else computed(node.dtype)
        out = Operand("", target, node.shape, node.shape, node.dtype)
        kernel = _kernel(node, operands)
        name = model.cast(kernel(model, node.op, out, *operands, **dict(node.attrs)), target, node.dtype)
        if node.live:
            name = model.output(name, node.dtype, node.shape)
        values.append((name, node.dtype, node.shape))
    model.prune()
    return model


def _operand(model: Model, value: str, dtype: DType, have: Shape, window: Window, moves: bool) -> Operand:
    if dtype.is_quantized:
        return Operand(value, dtype, have, have, dtype)
    target = dtype if moves else computed(dtype)
    part = prod(window.lead) < prod(have)  # of which alone a cast makes another copy, as of a cache that is not full
    name = value if part else model.cast(value, dtype, target)
    if have != window.lead or window.offset or window.strides != dense_window(window.lead, window.strides):
        name = show(model, name, have, window)
    return Operand(model.cast(name, dtype, target) if part else name, target, window.shape, window.lead, dtype)


def _kernel(node: Node, operands: list[Operand]) -> Callable[..., str]:
    """The emitter for a node; raises `UnsupportedOpError` where there is none."""
    sources = operands[1:] if node.op in WRITES_OVER else operands
    args = [Arg(None, 0, o.stored, o.shape, (0,) * len(o.shape)) for o in sources]
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
        why = device.why_not(step)
        if why is not None:
            raise UnsupportedOpError(f"{device.name} does not run {step.op}", {device.name: why})
    bound = structure_of(group)
    model = write(bound.structure)
    weights = tuple([source.weight for source in bound.structure.sources])
    processors = None if stream.pool is None else stream.pool.affinity
    threads = (stream.threads or RUNTIME.most_threads) if any(map(is_large, group.steps)) else 1
    key = (stream.provider, tuple(stream.provider_options.items()), threads, processors, weights, stream.spins)
    pool = stream.pool if stream.pool is not None and threads > 1 else threads
    args = _weight_args(bound)
    make = partial(_opened, model, bound.structure, args, stream.provider, stream.provider_options, pool, stream.spins)
    session = SESSIONS.get(key, model, make, _repacked(model, bound.structure))
    constants = {name: np.asarray(array, order="C") for name, array in model.constants.items()}
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
            before.append(partial(np.copyto, stage, _unrepeated(arg)))
            kept.append(stage)
            address = stage.__array_interface__["data"][0]
        inputs.append((source.dtype, source.shape, address))
    outputs = [(out.dtype, out.shape, out.address) for out in bound.outputs]
    copied = sum(
        [staged and source.weight is None for source, staged in zip(bound.structure.sources, bound.staged, strict=True)]
    )
    remarks = partial(_remark, len(bound.structure.nodes), copied)
    return SessionCall(stream, session, Places(inputs, outputs, constants), before, kept, remarks)


def is_large(step: Step) -> bool:
    """Whether threads are of use for a step. Sessions without such steps get none, so that processes with many small
    sessions do not have many threads."""
    return max([flops(step), *[arg.nbytes for arg in (step.out, *step.srcs)]]) > LARGE.value


def _opened(
    model: Model,
    structure: Structure,
    args: Mapping[int, Arg],
    provider: Provider,
    options: Mapping[str, str],
    threads: int | ThreadPool,
    spins: bool,
    pattern: Pattern,
) -> Opened:
    """A session for all models of the skeleton that fit a pattern, with the weights as they are now."""
    weights, in_place = _weights(structure, args), model.read_in_place - _pieces(structure)
    wide = any(node.dtype is f64 for node in structure.nodes)
    native = open_session(model.serialized(pattern), weights, in_place, provider, options, threads, wide, spins)
    return Opened(native, pattern, [weights[name] for name in in_place])


def _pieces(structure: Structure) -> set[str]:
    """The names of initializers that quantized weights are made of, which are packed, and not kept, by the session."""
    return {f"w{n}{p.name}" for n, source in enumerate(structure.sources) if source.form for p in source.pieces}


def _repacked(model: Model, structure: Structure) -> int:
    """Bytes of copies of weights in a session."""
    quantized = [source for source in structure.sources if source.form and source.weight is not None]
    total = sum([packed_nbytes(source.dtype, source.shape, source.form) for source in quantized])
    names = model.read_in_place | _pieces(structure)
    total += sum([nbytes(w.shape, computed(w.dtype)) for w in model.weights if w.name not in names])
    return total + (_packed_by_the_library(structure) if flag(PACK_VARIABLE, True) else 0)


def _weight_args(bound: Bound) -> dict[int, Arg]:
    """The operands that are weights, by the number of their source."""
    sources = bound.structure.sources
    return {n: arg for n, arg in enumerate(bound.sources) if sources[n].weight is not None}


def _weights(structure: Structure, args: Mapping[int, Arg]) -> dict[str, Any]:
    """The weights as ``OrtValue``, by name."""
    found: dict[str, Any] = {}
    for number, arg in args.items():
        source = structure.sources[number]
        if not source.form:
            found[f"w{number}"] = _value(arg)
            continue
        arrays = pack(arg.view, source.dtype, source.form)
        found |= {f"w{number}{p.name}": _shared(arrays[p.name], p.dtype) for p in source.pieces}
    return found


def _packed_by_the_library(structure: Structure) -> int:
    """Bytes of the copies that ONNX Runtime makes of the f32 weights of products, in the layout of its kernels."""
    weights = {node.operands[1][0] for node in structure.nodes if node.op in PRODUCTS}
    found = [s for i, s in enumerate(structure.sources) if i in weights and s.weight is not None and not s.form]
    return sum([nbytes(s.shape, f32) for s in found if computed(s.dtype) is f32])


def _repack(data: np.ndarray[Any, Any], source: Source, into: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Repack a quantized operand that is no weight, and may change before each run."""
    for name, array in pack(data, source.dtype, source.form).items():
        np.copyto(into[name], array)


def _shared(array: np.ndarray[Any, Any], dtype: DType) -> Any:
    """An ``OrtValue`` over the memory of an array."""
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])


def _unrepeated(arg: Arg) -> np.ndarray[Any, Any]:
    """A view of an operand in its memory, in which axes of stride 0 have length 1."""
    lead: tuple[Any, ...] = tuple([slice(None) if step else slice(0, 1) for step in arg.strides])
    return arg.view[*lead, ...]  # without ``...`` an operand without axes would be a number and no view


def _value(arg: Arg) -> Any:
    """The weight as an ``OrtValue`` over its memory; over a copy where it is not part of a dense array."""
    assert arg.buffer is not None
    shape = whole_of(arg)
    if shape is None:
        array = np.asarray(_unrepeated(arg), order="C")
    else:
        array = arg.buffer.view(arg.offset, arg.dtype, shape, dense_strides(shape, arg.dtype))
    return _shared(array, arg.dtype)


def _remark(count: int, copied: int, session: Session) -> str:
    """What `Program.explain` shows: the session, and the memory that it takes beside that of the program."""
    parts = [f"{count} {'step' if count == 1 else 'steps'} in one session"]
    if symbols := session.opened.pattern.symbols:
        parts.append(f"for all values of {len(symbols)} {'length' if len(symbols) == 1 else 'lengths'}")
    if session.repacked:
        parts.append(f"with {session.repacked:,} bytes of repacked weights")
    if copied:
        parts.append(f"that copies {copied} strided operands before each run")
    return " ".join(parts)
