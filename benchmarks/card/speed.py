"""How fast is it? opweave beside torch eager, ``torch.compile(mode="reduce-overhead")`` and a CUDA graph made by hand.

All contestants do the same: inputs come from arrays of the host, the result goes back there. They take turns in one
process; figures are medians, by the wall clock and by events of the device around the same runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import opweave as ow
from benchmarks._jobs import Array
from benchmarks._measure import seconds
from benchmarks._minilm import Weighted
from benchmarks.card import models
from benchmarks.card.hardware import Hardware, hardware
from benchmarks.card.part import Context
from opweave.graph.work import work

__all__ = ["chain_of_additions", "compile_ahead", "decoder", "encoder", "peaks", "training"]

Run = Callable[[], Any]
LIMIT: Final = 1.05
"""Times a CUDA graph made by hand that a run may take."""

ENOUGH: Final = 6.0
"""Seconds that a row takes at least, torch's compiler left out."""

ENOUGH_TO_COMPILE: Final = 8.0
"""The same for it where it finds its cache."""

# --- what the card can do -------------------------------------------------------------------------------------------


class Peaks(NamedTuple):
    """Bytes a second of a copy on the device, read and written, and floating-point operations a second of products."""

    bandwidth: float
    flops: Mapping[str, float]


def _best(card: Hardware, run: Run, samples: int) -> float:
    run()
    card.synchronize()
    return min(card.seconds(run) for _ in range(samples))


def measured_peaks(context: Context) -> Peaks:
    card = hardware(context.device)
    size, width, samples = context.pick((1 << 20, 128, 2), (1 << 24, 512, 3), (1 << 30, 8192, 5))
    source = torch.empty(size, dtype=torch.uint8, device=card.target)
    target = torch.empty_like(source)
    bandwidth = 2 * size / _best(card, partial(target.copy_, source), samples)
    del source, target
    flops = {}
    for name, dtype in {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}.items():
        n = width // 2 if name == "f32" else width
        a = torch.randn(n, n, device=card.target).to(dtype)
        b, out = torch.randn(n, n, device=card.target).to(dtype), torch.empty_like(a)
        flops[name] = 2 * n**3 / _best(card, partial(torch.mm, a, b, out=out), samples)
    return Peaks(bandwidth, flops)


def peaks(context: Context) -> None:
    """Bandwidth and products of the card by torch, and transfers by opweave's streams."""
    card = hardware(context.device)
    found = measured_peaks(context)
    context.row("peaks", what="copy on the device", GB_per_s=found.bandwidth / 1e9)
    for name, flops in found.flops.items():
        context.row("peaks", what=f"product in {name}", TFLOP_per_s=flops / 1e12)
    with context.trying("transfers"):
        _transfers(context, card)


def _transfers(context: Context, card: Hardware) -> None:
    size = context.pick(1 << 20, 1 << 24, 1 << 28)
    device = ow.device(context.device)
    pinned = card.pinned(size).numpy()
    pageable = np.zeros(size, np.uint8)
    pattern = np.random.default_rng(context.seed).integers(0, 256, size, np.uint8)
    samples = context.pick(2, 3, 5)
    with device.alloc(size) as buffer, device.open() as stream, device.open() as other:
        busy = _busy_program(context, other)
        for kind, host in (("pinned", pinned), ("pageable", pageable)):
            for meanwhile in (False, True):
                up, down = [], []
                for _ in range(samples):
                    host[:] = pattern
                    computing = busy() if meanwhile else None
                    up.append(seconds(partial(_queued, stream, stream.upload, buffer, host)))
                    host[:] = 0
                    down.append(seconds(partial(_queued, stream, stream.download, buffer, host)))
                    if computing is not None:
                        computing.result()
                    if not np.array_equal(host, pattern):
                        context.failure(f"transfers, {kind}", "other bytes come back")
                context.row("transfers", host_memory=kind, while_computing=meanwhile, MiB=size >> 20,
                            up_GB_per_s=size / min(up) / 1e9, down_GB_per_s=size / min(down) / 1e9)  # fmt: skip


def _queued(stream: Any, transfer: Callable[..., Any], buffer: Any, host: Array) -> None:
    transfer(buffer, 0, host)
    stream.synchronize()


