"""Weights in shards on two CPU devices with separate memories (``OPWEAVE_CPU_DEVICES=2``), one BLAS thread each.

*products*: a stack of pairs of products, the first cut by rows, the second by columns, with an all-reduce behind each
pair, against the same stack on one device. *collectives* of 1 MiB against the copies that they are made of, made by
NumPy in as many threads: an all-gather is two copies of half the value and the copy to the caller, in one thread; an
all-reduce is in each of two threads a copy of half the input and the product that makes a partial sum, the copy of one
partial sum from the one thread to the other, and there the addition, the copy of the sum, and that to the caller.

*sharing* is what the cores pay for each other's memory: writing 1 MiB that the other core has read, over writing
it again alone. It is about 3 where both share a cache and 20 and more where they do not; a virtual machine may change
from the one to the other at any time, and an all-reduce then takes two to three times as long, ours and NumPy's.

*bare* is the same stack by NumPy alone, in one thread, and its halves in two threads that add each other's partial
sums, with nothing planned, placed or checked. *apart* is what the machine gives: its products alone, in threads that
need nothing from each other. Where that is below the target, the two processors slow each other down.

Figures are the fastest of interleaved samples, as the two devices need both cores of a machine with two.

Targets: at least 1.7 times one device; a collective at most 1.3 times its copies.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

os.environ["OPWEAVE_CPU_DEVICES"] = "2"  # read when the backend is loaded

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, median, options, seconds

Array = np.ndarray[Any, Any]
SPEEDUP = 1.7
FACTOR = 1.3
NAMES = ["cpu:0", "cpu:1"]


def products(report: Report, samples: int, rows: int, width: int, layers: int) -> float:
    """How many times faster two devices are than one of them."""
    rng = np.random.default_rng(0)
    ups = [rng.standard_normal((4 * width, width), np.float32) / np.float32(width**0.5) for _ in range(layers)]
    downs = [rng.standard_normal((width, 4 * width), np.float32) / np.float32(2 * width**0.5) for _ in range(layers)]
    arrays = {f"up{i}": up for i, up in enumerate(ups)} | {f"down{i}": down for i, down in enumerate(downs)}
    x = ow.input("x", (rows, width))

    def stack(weights: ow.Weights) -> ow.Tensor:
        y = x
        for i in range(layers):
            y = y + ow.linear(ow.relu(ow.linear(y, weights[f"up{i}"])), weights[f"down{i}"])
        return y

    by = {"up*": ow.Sharded(NAMES), "down*": ow.Sharded(NAMES, axis=1)}
    value = rng.standard_normal((rows, width), np.float32)
    fed, hand = {"x": value}, Bare(value, ups, downs)
    with ow.Scheduler(NAMES, threads=1) as two, ow.Scheduler(NAMES[0], threads=1) as one:
        split = two.build(stack(ow.weights(arrays, device=by)))
        whole = one.build(stack(ow.weights(arrays, device=NAMES[0])))
        results = [split.run(fed), whole.run(fed)]  # which limits BLAS to one thread, for the whole process
        for result in (*results, hand.two()):
            np.testing.assert_allclose(result, hand.one(), rtol=1e-3, atol=1e-3)
        contestants: dict[str, Callable[[], object]] = {
            "two": partial(split.run, fed), "one": partial(whole.run, fed),
            "bare two": hand.two, "bare one": hand.one, "apart two": hand.apart_two, "apart one": hand.apart_one,
        }  # fmt: skip
        with threadpool_limits(1):
            times = {name: min(seconds) for name, seconds in interleaved(contestants, samples).items()}
    for kind in ("", "bare ", "apart "):
        took, alone = times[f"{kind}two"], times[f"{kind}one"]
        what = f"{kind}{layers} x ({rows}, {width})"
        report.row(what=what, two_ms=took * 1e3, one_ms=alone * 1e3, faster=alone / took)
    return times["one"] / times["two"]


class Bare:
    """The products by NumPy alone, in one thread or in two."""

    def __init__(self, x: Array, ups: Sequence[Array], downs: Sequence[Array]) -> None:
        half = len(ups[0]) // 2
        self._x, self._ups, self._downs = x, ups, downs
        self._up = [[np.ascontiguousarray(up[i * half : (i + 1) * half]) for up in ups] for i in range(2)]
        self._down = [[np.ascontiguousarray(down[:, i * half : (i + 1) * half]) for down in downs] for i in range(2)]
        self._parts = [[np.empty_like(x) for _ in ups] for _ in range(2)]
        self._hidden = [np.empty((len(x), half), np.float32) for _ in range(2)]
        self._there = Barrier(2)
        self._second, self._second_apart = Helper(partial(self._half, 1)), Helper(partial(self._half_apart, 1))

    def one(self) -> Array:
        y = self._x
        for up, down in zip(self._ups, self._downs, strict=True):
            y = y + np.maximum(y @ up.T, 0) @ down.T
        return y

    def two(self) -> Array:
        """The halves, whose partial sums each thread adds."""
        self._second.begin()
        y = self._half(0)
        self._second.wait()
        return y

    def apart_one(self) -> None:
        self._half_apart(0)
        self._half_apart(1)

    def apart_two(self) -> None:
        """The products of the halves, in threads that need nothing from each other."""
        self._second_apart.begin()
        self._half_apart(0)
        self._second_apart.wait()

    def _half(self, which: int) -> Array:
        y = self._x
        for layer, (up, down) in enumerate(zip(self._up[which], self._down[which], strict=True)):
            np.matmul(np.maximum(y @ up.T, 0), down.T, out=self._parts[which][layer])
            self._there.wait()
            y = y + (self._parts[0][layer] + self._parts[1][layer])
        return y

    def _half_apart(self, which: int) -> None:
        for layer, (up, down) in enumerate(zip(self._up[which], self._down[which], strict=True)):
            np.matmul(self._x, up.T, out=self._hidden[which])
            np.matmul(self._hidden[which], down.T, out=self._parts[which][layer])


def all_gather(report: Report, samples: int, n: int) -> float:
    """How much longer it takes than its copies."""
    array = np.random.default_rng(0).standard_normal((n, n), np.float32)
    whole = ow.weights({"w": array}, device=ow.Sharded(NAMES))["w"]
    half, out = n // 2, np.empty_like(array)

    def hand() -> Array:
        np.copyto(out[:half], array[:half])
        np.copyto(out[half:], array[half:])
        return out.copy()

    with ow.Scheduler(NAMES, threads=1) as scheduler:
        program = scheduler.build(whole)
        np.testing.assert_array_equal(program.run(), array)
        return compare(report, "all-gather", samples, program.run, hand)


class Helper:
    """A thread that makes one call at a time beside the caller's thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._begin, self._end = allocate_lock(), allocate_lock()
        self._begin.acquire()
        self._end.acquire()
        Thread(target=self._work, args=(call,), daemon=True).start()

    def _work(self, call: Callable[[], object]) -> None:
        while self._begin.acquire():
            call()
            self._end.release()

    def begin(self) -> None:
        self._begin.release()

    def wait(self) -> None:
        self._end.acquire()


