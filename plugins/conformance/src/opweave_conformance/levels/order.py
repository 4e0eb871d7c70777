"""Level 3: a stream does its work in the order of submission, and keeps host arrays alive until it has used them."""

from __future__ import annotations

import gc
import time
from typing import Any, Final

import numpy as np

from opweave_conformance.bench import ROUNDS, Bench, StreamChecklist
from opweave_conformance.checklist import expect, expect_equal
from opweave_conformance.workload import Workload, long_enough

__all__ = ["CHECKS"]

stream = StreamChecklist(3, "async")
CHECKS = stream.checks

TOTAL: Final = 1 << 20
MOVES: Final = 40
PATIENCE: Final = 5.0
"""Seconds after which the work of a stream that was garbage-collected has to be done."""


@stream("order-plans")
def _(bench: Bench) -> None:
    """Plans run in the order in which they were submitted: each sees the results of those before it."""
    queue = bench.open()
    first = bench.long_task(queue)
    second = bench.task(queue, first.out)
    third = bench.long_task(queue, second.out)
    for _ in range(ROUNDS):
        values = bench.feed(first)
        for task in (first, second, third):
            task.poison()
        for task in (first, second, third):
            task.plan.run()
        queue.synchronize()
        third.expect_result(
            second.result(first.result(values)),
            "the last of three plans, each of which reads the previous one's result",
        )
    # A second step that overtakes the first one reads what has not been written, although each follows it closely.
    large = bench.large_task(queue)
    tail = bench.tail_task(large)
    for _ in range(2 * ROUNDS):
        values = bench.feed(large)
        large.poison()
        tail.poison()
        large.plan.run()
        tail.plan.run()
        queue.synchronize()
        end = large.result(values).reshape(-1)[-tail.recipe.node.size :]
        tail.expect_result(end, "a plan that reads the end of a large result")


@stream("order-upload-run-download")
def _(bench: Bench) -> None:
    """Uploads, plans and downloads are done in the order in which they were submitted, without waiting in between."""
    queue, task = bench.with_long_task()
    fed = [task.values(bench.rng) for _ in range(4)]
    got = [task.empty() for _ in fed]
    for values, out in zip(fed, got, strict=True):
        queue.upload(task.x, 0, values)
        task.plan.run()
        queue.download(task.out, 0, out)
    queue.synchronize()
    for i, (values, out) in enumerate(zip(fed, got, strict=True)):
        task.expect(out, values, f"download {i} of {len(got)} after an upload and a plan")


@stream("order-overwriting")
def _(bench: Bench) -> None:
    """An upload does not overwrite what a plan or download that was submitted before it still reads."""
    queue = bench.open()
    ahead, task = bench.long_task(queue), bench.task(queue)
    bench.feed(ahead)
    for _ in range(ROUNDS):
        values = bench.feed(task)
        got = task.empty()
        ahead.plan.run()
        task.plan.run()
        queue.upload(task.x, 0, np.zeros_like(values))
        queue.download(task.out, 0, got)
        queue.upload(task.out, 0, np.zeros_like(values))
        queue.synchronize()
        task.expect(got, values, "a plan and a download before uploads to what they read")
        expect_equal(task.out.read(), np.zeros(task.nbytes, np.uint8), "a result after an upload over it")


