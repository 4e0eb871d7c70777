"""Level 4: what a device compiles for whole groups of steps belongs to their structure, and respects who else reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import numpy as np

from opweave import ops
from opweave.errors import SchedulerError, UnsupportedOpError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.tensor import Tensor
from opweave.graph.tensor import input as leaf
from opweave.leaves import state, weights
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Program, Scheduler
from opweave_conformance.checklist import Checklist, Subject, expect, inapplicable
from opweave_conformance.trial import step_of

__all__ = ["CHECKS"]

Array = np.ndarray[Any, Any]

compiler = Checklist(4, "compiler")
CHECKS = compiler.checks

N: Final = 6
RUNS: Final = 4
FED_BYTES: Final = (96, 96 << 11, 96 << 14)
"""Sizes of inputs: what a library is told of where an array lies may depend on them."""


class Maker:
    """Makes graphs of differences of small integers, which every type holds, on a device that fuses."""

    def __init__(self, subject: Subject) -> None:
        self.device, self.rng, self.names = subject.device, subject.rng, count()
        if not self.device.caps.fuse:
            inapplicable("its streams run step by step")
        self.dtype: Final = self._dtype()
        self.host: Final = HostDevice()

    def _dtype(self) -> DType:
        for name in ("f32", "f16", "bf16", "i32"):
            x = leaf("x", (N, N), name)
            if self.device.why_not(step_of(ops.sub(x, x))) is None:
                return as_dtype(name)
        inapplicable("it does not run sub")

    def values(self, *shape: int) -> Array:
        return self.rng.integers(-4, 5, shape or (N, N)).astype(self.dtype.numpy)

    def weight(self, values: Array) -> Tensor:
        name = f"w{next(self.names)}"
        return weights({name: values})[name]

    @contextmanager
    def schedulers(self) -> Iterator[list[Scheduler]]:
        """With the host as second device: one that runs alone, and one whose runs overlap in several slots."""
        with (
            Scheduler([self.device, self.host]) as plain,
            Scheduler([self.device, self.host], parallel=True) as overlapping,
        ):
            yield [plain, overlapping]


def check_results(got: Sequence[Array], wanted: Sequence[Array], what: str) -> None:
    for i, (array, want) in enumerate(zip(got, wanted, strict=True)):
        wrong = int(np.count_nonzero(np.asarray(array) != want))
        expect(not wrong, f"{what}: {wrong} of {want.size} elements of output {i} are wrong")


@compiler("structures")
def _(subject: Subject) -> None:
    """Groups that differ in one thing (leaves, views, shapes, attributes, operands) compute different things."""
    make = Maker(subject)
    x = leaf("x", (N, N), make.dtype)
    w, v, wide = make.values(), make.values(), make.values(2 * N, N)
    graphs: dict[str, tuple[Tensor, Callable[[Array], Array]]] = {
        "a weight": (x - make.weight(w), lambda f: f - w),
        "another weight": (x - make.weight(v), lambda f: f - v),
        "operands the other way round": (make.weight(w) - x, lambda f: w - f),
        "one operand twice": (x - x, lambda f: f - f),
        "a transposed weight": (x - make.weight(w).T, lambda f: f - w.T),
        "a transposed input": (x.T - make.weight(w), lambda f: f.T - w),
        "the first rows of a weight": (x - make.weight(wide)[:N], lambda f: f - wide[:N]),
        "the last rows of a weight": (x - make.weight(wide)[N:], lambda f: f - wide[N:]),
        "every second row of a weight": (x - make.weight(wide)[::2], lambda f: f - wide[::2]),
        "a row for all rows": (x - make.weight(w)[1], lambda f: f - w[1]),
        "a column for all columns": (x - make.weight(w)[:, 1:2], lambda f: f - w[:, 1:2]),
        "fewer rows": (x[1:4] - make.weight(w)[1:4], lambda f: (f - w)[1:4]),
        "a weight twice": (x - (u := make.weight(w)) - u, lambda f: f - w - w),
        "an input twice": (x - make.weight(w) - x, lambda f: -w),
        "two differences": (x - make.weight(w) - make.weight(v), lambda f: f - w - v),
        "two differences, weights exchanged": ((x - make.weight(v)) - (x - make.weight(w)), lambda f: w - v),
    }
    if make.dtype.is_float:
        for factor in (2.0, 3.0):
            graphs[f"a factor of {factor:g}"] = (ops.scale(x, factor) - make.weight(w), lambda f, k=factor: f * k - w)  # type: ignore[misc]
    with make.schedulers() as schedulers:
        for scheduler in schedulers:
            programs: list[tuple[str, Program, Callable[[Array], Array]]] = []
            for name, (graph, want) in graphs.items():
                programs.append((name, scheduler.build(graph), want))
                fed = make.values()
                check_results([programs[-1][1].run(x=fed)], [want(fed)], f"{name}, after other structures")
            for name, program, want in programs:
                fed = make.values()
                check_results([program.run(x=fed)], [want(fed)], f"{name}, when all programs are there")


@compiler("states")
def _(subject: Subject) -> None:
    """A group that writes a state uses its old values where the graph reads them before, and its new ones after."""
    make = Maker(subject)
    with make.schedulers() as schedulers:
        for scheduler in schedulers:
            name = f"s{next(make.names)}"
            kept, x = state(name, (N, N), make.dtype), leaf("x", (N, N), make.dtype)
            before = kept - x
            try:
                part = ops.assign(kept[1:3], (x - kept)[1:3])
                program = scheduler.build((before, part - before))
            except (UnsupportedOpError, SchedulerError) as error:
                inapplicable(str(error))
            now = np.zeros((N, N), make.dtype.numpy)
            for i in range(RUNS):
                fed = make.values()
                old = now - fed
                now = now.copy()
                now[1:3] = (fed - now)[1:3]
                check_results(program.run(x=fed), (old, now - old), f"run {i} of a state that is read and written")
            check_results([program.read(name)], [now], "the state after the runs")


@compiler("life-times")
def _(subject: Subject) -> None:
    """A value that later groups and another device read is left to them: not overwritten, donated or dropped."""
    make = Maker(subject)
    with make.schedulers() as schedulers:
        for scheduler in schedulers:
            x, w = leaf("x", (N, N), make.dtype), make.weight(weight := make.values())
            h = x - w
            early = w - h
            there = early - x  # on the host: it parts the groups
            middle = (h - there) - early
            again = middle - x
            late = (h - again) - (early - x) - w
            outputs = (late, h, middle)
            program = scheduler.build(outputs, pins={there: make.host, again: make.host})
            kept: list[tuple[Sequence[Array], tuple[Array, ...]]] = []
            for i in range(RUNS):
                fed = make.values()
                a = fed - weight
                b = weight - a
                c = (a - (b - fed)) - b
                wanted: tuple[Array, ...] = ((a - (c - fed)) - (b - fed) - weight, a, c)
                got = program.run(x=fed)
                check_results(got, wanted, f"run {i} of values that several groups read")
                kept.append((got, wanted))
            for i, (array, expected) in enumerate(kept):
                check_results(array, expected, f"results of run {i}, looked at after later ones")


@compiler("results-on-device")
def _(subject: Subject) -> None:
    """Results that stay in the device's memory are not changed by later runs, and can be fed again."""
    make = Maker(subject)
    if make.device.dlpack_device is None and not make.device.default_buffer_type.is_host:
        inapplicable("it does not export its memory (dlpack_device)")
    with Scheduler([make.device, make.host]) as scheduler:
        name = f"s{next(make.names)}"
        x = leaf("x", (N, N), make.dtype)
        outputs: tuple[Tensor, ...] = (x, x - make.weight(weight := make.values()))
        try:
            kept = state(name, (N, N), make.dtype, device=make.device)
            program = scheduler.build((*outputs, ops.assign(kept, kept - x)))
        except (UnsupportedOpError, SchedulerError):
            program = scheduler.build(outputs)
        read = scheduler.build(x - make.weight(np.zeros((N, N), make.dtype.numpy)))
        results: list[tuple[Sequence[Any], tuple[Array, ...]]] = []
        total = np.zeros((N, N), make.dtype.numpy)
        for _ in range(RUNS):
            fed = make.values()
            lent = fed.copy()
            total = total - fed
            results.append((program.run(x=lent, on_device=True), (fed, fed - weight, total)))
            lent.fill(99)
        for i, (got, wanted) in enumerate(results):
            again = [read.run(x=array) for array in got]
            check_results(again, wanted[: len(again)], f"results of run {i} on the device, after later runs")