def _busy_program(context: Context, stream: Any) -> Callable[[], Any]:
    """What begins some milliseconds of products on another stream of the device, and returns their future."""
    count, width = context.pick((2, 64), (10, 256), (200, 4096))
    scheduler = ow.Scheduler([stream])
    x = ow.input("x", (width, width))
    weight = ow.weights({"w": np.full((width, width), 1 / width, np.float32)}, device=context.device)["w"]
    h = x
    for _ in range(count):
        h = ow.linear(h, weight)
    program = scheduler.build(ow.sum(h))
    feed = np.ones((width, width), np.float32)
    program.run(x=feed)
    program.run(x=feed)
    return lambda: program.submit(x=feed)


# --- the contestants ------------------------------------------------------------------------------------------------


class Ours(NamedTuple):
    """A program of ours, its run, and the queue of the device that it works on."""

    program: Any
    run: Run
    queue: Any


def ours(task: models.Task, device: str) -> Ours:
    weights: dict[str, ow.Tensor] = dict(ow.weights(task.arrays, device=device))
    for name, shape in task.caches.items():
        weights[name] = ow.state(name, shape, task.dtype, device=device)
    inputs = {name: ow.input(name, array.shape, array.dtype) for name, array in task.feeds.items()}
    scheduler = ow.Scheduler(device)
    program = scheduler.build(task.ours(inputs, weights))
    return Ours(program, partial(program.run, dict(task.feeds)), getattr(scheduler.streams[0], "queue", None))


class Peer:
    """The same computation in torch.

    Attributes:
        module: with its weights on the device.
        inputs: what is fed, on the host.
    """

    def __init__(self, task: models.Task, card: Hardware) -> None:
        self.card, names = card, list(task.feeds)
        weights = {name: models.torch_tensor(array).to(card.target) for name, array in task.arrays.items()}
        kind = models.torch_tensor(np.zeros(1, models.DTYPES[task.dtype])).dtype
        for name, shape in task.caches.items():
            weights[name] = torch.zeros(shape, dtype=kind, device=card.target)
            torch._dynamo.mark_static_address(weights[name])  # else compiled code would copy what it writes
        self.module = Weighted(lambda w, *given: task.theirs(dict(zip(names, given, strict=True)), w), weights)
        self.inputs = [models.torch_tensor(array) for array in task.feeds.values()]

    def _on_device(self) -> list[torch.Tensor]:
        return [value.to(self.card.target) for value in self.inputs]

    def eager(self) -> Run:
        def run() -> torch.Tensor:
            with torch.inference_mode():
                return self.module(*self._on_device()).cpu()

        return run

    def compiled(self) -> Run:
        function = torch.compile(self.module, mode="reduce-overhead", fullgraph=True, dynamic=False)

        def run() -> torch.Tensor:
            with torch.inference_mode():
                return function(*self._on_device()).cpu()

        for _ in range(3):  # compiles, warms up, records
            run()
        return run

    def graph(self) -> Run:
        with torch.inference_mode():
            fed = self._on_device()
            results: list[torch.Tensor] = []

            def compute() -> None:
                results[:] = [self.module(*fed)]

            replay = self.card.captured(compute)

        def run() -> torch.Tensor:
            with torch.inference_mode():
                for target, value in zip(fed, self.inputs, strict=True):
                    target.copy_(value)
                replay()
                return results[0].cpu()

        return run


