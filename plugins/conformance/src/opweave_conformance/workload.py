"""`Workload`: a plan for a stream of any device, of a few or many steps, whose result is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from opweave import ops
from opweave.contract import Arg, Group, Step
from opweave.graph.dtypes import as_dtype, u8
from opweave.graph.tensor import Tensor
from opweave.graph.tensor import input as leaf
from opweave_conformance.checklist import expect, inapplicable
from opweave_conformance.trial import step_of

if TYPE_CHECKING:
    from opweave.contract import Buffer, Device, Plan, Stream

__all__ = ["SECONDS", "STEPS", "Recipe", "Workload", "large_enough", "long_enough", "recipe_for"]

Array = np.ndarray[Any, Any]

SECONDS: Final = 0.006
"""Seconds that a long workload takes at least: many times what submitting and querying take."""

DTYPES: Final = ("f32", "f16", "bf16", "f64", "i32", "i64")
STEPS: Final = (4, 12, 32, 96)
LARGEST: Final = 1 << 24
LARGE: Final = 1 << 22
WIDTH: Final = 8
POISON: Final = 0xA5


class Recipe(NamedTuple):
    """An operation on a vector, or on rows, that the device runs.

    Attributes:
        node: the operation on the leaf ``x``, and on a second one where it takes two operands.
        other: the second operand's values.
        after: the exact values after so many steps.
    """

    node: Tensor
    other: Array | None
    after: Callable[[Array, int], Array]


def _recipes(dtype: str, n: int) -> Iterator[Recipe]:
    d = as_dtype(dtype)
    x, y = leaf("x", (n,), d), leaf("y", (n,), d)
    ones = np.ones(n, d.numpy)
    yield Recipe(ops.add(x, y), ones, lambda v, k: v + v.dtype.type(k))
    yield Recipe(ops.sub(x, y), ones, lambda v, k: v - v.dtype.type(k))
    yield Recipe(ops.mul(x, y), -ones, lambda v, k: -v if k % 2 else v)
    yield Recipe(ops.neg(x), None, lambda v, k: -v if k % 2 else v)
    if d.is_float:
        rows, table = leaf("x", (n // WIDTH, WIDTH), d), leaf("y", (WIDTH, WIDTH), d)
        turn = np.roll(np.eye(WIDTH), 1, axis=0).astype(d.numpy)
        yield Recipe(ops.linear(rows, table), turn, lambda v, k: np.roll(v.reshape(-1, WIDTH), k, axis=1))
        yield Recipe(ops.matmul(rows, table), turn.T.copy(), lambda v, k: np.roll(v.reshape(-1, WIDTH), k, axis=1))
    yield Recipe(ops.copy(x), None, lambda v, k: v)


def recipe_for(device: Device, n: int) -> Recipe:
    """A recipe for ``n`` elements, a multiple of `WIDTH`; raises `Inapplicable` where the device runs none."""
    for dtype in DTYPES:
        for recipe in _recipes(dtype, n):
            if device.why_not(step_of(recipe.node)) is None:
                return recipe
    inapplicable("it runs none of add, sub, mul, neg, linear, matmul and copy on plain types")


class Workload:
    """A plan on a stream that applies an operation ``steps`` times to ``x`` and writes the result to ``out``; it may be
    run again and again.

    Only the last step writes ``out``, which `poison` fills with a known byte: a result that is read too early is wrong.

    Args:
        source: the buffer to use for ``x``, for example ``out`` of another workload; its last elements, where it holds
            more than ``n``.
    """

    def __init__(self, stream: Stream, n: int, steps: int, source: Buffer | None = None) -> None:
        self.recipe = recipe = recipe_for(stream.device, n)
        self.stream, self.device, self.steps = stream, stream.device, steps
        self.dtype, self.shape, self.nbytes = recipe.node.dtype.numpy, recipe.node.shape, recipe.node.nbytes
        self.buffers: list[Buffer] = []
        self.x = source or self._alloc(self.nbytes)
        self.out = self._alloc(self.nbytes)
        self.out.fill(POISON)
        other = None
        if recipe.other is not None:
            other = self._alloc(recipe.other.nbytes)
            other.upload(0, recipe.other)
        between = [self._alloc(self.nbytes) for _ in range(min(steps - 1, 2))]
        places = [self.x, *[between[i % 2] for i in range(steps - 1)], self.out]
        self.plan = self._compile([self._step(a, b, other) for a, b in pairwise(places)])

    def _alloc(self, size: int) -> Buffer:
        self.buffers.append(self.device.alloc(size))
        return self.buffers[-1]

    def _step(self, source: Buffer, target: Buffer, other: Buffer | None) -> Step:
        node = self.recipe.node
        places = {node.srcs[0]: (source, source.size - self.nbytes)}
        if other is not None:
            places[node.srcs[1]] = (other, 0)
        return step_of(node, places, Arg(target, 0, node.dtype, node.shape, node.strides, None, 0))

    def _compile(self, steps: list[Step]) -> Plan:
        groups = [group for step in steps for group in self.stream.fuse([step])]
        need = max(group.workspace for group in groups)
        scratch = Arg(self._alloc(need), 0, u8, (need,), (1,)) if need else None
        return self.stream.compile([Group(g.steps, g.workspace, scratch if g.workspace else None) for g in groups])

    def values(self, rng: np.random.Generator) -> Array:
        """Values for ``x``: integers that every type holds, also after all steps."""
        return rng.integers(0, 50, self.shape).astype(self.dtype)

    def empty(self) -> Array:
        """An array for the result, poisoned."""
        return np.full(self.nbytes, POISON, np.uint8).view(self.dtype).reshape(self.shape)

    def result(self, values: Array) -> Array:
        """The exact result for ``values``."""
        values = values.reshape(self.shape)
        return np.asarray(self.recipe.after(values, self.steps), self.dtype).reshape(self.shape)

    def expect(self, got: Array, values: Array, what: str) -> None:
        """Raises `Mismatch` unless ``got`` is the result for ``values``."""
        want = self.result(values)
        if got.tobytes() == want.tobytes():
            return
        early = np.frombuffer(got.tobytes(), np.uint8)
        expect(not (early == POISON).all(), f"{what}: nothing has been written yet")
        # Zeros may have either sign.
        expect((got == want).all(), f"{what}: {np.count_nonzero(got != want)} of {want.size} elements are wrong")

    def expect_result(self, values: Array, what: str, copy: Buffer | None = None) -> None:
        """Raises `Mismatch` unless ``out``, or a copy of it, holds the result for ``values``. It is read at once and
        without a stream."""
        got = self.empty()
        (copy or self.out).download(0, got)
        self.expect(got, values, what)

    def poison(self) -> None:
        """Overwrite ``out``, at once and without a stream."""
        self.out.fill(POISON)

    def free(self) -> None:
        self.plan.close()
        for buffer in self.buffers:
            buffer.free()


class WorkloadSize(NamedTuple):
    """Elements and steps of a long workload."""

    elements: int
    steps: int


_KNOWN: Final[WeakKeyDictionary[Device, WorkloadSize]] = WeakKeyDictionary()


def long_enough(device: Device) -> WorkloadSize:
    """The size of a workload that takes at least `SECONDS`, or the largest that is tried; measured once per device."""
    found = _KNOWN.get(device)
    if found is None:
        found = _KNOWN[device] = _measure(device)
    return found


def large_enough(device: Device) -> int:
    """Elements of which one step takes longer than submitting the next one, on most devices."""
    return min(LARGE, _most(device))


def _most(device: Device) -> int:
    """Elements of a workload at most: some of them have to fit into the device's memory."""
    free, total = device.mem_info()
    most = min(LARGEST, (device.max_buffer_size or 1 << 62) // 8, free // 256 if total else LARGEST)
    return max(most // WIDTH * WIDTH, WIDTH)


def _measure(device: Device) -> WorkloadSize:
    size = WorkloadSize(1024, STEPS[0])
    for size in _sizes(_most(device)):
        with device.open() as stream:
            task = Workload(stream, *size)
            task.x.fill(0)
            # The first run may prepare what later ones use, and any may be held up.
            elapsed = min(_time(task) for _ in range(3))
            task.free()
        if elapsed >= SECONDS:
            break
    return size


def _time(task: Workload) -> float:
    start = perf_counter()
    task.plan.run()
    task.stream.synchronize()
    return perf_counter() - start


def _sizes(largest: int) -> Iterator[WorkloadSize]:
    first = min(1024, largest)
    yield from [WorkloadSize(first, steps) for steps in STEPS]
    n = first
    while n < largest:
        n = min(n * 2, largest)
        yield WorkloadSize(n, STEPS[-1])