@compiler("feeds")
def _(subject: Subject) -> None:
    """A run reads what it is fed, wherever and in whatever layout that lies, also where the last run's array lay.
    Results do not change with arrays that were fed."""
    make = Maker(subject)
    with make.schedulers() as schedulers:
        for scheduler in schedulers:
            for size in FED_BYTES:
                rows = size // (N * make.dtype.itemsize)
                x, weight = leaf("x", (rows, N), make.dtype), make.values(N)
                here = x - make.weight(weight)
                outputs: dict[str, tuple[Tensor, ...]] = {
                    "read by one step": (here,),
                    "read as a whole and in parts": (here, x[1:] - x[:-1], x.T - x.T[:1]),
                    "an output too": (x, here),
                }
                for what, output in outputs.items():
                    check_feeds(make, scheduler.build(output), (rows, N), weight, what)


def check_feeds(make: Maker, program: Program, shape: tuple[int, ...], weight: Array, what: str) -> None:
    """Run a program of the check ``feeds`` with arrays of several layouts."""

    def wanted(f: Array) -> tuple[Array, ...]:
        if what == "an output too":
            return f.copy(), f - weight
        return (f - weight, f[1:] - f[:-1], f.T - f.T[:1])[: len(program.partition.graph.outputs)]

    lent, again = make.values(*shape), make.values(*shape)
    frozen = make.values(*shape)
    frozen.setflags(write=False)
    shifted = np.frombuffer(b"?" + make.values(*shape).tobytes(), np.uint8)[1:].view(make.dtype.numpy).reshape(shape)
    kept = []
    for fed in (lent, lent, again, lent, frozen, np.asfortranarray(again), again, np.repeat(lent, 2, 0)[::2], shifted):
        if fed is lent:
            lent[:] = make.values(*shape)
        want = wanted(fed)
        kept.append((program.run(x=fed), want))
        check_results(*kept[-1], f"fed in another layout or place, {what}")
    want = wanted(lent)
    future = program.submit(x=lent)
    lent.fill(3)
    kept.append((future.result(), want))
    again.fill(3)
    for got, expected in kept:
        check_results(got, expected, f"after fed arrays were overwritten, {what}")