def sharing(report: Report, samples: int, n: int) -> None:
    """How much longer it takes to write memory that another thread has read, than to write it again alone."""
    shared, other = np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)
    helper, read, alone = Helper(partial(np.copyto, other, shared)), [], []
    for _ in range(5 * samples):
        helper.begin()
        helper.wait()
        read.append(seconds(partial(shared.fill, 1)))
        alone.append(seconds(partial(shared.fill, 2)))
    report.row(what="sharing", read_us=median(read) * 1e6, alone_us=median(alone) * 1e6)


def all_reduce(report: Report, samples: int, n: int) -> float:
    """How much longer it takes than its copies, additions, and the products whose results it adds, in two threads."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 16), np.float32) for _ in range(2))
    weight = ow.weights({"w": w}, device=ow.Sharded(NAMES, axis=1))["w"]
    xs, ws = ([np.ascontiguousarray(a[:, i : i + 8]) for i in (0, 8)] for a in (x, w))
    parts = [np.empty((n, n), np.float32) for _ in range(2)]
    sent, total, fed = np.empty((n, n), np.float32), np.empty((n, n), np.float32), np.empty_like(x)

    def part(i: int) -> None:
        np.copyto(xs[i], fed[:, 8 * i : 8 * i + 8])
        np.matmul(xs[i], ws[i].T, out=parts[i])

    def second() -> None:
        part(1)
        np.copyto(sent, parts[1])

    helper = Helper(second)

    def hand() -> Array:
        np.copyto(fed, x)
        helper.begin()
        part(0)
        helper.wait()
        np.add(parts[0], sent, out=sent)
        np.copyto(total, sent)
        return total.copy()

    with ow.Scheduler(NAMES, threads=1) as scheduler:
        program = scheduler.build(ow.linear(ow.input("y", (n, 16)), weight))
        np.testing.assert_allclose(program.run(y=x), hand(), rtol=1e-4, atol=1e-4)
        return compare(report, "all-reduce", samples, partial(program.run, {"y": x}), hand)


def compare(report: Report, what: str, samples: int, run: Callable[[], object], hand: Callable[[], object]) -> float:
    times = interleaved({"opweave": run, "hand": hand}, samples)
    took, copies = min(times["opweave"]), min(times["hand"])
    report.row(what=what, opweave_us=took * 1e6, copies_us=copies * 1e6, ratio=took / copies)
    return took / copies


def main() -> None:
    given = options("Weights in shards on two devices.")
    report = Report("sharding", given)
    samples = 11 if given.quick else 41
    width = 256 if given.quick else 1024
    faster = products(report, samples, 128, width, 4)
    sharing(report, samples, 512)
    gather, reduce = all_gather(report, samples, 512), all_reduce(report, samples, 512)
    report.target("one device over two", 1 / faster, 1 / SPEEDUP, "")
    report.target("all-gather of 1 MiB over its copies", gather, FACTOR, "")
    report.target("all-reduce of 1 MiB over its copies", reduce, FACTOR, "")
    report.finish("Weights in shards")


if __name__ == "__main__":
    main()