class _TooLongError(BaseException):
    """Something took too long. torch's compiler catches exceptions of other kinds, and goes on."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `_TooLongError` in the block after so many seconds: compiling has no limit of its own."""

    def end(*_: object) -> None:
        raise _TooLongError(f"not ready after {seconds:.0f} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1), 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compare(context: Context, table: str, task: models.Task, peak: Peaks | None) -> None:
    """A row of ours and the peers in turns, and a further one beside ``torch.compile``, whose compiling may take longer
    than there is time."""
    card, label = hardware(context.device), {"task": task.name, "dtype": task.dtype}
    before = card.taken()
    own = ours(task, context.device)
    for _ in range(3):
        own.run()
    card.synchronize()
    taken, planned = card.taken() - before, sum(own.program.memory[context.device][:3])
    peer = Peer(task, card)
    runs: dict[str, Run] = {"opweave": own.run, "eager": peer.eager()}
    _add_peer(context, label, runs, "graph", peer.graph)
    _judge(context, task, runs)
    events = _row(context, table, label, runs, own.queue)
    nodes = [node for node in own.program.partition.graph.nodes if node.signature is not None]
    flops, size = sum(work(node)[1] for node in nodes), sum(array.nbytes for array in task.arrays.values())
    figures: dict[str, Any] = {"nodes": len(nodes), "planned_MiB": planned / 2**20}
    figures["taken_MiB"] = taken / 2**20 if taken else None
    if peak is not None:
        figures |= {
            "TFLOP_per_s": flops / events["opweave"] / 1e12,
            "of_products": flops / events["opweave"] / peak.flops[task.dtype],
            "weights_GB_per_s": size / events["opweave"] / 1e9,
            "of_bandwidth": size / events["opweave"] / peak.bandwidth,
        }
    context.row("memory, and shares of what the card can do", **label, **figures)
    if not (context.short or (context.is_stand_in and task.dtype != "f32")):
        runs = {"opweave": own.run, "eager": runs["eager"]}
        if _add_peer(context, label, runs, "compile", peer.compiled):
            _judge(context, task, runs)
            _row(context, f"{table}, beside torch.compile", label, runs, own.queue)
    own.program.close()


def _add_peer(
    context: Context, label: dict[str, str], runs: dict[str, Run], name: str, make: Callable[[], Run]
) -> bool:
    """Make a peer ready, if it can be and is in time; one that fails is no failure of ours."""
    left = context.left - ENOUGH
    if left < (ENOUGH_TO_COMPILE if name == "compile" else 0):
        context.row("not reached", **label, peer=name, why="no time was left")
        return False
    try:
        with _at_most(left):
            runs[name] = make()
    except (Exception, _TooLongError) as error:
        context.row("peers that failed", **label, peer=name, why=f"{type(error).__name__}: {error!s:.300}")
        return False
    return True


def _judge(context: Context, task: models.Task, runs: Mapping[str, Run]) -> None:
    results = {name: _floats(run()) for name, run in runs.items()}
    for name, got in results.items():
        differs = float(np.abs(got - results["eager"]).max() / np.abs(results["eager"]).max())
        if not differs <= task.error:
            context.failure(f"{task.name} {task.dtype}", f"{name} differs by {differs:.2g} from eager torch")


def _row(
    context: Context, table: str, label: dict[str, str], runs: Mapping[str, Run], queue: Any, **more: Any
) -> dict[str, float]:
    """Measure, and write a row; returns the seconds by events."""
    wall, events = _in_turns(context, hardware(context.device), runs, queue)
    context.row(
        table, **label,
        **{f"{name}_us": t * 1e6 for name, t in wall.items()},
        **{f"over_{name}": wall["opweave"] / t for name, t in wall.items() if name != "opweave"},
        **{f"{name}_event_us": t * 1e6 for name, t in events.items()},
        **{f"events_over_{name}": events["opweave"] / t for name, t in events.items() if name != "opweave"}, **more,
    )  # fmt: skip
    limits = {"graph": LIMIT, "compile": 1.0}
    for name in runs.keys() & limits.keys():
        ratio = wall["opweave"] / wall[name]
        context.row("aims", **label, over=name, ratio=ratio, limit=limits[name], met=ratio <= limits[name])
    return events


def _floats(result: Any) -> Array:
    if isinstance(result, torch.Tensor):
        result = result.float().numpy()
    return np.asarray(result, np.float64)


def _in_turns(
    context: Context, card: Hardware, runs: Mapping[str, Run], queue: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the seconds of a run, by the wall clock and by events of the device."""
    names = list(runs)
    for run in runs.values():
        run()
    most = context.pick(3, 7, 31)
    once = sum(seconds(run) for run in runs.values())
    samples = max(3, min(most, round(1.0 / max(once, 1e-6))))
    wall: dict[str, list[float]] = {name: [] for name in names}
    events: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(samples):
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            card.synchronize()
            wall[name].append(seconds(runs[name]))
            card.synchronize()
            events[name].append(card.seconds(runs[name], queue if name == "opweave" else None))
    return {n: median(t) for n, t in wall.items()}, {n: median(t) for n, t in events.items()}


# --- the tasks ------------------------------------------------------------------------------------------------------


Tasks = Sequence[Callable[[], models.Task]]


def chain_tasks(context: Context) -> Tasks:
    return [partial(models.additions, context.pick(100, 200, 1000))]


def encoder_tasks(context: Context) -> Tasks:
    arrays = models.minilm_arrays(48, 100) if context.short else models.minilm_arrays()
    sizes = context.pick([(1, 4)], [(1, 16), (2, 32)], [(1, 16), (1, 128), (32, 128)])
    return [partial(models.encoder, arrays, *size, dtype) for dtype in models.DTYPES for size in sizes]


def decoder_tasks(context: Context) -> Tasks:
    return [partial(models.decoder_step, models.SMALL if context.is_stand_in else models.Llama(), "bf16")]


def chain_of_additions(context: Context) -> None:
    _compare_all(context, "chain of additions", chain_tasks(context), with_peaks=False)


def encoder(context: Context) -> None:
    _compare_all(context, "MiniLM-L6", encoder_tasks(context))


def decoder(context: Context) -> None:
    _compare_all(context, "a decoder's step", decoder_tasks(context))


def _compare_all(context: Context, table: str, tasks: Tasks, *, with_peaks: bool = True) -> None:
    peak = measured_peaks(context) if with_peaks else None
    for make in tasks:
        task = make()
        if context.left < ENOUGH:
            context.row("not reached", task=task.name, dtype=task.dtype, why="no time was left")
            continue
        with context.trying(f"{task.name} {task.dtype}"):
            compare(context, table, task, peak)


def compile_ahead(context: Context) -> None:
    """Compile what the others measure, so that they find it in torch's cache on disk: compiling takes longer than all
    other parts. Each process takes some of the tasks."""
    if hasattr(os, "nice"):
        os.nice(10)
    card = hardware(context.device)

    def of_task(make: Callable[[], models.Task]) -> None:
        Peer(make(), card).compiled()

    def of_training() -> None:
        from benchmarks.training import transformer_task

        _compiled_steps(transformer_task(), card)

    made = [*chain_tasks(context), *encoder_tasks(context), *decoder_tasks(context)]
    if context.is_stand_in:
        made = made[:2]  # the others would take minutes and are much the same
    works: list[Run] = [*[partial(of_task, make) for make in made], of_training]
    for number, work_of in enumerate(works):
        if number % context.workers == context.worker:
            start, label = time.perf_counter(), {"task": str(number)}
            if _add_peer(context, label, {}, "compile", work_of):
                context.row("compiled", **label, seconds=time.perf_counter() - start)
            torch._dynamo.reset()


# --- training -------------------------------------------------------------------------------------------------------


def training(context: Context) -> None:
    """A step of the transformer of ``examples/text.py`` by AdamW, beside torch."""
    from benchmarks.training import ours as our_steps
    from benchmarks.training import torchs, transformer_task
    from examples.text import SIZE, Size

    card = hardware(context.device)
    size = context.pick(Size(1, 16, 2, 8), Size(2, 48, 4, 16), SIZE)
    task = transformer_task(size)
    label = {"task": f"{size.layers} layers of {size.width}, 32 pieces of {size.context} letters", "dtype": "f32"}
    trainer, step = our_steps(task, context.device, 1 << 40)
    runs: dict[str, Run] = {"opweave": step, "eager": torchs(task, card.target)}
    losses = []
    for _ in range(3):
        trainer._tally = type(trainer._tally)()
        step()
        losses.append((trainer._tally.loss / 32, float(runs["eager"]())))
    for mine, theirs in losses:
        if not abs(mine - theirs) <= 1e-2 * abs(theirs):
            context.failure("losses", f"{mine:.5f} beside {theirs:.5f} of eager torch")
    said = " ".join(f"{mine:.4f}/{theirs:.4f}" for mine, theirs in losses)
    queue = getattr(trainer.scheduler.streams[0], "queue", None)
    _add_peer(context, label, runs, "graph", partial(torchs, task, card.target, captured=card.captured))
    _row(context, "a training step", label, runs, queue, losses=said)
    if not context.short:
        runs = {"opweave": step, "eager": runs["eager"]}
        if _add_peer(context, label, runs, "compile", partial(_compiled_steps, task, card)):
            _row(context, "a training step, beside torch.compile", label, runs, queue)


def _compiled_steps(task: Any, card: Hardware) -> Run:
    from benchmarks.training import torchs

    step = torchs(task, card.target, compiled=True)
    for _ in range(3):  # compiles, warms up, records
        step()
    return step
