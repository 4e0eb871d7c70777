"""Checks of bound steps before they are compiled: every operand lies in living memory that the device can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opweave.errors import LayoutError, LifetimeError, PluginError

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Group, Step
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.device import Device

__all__ = ["check_operands", "check_reachable", "check_threads"]


def check_reachable(device: Device, buffer: Buffer) -> None:
    """Raise `LifetimeError` unless kernels of ``device`` can address ``buffer``."""
    if not device.reaches(buffer.space):
        raise LifetimeError(f"{device.name} cannot reach {buffer!r} in {buffer.space!r}")


def check_operands(device: Device, groups: Sequence[Group]) -> set[Buffer]:
    """The buffers that bound steps use. Inside a group of several steps, values may live without memory.

    Raises:
        LifetimeError: an operand has no memory, its buffer was freed, or the device cannot reach it.
        BoundsError: an operand extends beyond its buffer.
        HazardError: a result in read-only memory.
        LayoutError: an operand in a buffer type that the step's kernel cannot use directly.
    """
    buffers: set[Buffer] = set()
    seen: set[int] = set()  # args that were checked; plans of many steps share most of them
    for group in groups:
        steps = group.steps
        inner: set[int] = set()
        for step in steps:
            out = step.out
            for arg in step.srcs:
                if id(arg) not in seen and not (arg.buffer is None and arg.value in inner):
                    buffers.add(_check_arg(device, step, arg))
                    seen.add(id(arg))
            if out.buffer is None and len(steps) > 1 and out.value >= 0:
                inner.add(out.value)
            elif id(out) not in seen or (out.buffer is not None and out.buffer.readonly):
                buffers.add(_check_arg(device, step, out, write=True))
                seen.add(id(out))
        if group.workspace:
            scratch = group.scratch
            if scratch is None or scratch.span < group.workspace:
                raise LifetimeError(f"{steps[0].op} needs {group.workspace:,} bytes of workspace (Group.scratch)")
            buffers.add(_check_arg(device, steps[0], scratch, write=True))
    return buffers


def _check_arg(device: Device, step: Step, arg: Arg, write: bool = False) -> Buffer:
    buffer = arg.buffer
    if buffer is None:
        raise LifetimeError(f"an operand of {step.op} {step.label!r} has no memory: {arg!r}")
    buffer.check(arg.offset, arg.span, write=write)
    check_reachable(device, buffer)
    if not buffer.type.is_raw and (write or not device.reads(buffer.type)):
        what = "write" if write else "read"
        raise LayoutError(
            f"{step.op} {step.label!r} cannot {what} {buffer!r} directly, because that memory stores tensors in its "
            "own format; copy to or from plain memory"
        )
    return buffer


def check_threads(n: object) -> int:
    """A number of threads as an int, at least 1. Text is accepted, because ``open_device("cpu?threads=2")`` passes
    text.

    Raises:
        PluginError: ``n`` is not a positive whole number.
    """
    try:
        count = int(n) if isinstance(n, str) else n.__index__()  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        count = 0
    if count < 1 or isinstance(n, bool):
        raise PluginError(f"threads must be a positive whole number, not {n!r}")
    return int(count)
