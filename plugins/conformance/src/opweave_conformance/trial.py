"""`Trial`: one node run on a device, with its operands arranged in memory in the ways that a scheduler may choose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Arg, Group, Plan, Step
from opweave.graph.dtypes import bf16, u8
from opweave.graph.graph import Graph
from opweave.graph.layout import array_shape, dense_strides, round_up
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor
from opweave.scheduler.place.precision import rounded_sources
from opweave_conformance.comparison import compare
from opweave_conformance.result import Result
from opweave_conformance.tolerances import limits

if TYPE_CHECKING:
    from opweave.contract import Buffer, Stream

__all__ = ["Trial", "overwritable", "step_of", "the_node"]

Array = np.ndarray[Any, Any]
GUARD: Final = 256
GUARD_BYTE: Final = 0xA5
SPOILED_BYTE: Final = 0x42


# --- one step -------------------------------------------------------------------------------------------------------


def the_node(result: Tensor) -> Tensor:
    """The only node behind ``result`` that is no view."""
    nodes = [t for t in Graph(result).nodes if not t.is_view]
    assert len(nodes) == 1, f"a case has one step, not {[t.describe() for t in nodes]}"
    return nodes[0]


def step_of(
    node: Tensor,
    buffers: Mapping[Tensor, tuple[Buffer, int]] | None = None,
    out: Arg | None = None,
    precision: Precision = "exact",
    sources: Sequence[Tensor] | None = None,
) -> Step:
    """The step that computes ``node``, unbound where ``buffers`` (leaf -> memory) is ``None``. Where ``sources`` are
    given, it reads these instead of the node's own: the same values in another type."""
    assert node.op is not None
    sources = node.srcs if sources is None else sources
    numbers: dict[Tensor, int] = {}

    def arg(x: Tensor) -> Arg:
        buffer, base = (None, 0) if buffers is None else buffers[x.memory]
        number = numbers.setdefault(x.memory, len(numbers) + 1)
        return Arg(buffer, base + x.offset, x.dtype, x.shape, x.strides, None, number)

    if node.op.writes:
        return Step(node.op.name, arg(sources[0]), tuple(map(arg, sources[1:])), node.attrs, True, node.name, precision)
    if out is None:
        out = Arg(None, 0, node.dtype, node.shape, node.strides, None, 0)
    return Step(node.op.name, out, tuple(map(arg, sources)), node.attrs, True, node.name, precision)


def overwritable(node: Tensor) -> Iterator[int]:
    """The numbers of the sources that the output may overwrite if the kernel works in place.

    Such a source is a whole value (not a view of a part) with the output's size and strides. No other operand may
    overlap it, except in pointwise operations one with the same offset, dtype, shape and strides.
    """
    op = node.op
    assert op is not None
    strides = dense_strides(node.shape, node.dtype)
    for i in op.inplace:
        if i >= len(node.srcs) or op.writes:
            continue
        x = node.srcs[i]
        whole = x.offset == 0 and x.memory.nbytes == node.nbytes
        alike = x.shape == node.shape and x.strides == strides and x.dtype.itemsize == node.dtype.itemsize
        others = [s for k, s in enumerate(node.srcs) if k != i and s.memory is x.memory]
        free = all(op.pointwise and _window(s) == _window(x) for s in others)
        if whole and alike and free:
            yield i


def _window(x: Tensor) -> tuple[Any, ...]:
    return x.offset, x.dtype, x.shape, x.strides


def array_of(raw: Array, offset: int, x: Tensor | Arg) -> Array:
    """The window of ``x`` that begins at byte ``offset`` of ``raw``; quantized types as bytes."""
    strides = (*x.strides[:-1], 1) if x.dtype.block > 1 else x.strides
    return np.ndarray(array_shape(x.shape, x.dtype), x.dtype.numpy, raw, offset, strides)


