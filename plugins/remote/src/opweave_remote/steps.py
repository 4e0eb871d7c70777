"""Steps and groups as values of a message, and back.

A step from the wire is checked as a node of a saved graph is: its operation has to exist here, its attributes have the
types of the operation's shape rule, and its result is what that rule gives for its sources. Memory is named by numbers,
which the receiver looks up among the buffers of the same client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from opweave.contract import Arg, Buffer, Group, Step
from opweave.errors import FormatError, OpweaveError
from opweave.graph.attribute_rules import check_attributes
from opweave.graph.attributes import decode_attrs, encode_attrs
from opweave.graph.dtypes import DTYPES
from opweave.graph.layout import check_shape, span
from opweave.graph.leaf import Leaf
from opweave.graph.opdef import OPS, OpDef
from opweave.graph.precision import PRECISIONS
from opweave.graph.tensor import Tensor, new_leaf
from opweave_remote.wire import fields

__all__ = ["decode_groups", "decode_steps", "encode_group", "encode_step"]

Find = Callable[[int], Buffer]

_MOST_SOURCES: Final = 64
_MOST_AXES: Final = 8
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1


# --- to the wire ------------------------------------------------------------------------------------------------------


def encode_step(step: Step) -> list[Any]:
    """A step as plain values; raises `SchedulerError` for an attribute that cannot be sent, such as a function."""
    attrs = encode_attrs(step.attrs, step.op)
    srcs = [_encode_arg(arg) for arg in step.srcs]
    return [step.op, _encode_arg(step.out), srcs, attrs, step.live, step.label, step.precision]


def encode_group(group: Group) -> list[Any]:
    """A group as plain values."""
    return [
        [encode_step(step) for step in group.steps],
        group.workspace,
        None if group.scratch is None else _encode_arg(group.scratch),
        [_encode_arg(arg) for arg in group.reads],
        [_encode_arg(arg) for arg in group.writes],
        sorted(group.constant),
        sorted(group.dead),
        sorted(group.donatable),
    ]


def _encode_arg(arg: Arg) -> list[Any]:
    number = 0
    if arg.buffer is not None:
        arg.buffer.check(arg.offset, 0)  # a freed one has no number
        number = arg.buffer.handle.number
    return [number, arg.offset, arg.dtype.name, list(arg.shape), list(arg.strides), arg.value]


# --- from the wire ----------------------------------------------------------------------------------------------------


def decode_steps(value: Any) -> list[Step]:
    """Unbound steps; raises `FormatError` for anything else."""
    if type(value) is not list:
        raise FormatError("steps are a list")
    return [_decode_step(row, None) for row in value]


def decode_groups(value: Any, find: Find) -> list[Group]:
    """Groups with memory.

    Args:
        find: the buffer of a number; raises an `OpweaveError` where there is none.

    Raises:
        FormatError: anything else than `encode_group` makes.
        LifetimeError: by ``find``.
    """
    if type(value) is not list:
        raise FormatError("groups are a list")
    return [_decode_group(row, find) for row in value]


def _decode_group(value: Any, find: Find) -> Group:
    steps, workspace, scratch, reads, writes, constant, dead, donatable = fields(value, "lu*llUUU", "a group")
    if not steps:
        raise FormatError("a group has no steps")
    chosen = [_positions(given, len(reads)) for given in (constant, dead, donatable)]
    return Group(
        tuple([_decode_step(row, find) for row in steps]),
        workspace,
        None if scratch is None else _decode_arg(scratch, find),
        (),
        tuple([_decode_arg(row, find) for row in reads]),
        tuple([_decode_arg(row, find) for row in writes]),
        constant=chosen[0],
        dead=chosen[1],
        donatable=chosen[2],
    )


def _positions(given: Sequence[int], count: int) -> frozenset[int]:
    if any(i >= count for i in given):
        raise FormatError(f"a group of {count} operands refers to one beyond them")
    return frozenset(given)


def _decode_step(value: Any, find: Find | None) -> Step:
    name, out, srcs, attrs, live, label, precision = fields(value, "s*l*?ss", "a step")
    op = OPS.get(name)
    if op is None:
        raise FormatError(f"there is no operation {name!r:.40} here")
    if op.is_view or name == "custom":
        raise FormatError(f"{name} is no step that is computed for others")
    if precision not in PRECISIONS or len(srcs) > _MOST_SOURCES:
        raise FormatError(f"a step {name} with {len(srcs)} sources in precision {precision!r:.20}")
    step = Step(name, _decode_arg(out, find), tuple([_decode_arg(row, find) for row in srcs]),
                decode_attrs(attrs), live, label, precision)  # fmt: skip
    _check_rule(op, step)
    return step


def _check_rule(op: OpDef, step: Step) -> None:
    """Refuse a step whose result is not what the operation's shape rule gives."""
    operands = [_leaf(step.out, "state"), *[_leaf(arg, "input") for arg in step.srcs]]
    srcs = operands if op.writes else operands[1:]
    check_attributes(op, step.attrs, srcs)
    try:
        shape, dtype = op.infer(*srcs, **step.attrs)
    except OpweaveError:
        raise
    except Exception as error:  # shape rules expect attributes as builders make them, and fail in any way for others
        raise FormatError(f"a step {op.name} does not fit its sources: {error}") from error
    if not op.writes and (tuple(shape) != step.out.shape or dtype is not step.out.dtype):
        raise FormatError(f"a step {op.name} gives {dtype}{list(shape)}, not {step.out.dtype}{list(step.out.shape)}")


def _leaf(arg: Arg, kind: Any) -> Tensor:
    made = new_leaf(Leaf(kind, "", None), arg.shape, arg.dtype)
    made.strides = arg.strides
    return made


def _decode_arg(value: Any, find: Find | None) -> Arg:
    number, offset, name, shape, strides, at = fields(value, "uusUUi", "an operand")
    dtype = DTYPES.get(name)
    if dtype is None:
        raise FormatError(f"there is no dtype {name!r:.40}")
    if len(shape) > _MOST_AXES or len(strides) != len(shape):
        raise FormatError(f"an operand of shape {shape!r:.60} with strides {strides!r:.60}")
    lengths, steps = check_shape(shape, dtype), tuple(strides)
    if 0 not in lengths and offset + span(lengths, steps, dtype) > _LARGEST:
        raise FormatError("an operand extends beyond all addresses")
    if dtype.block == 1 and (offset % dtype.itemsize or any(s % dtype.itemsize for s in steps)):
        raise FormatError(
            f"an operand of {name} at {offset} with strides {strides!r:.60} is not aligned to its elements"
        )
    buffer = find(number) if find is not None and number else None
    return Arg(buffer, offset, dtype, lengths, steps, None, at)