@stream("order-transfers")
def _(bench: Bench) -> None:
    """Transfers of all sizes, over each other and behind a plan, are done in the order in which they were submitted."""
    queue = bench.open()
    ahead, buffer, rng = bench.long_task(queue), bench.alloc(TOTAL), bench.rng
    bench.feed(ahead)
    held = np.zeros(TOTAL, np.uint8)
    buffer.upload(0, held)
    expected: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    ahead.plan.run()
    for _ in range(MOVES):
        size = int(rng.choice([1, 100, 4096, 100_000, TOTAL // 2, TOTAL]))
        at = int(rng.integers(0, TOTAL - size + 1))
        if rng.random() < 0.6:
            piece = rng.integers(0, 256, size, np.uint8)
            queue.upload(buffer, at, piece)
            held[at : at + size] = piece
        else:
            out = np.zeros(size, np.uint8)
            queue.download(buffer, at, out)
            expected.append((out, held[at : at + size].copy()))
    queue.synchronize()
    for i, (out, want) in enumerate(expected):
        expect_equal(out, want, f"download {i} of {len(expected)}, of {want.size} bytes between uploads")
    expect_equal(buffer.read(), held, "the buffer after uploads and downloads")


@stream("order-mixed")
def _(bench: Bench) -> None:
    """Two plans, uploads and downloads in a random order give the same results as when each is waited for."""
    queue = bench.open()
    first = bench.task(queue)
    second = bench.task(queue, first.out)
    x = bench.feed(first)
    y, z = first.result(x), second.result(first.result(x))
    first.plan.run()
    second.plan.run()
    expected: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    for choice in bench.rng.integers(0, 5, MOVES):
        if choice == 0:
            x = first.values(bench.rng)
            queue.upload(first.x, 0, x)
        elif choice == 1:
            first.plan.run()
            y = first.result(x)
        elif choice == 2:
            second.plan.run()
            z = second.result(y)
        else:
            out = first.empty()
            queue.download((first if choice == 3 else second).out, 0, out)
            expected.append((out, y if choice == 3 else z))
    queue.synchronize()
    for i, (out, want) in enumerate(expected):
        expect((out == want).all(), f"download {i} of {len(expected)} among plans and uploads is wrong")


@stream("plans-repeated")
def _(bench: Bench) -> None:
    """A plan that is run many times reads its operands anew in each run, waited for or not."""
    queue, task = bench.with_task()
    for i in range(20):
        values = task.values(bench.rng)
        queue.upload(task.x, 0, values)
        for _ in range(1 + i % 3):
            task.plan.run()
        if i % 4 == 0:
            queue.synchronize()
            task.expect_result(values, f"run {i} of a plan")
    queue.synchronize()
    task.expect_result(values, "the last run of a plan")


@stream("plans-closed")
def _(bench: Bench) -> None:
    """A plan may be closed while its work is queued: the work is done all the same."""
    queue = bench.open()
    for _ in range(ROUNDS):
        task = bench.long_task(queue)
        values = bench.start(task)
        task.plan.close()
        queue.synchronize()
        task.expect_result(values, "a plan that was closed after it was submitted")


# --- host arrays ----------------------------------------------------------------------------------------------------


@stream("upload-keeps-arrays")
def _(bench: Bench) -> None:
    """Queued uploads keep their arrays alive: their bytes arrive even if the caller drops the arrays."""
    queue = bench.open()
    ahead, n = bench.long_task(queue), 1 << 14
    bench.feed(ahead)
    buffer = bench.alloc(16 * n)
    ahead.plan.run()
    for i in range(16):
        queue.upload(buffer, i * n, np.full(n, i, np.uint8))
        np.full(n, 0xFF, np.uint8)
    junk = [np.full(n, 0xFF, np.uint8) for _ in range(32)]
    queue.synchronize()
    del junk
    expect_equal(buffer.read(), np.repeat(np.arange(16, dtype=np.uint8), n), "after uploads of arrays that were let go")


@stream("upload-gives-back")
def _(bench: Bench) -> None:
    """After synchronizing the stream, or an event behind the upload, the uploaded array may be changed."""
    queue, task = bench.with_task()
    for wait in (queue.synchronize, lambda: queue.record().synchronize()):
        values = task.values(bench.rng)
        kept = values.copy()
        queue.upload(task.x, 0, values)
        wait()
        values[:] = 0
        task.plan.run()
        queue.synchronize()
        task.expect_result(kept, "a plan after an upload whose array was changed since")


@stream("download-complete")
def _(bench: Bench) -> None:
    """Downloads are complete after synchronizing the stream or an event, and write nothing outside of their array."""
    queue, task = bench.with_long_task()
    for _ in range(ROUNDS):
        for wait in (queue.synchronize, lambda: queue.record().synchronize()):
            framed = np.full(task.nbytes + 128, 0xA5, np.uint8)
            values = bench.start(task)
            queue.download(task.out, 0, framed[64:-64])
            wait()
            got = framed[64:-64].copy().view(task.dtype).reshape(task.shape)
            task.expect(got, values, "a download after waiting for it")
            expect(
                (framed[:64] == 0xA5).all() and (framed[-64:] == 0xA5).all(), "a download writes outside of its array"
            )


# --- closing and freeing --------------------------------------------------------------------------------------------


@stream("close-finishes")
def _(bench: Bench) -> None:
    """Closing a stream finishes what is queued, downloads too."""
    for _ in range(ROUNDS):
        queue, task = bench.with_long_task()
        got, values = task.empty(), bench.start(task)
        queue.download(task.out, 0, got)
        queue.close()
        task.expect(got, values, "a download of a stream that was closed")
        task.expect_result(values, "a plan of a stream that was closed")


@stream("drop-finishes")
def _(bench: Bench) -> None:
    """A stream that is garbage-collected finishes its queued work."""
    for _ in range(ROUNDS):
        queue = bench.device.open(worker=True) if bench.worker else bench.device.open()
        task = Workload(queue, *long_enough(bench.device))
        values = task.values(bench.rng)
        got, want = task.empty(), task.result(values)
        queue.upload(task.x, 0, values)
        task.plan.run()
        queue.download(task.out, 0, got)
        del task, queue
        # A worker thread finishes after the stream is gone, and there is nothing left to wait for.
        deadline = time.monotonic() + PATIENCE
        while not (got == want).all():
            expect(time.monotonic() < deadline, "the download of a stream that nobody holds does not complete")
            time.sleep(0.005)
            gc.collect()


@stream("free-waits")
def _(bench: Bench) -> None:
    """Freeing a buffer waits for the queued work that uses it: reusing its memory does not disturb that work."""
    queue = bench.open()
    for _ in range(ROUNDS):
        task = bench.long_task(queue)
        values = bench.start(task)
        gone = [buffer for buffer in task.buffers if buffer is not task.out]
        for buffer in gone:
            buffer.free()
        for buffer in gone:
            bench.alloc(buffer.size).fill(0xFF)
        queue.synchronize()
        task.expect_result(values, "a plan whose operands were freed after it was submitted")