def expect(node: Tensor, leaves: Mapping[Tensor, Array]) -> Array:
    """The reference's result for the leaves' values: the output, or for a writing op the region that it writes."""
    assert node.op is not None
    raws = {leaf: np.array(values).reshape(-1).view(np.uint8) for leaf, values in leaves.items()}
    arrays = [array_of(raws[s.memory], s.offset, s) for s in node.srcs]
    with np.errstate(all="ignore"):
        result = node.op.reference(*arrays, **node.attrs)
        if node.op.writes:
            return arrays[0]
        out = np.empty(array_shape(node.shape, node.dtype), node.dtype.numpy)
        np.copyto(out, result, casting="unsafe")
    return out


# --- in memory ------------------------------------------------------------------------------------------------------


class Trial:
    """A node with values for its leaves, on a stream. Memory is freed at the end of a ``with`` block.

    Every leaf and the output lie between guard bytes, at multiples of the device's alignment.

    Args:
        leaves: the values; none, where the node is only compiled.
        precision: in which the device computes it.
        rounded: positions of sources that the kernel is given in bf16, each the only one over its leaf.
    """

    def __init__(
        self,
        stream: Stream,
        node: Tensor,
        leaves: Mapping[Tensor, Array],
        precision: Precision = "exact",
        rounded: Collection[int] = (),
    ) -> None:
        assert node.op is not None
        self.stream, self.device, self.node = stream, stream.device, node
        self.writes = node.op.writes
        self.precision: Final = precision
        self.limits = limits(node, precision)
        self.sources: Final = rounded_sources(node, rounded)
        self.leaves = dict(leaves)
        self._wanted: Final = leaves
        for i in rounded:
            original = self.leaves.pop(node.srcs[i].memory)
            self.leaves[self.sources[i].memory] = original.astype(bf16.numpy)
        self.guard = round_up(GUARD, self.device.alignment)
        self._buffers: list[Buffer] = []
        self._arena: Buffer | None = None

    @cached_property
    def want(self) -> Array:
        """The reference's result for the leaves' values."""
        return expect(self.node, self._wanted)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exc: object) -> None:
        for buffer in self._buffers:
            buffer.free()

    def _alloc(self, size: int) -> Buffer:
        buffer = self.device.alloc(size)
        self._buffers.append(buffer)
        return buffer

    # --- every operand in a buffer of its own -----------------------------------------------------------------------

    def apart(self) -> Result:
        """Run the step with each operand in a buffer of its own."""
        step, before = self.place()
        self.stream.run([step])
        self.stream.synchronize()
        written = step.out.buffer
        assert written is not None
        after = written.read()
        result = self._judge(after, step.out)
        if not result:
            return result
        reason = _strayed(before[written][1], after, step.out)
        for buffer, (name, image) in before.items():
            if not reason and buffer is not written and not np.array_equal(buffer.read(), image):
                reason = f"the source {name} was changed"
        return result._replace(status="failed", reason=reason) if reason else result

    def place(self) -> tuple[Step, dict[Buffer, tuple[str, Array]]]:
        """The step with each operand in a buffer of its own; and of each buffer the leaf's name, and what it holds."""
        places: dict[Tensor, tuple[Buffer, int]] = {}
        before: dict[Buffer, tuple[str, Array]] = {}
        for leaf, values in self.leaves.items():
            image = self._image(values.nbytes)
            image[self.guard : self.guard + values.nbytes] = values.reshape(-1).view(np.uint8)
            buffer = self._alloc(image.size)
            buffer.upload(0, image)
            places[leaf], before[buffer] = (buffer, self.guard), (leaf.name, image)
        out = None
        if not self.writes:
            buffer = self._alloc(self.guard * 2 + self.node.nbytes)
            buffer.fill(GUARD_BYTE)
            before[buffer] = "", self._image(self.node.nbytes)
            out = Arg(buffer, self.guard, self.node.dtype, self.node.shape, self.node.strides, None, 0)
        return step_of(self.node, places, out, self.precision, self.sources), before

    def _image(self, size: int) -> Array:
        return np.full(self.guard * 2 + size, GUARD_BYTE, np.uint8)

    # --- all of them in one -----------------------------------------------------------------------------------------

    def together(self, over: int | None = None) -> str:
        """Run the step with all operands and the workspace in one buffer; returns what is wrong, or ``""``.

        The step is compiled before the values are uploaded, as programs do it.

        Args:
            over: number of the source that the output overwrites, or ``None``.
        """
        # A stream that fuses may need another workspace than the kernel alone.
        (group,) = self.stream.fuse([step_of(self.node, None, None, self.precision, self.sources)])
        plan, step, scratch = self.compile(over, group.workspace)
        try:
            arena, image = self._arena, self._contents
            assert arena is not None
            way = "in one buffer with its sources: " if over is None else f"in place over source {over}: "
            arena.upload(0, image)
            # Run twice, except in place: a second run must neither depend on what the first one left in memory, nor
            # rely on the first one's result, which is overwritten in between.
            for again in (False, True) if over is None and not self.writes else (False,):
                if again:
                    arena.upload(step.out.offset, np.full(step.out.nbytes, SPOILED_BYTE, np.uint8))
                plan.run()
                self.stream.synchronize()
                after = arena.read()
                reason = self._judge(after, step.out).reason
                if not reason:
                    if scratch is not None:
                        image[scratch.offset : scratch.offset + scratch.nbytes] = 0
                        after[scratch.offset : scratch.offset + scratch.nbytes] = 0
                    reason = _strayed(image, after, step.out)
                if reason:
                    return ("run again: " if again else way) + reason
            return ""
        finally:
            plan.close()

    def compile(self, over: int | None = None, workspace: int = 0) -> tuple[Plan, Step, Arg | None]:
        """The plan of the step in one buffer without values, the step, and its workspace."""
        places = self._lay_out(workspace)
        arena, node = self._arena, self.node
        assert arena is not None
        if self.leaves or not self.sources:
            arena.fill(GUARD_BYTE)
        scratch = Arg(arena, self._scratch_at, u8, (workspace,), (1,)) if workspace else None
        out = None
        if over is not None:
            x = node.srcs[over]
            out = Arg(arena, places[x.memory][1] + x.offset, node.dtype, node.shape, node.strides, None, 1 + over)
        elif not self.writes:
            out = Arg(arena, self._out_at, node.dtype, node.shape, node.strides, None, 0)
        step = step_of(node, places, out, self.precision, self.sources)
        return self.stream.compile([Group((step,), workspace, scratch)]), step, scratch

    def _lay_out(self, workspace: int) -> dict[Tensor, tuple[Buffer, int]]:
        """Where each leaf lies in the one buffer; made at the first call."""
        at = self.guard
        offsets: dict[Tensor, int] = {}
        for leaf in dict.fromkeys(s.memory for s in self.sources):
            offsets[leaf] = at
            at = round_up(at + leaf.nbytes, self.guard) + self.guard
        self._out_at = at
        if not self.writes:
            at = round_up(at + self.node.nbytes, self.guard) + self.guard
        self._scratch_at = at
        at = round_up(at + workspace, self.guard) + self.guard
        if self._arena is None:
            self._arena = self._alloc(at)
        self._contents = np.full(at, GUARD_BYTE, np.uint8)
        for leaf, values in self.leaves.items():
            start = offsets.get(leaf)
            if start is not None:
                self._contents[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
        return {leaf: (self._arena, offset) for leaf, offset in offsets.items()}

    # --- judging ----------------------------------------------------------------------------------------------------

    def _judge(self, after: Array, out: Arg) -> Result:
        got = np.array(array_of(after, out.offset, out))
        return compare(got, self.want, self.limits, exact=self.precision == "exact")


def _strayed(before: Array, after: Array, out: Arg) -> str:
    """Which bytes outside of the output differ, or ``""``."""
    before = before.copy()
    # With the same output in both, everything else must be equal.
    array_of(before, out.offset, out)[...] = array_of(after, out.offset, out)
    wrong = np.flatnonzero(before != after)
    if not wrong.size:
        return ""
    return f"{wrong.size} bytes outside of the output were written, the first at {int(wrong[0]) - out.offset}"
