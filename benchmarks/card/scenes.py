"""What cards do in programs: captured graphs, splits with the processor, weights that do not fit, other backends on the
same card, several cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

import opweave as ow
from benchmarks._measure import interleaved, median, seconds
from benchmarks.card.hardware import Hardware, hardware
from benchmarks.card.part import Context

__all__ = ["graphs", "offload", "ort", "several", "split"]

Array = np.ndarray[Any, Any]
MIB: Final = 1 << 20


def layers(count: int, width: int, seed: int) -> dict[str, Array]:
    """Square matrices through which values keep their size."""
    rng = np.random.default_rng(seed)
    return {f"layer{i}": (rng.standard_normal((width, width)) / width**0.5).astype(np.float32) for i in range(count)}


def stack(x: ow.Tensor, weights: Mapping[str, ow.Tensor]) -> ow.Tensor:
    for weight in weights.values():
        x = ow.tanh(ow.linear(x, weight))
    return x


def truth(x: Array, arrays: Mapping[str, Array]) -> Array:
    """`stack` in NumPy, in f64."""
    values = x.astype(np.float64)
    for array in arrays.values():
        values = np.tanh(values @ array.T.astype(np.float64))
    return values


def judge(context: Context, what: str, got: Array, want: Array, atol: float = 2e-5) -> None:
    """A failure where two arrays differ by more than rounding."""
    error = float(np.abs(got.astype(np.float64) - want).max())
    if not error <= atol:
        context.failure(what, f"differs by {error:.2g}, more than {atol:.2g}")


# --- captured graphs ------------------------------------------------------------------------------------------------


def graphs(context: Context) -> None:
    """A plan that is replayed gives what the same plan gives call by call, takes no memory, and is one launch."""
    card = hardware(context.device)
    count, width, runs = context.pick((4, 64, 5), (8, 128, 10), (24, 1024, 50))
    arrays = layers(count, width, context.seed)
    rng = np.random.default_rng(context.seed)
    feeds = [rng.standard_normal((16, width)).astype(np.float32) for _ in range(runs)]
    results: dict[str, list[Array]] = {}
    options: dict[str, dict[str, Any]] = {"replayed": {}}
    if not context.is_stand_in:
        options["call by call"] = {"graphs": False}
    for name, given in options.items():
        with ow.device(context.device).open(**given) as stream, ow.Scheduler(stream) as scheduler:
            x = ow.input("x", (16, width))
            program = scheduler.build(stack(x, ow.weights(arrays, device=context.device)))
            results[name] = [program.run(x=feed) for feed in feeds]
            before = card.allocations()
            times = [seconds(partial(program.run, x=feed)) for feed in feeds]
            after = card.allocations()
            context.row("captured graphs", plan=name, steps=2 * count, run_us=median(times) * 1e6,
                        allocations_in_all_runs=None if before is None or after is None else after - before,
                        launches_in_a_run=_launches(card, partial(program.run, x=feeds[0])))  # fmt: skip
            if name == "replayed" and before is not None and after != before:
                context.failure(name, f"{(after or 0) - before} allocations in {runs} runs")
            said = str(program.explain())
            if name == "replayed" and not context.is_stand_in and "runs as a CUDA graph" not in said:
                context.failure(name, "it is not captured:\n" + said)
    for name, found in results.items():
        for feed, got in zip(feeds, found, strict=True):
            judge(context, name, got, truth(feed, arrays))
    # Libraries may choose other kernels where they work on another queue, so that this is no failure.
    alike = all(np.array_equal(*pair) for pair in zip(*results.values(), strict=True)) if len(results) > 1 else True
    context.row("bits", replayed_and_call_by_call_are_alike=alike)


def _launches(card: Hardware, run: Callable[[], Any]) -> Any:
    try:
        return card.launches(run)
    except Exception as error:  # profilers need rights that not every machine gives
        return f"not known: {error!s:.100}"


# --- beside the processor -------------------------------------------------------------------------------------------


def processor() -> str:
    """The processor's best device that is no stand-in for a card."""
    return next((name for name in ("cpu", "cpu:0", "host") if any(d.name == name for d in ow.devices())), "host")


def split(context: Context) -> None:
    """A stack whose middle is on the processor: right, with two copies, in turn and pipelined."""
    count, width, rows, runs = context.pick((6, 64, 8, 8), (6, 256, 64, 8), (12, 1024, 256, 16))
    arrays, other = layers(count, width, context.seed), processor()
    rng = np.random.default_rng(context.seed)
    feeds = [rng.standard_normal((rows, width)).astype(np.float32) for _ in range(runs)]
    places = {name: other if count // 3 <= i < count - count // 3 else context.device for i, name in enumerate(arrays)}
    times: dict[str, float] = {}
    for name, parallel in (("in turn", False), ("pipelined", 3)):
        with ow.Scheduler([context.device, other], parallel=parallel, op_offload=False) as scheduler:
            x = ow.input("x", (rows, width))
            program = scheduler.build(stack(x, ow.weights(arrays, device=places)))
            kinds = [part.target.device.name for part in program.splits]
            if kinds != [context.device, other, context.device]:
                context.failure(name, f"the splits are on {', '.join(kinds)}")

            def all_runs(program: Any = program) -> list[Array]:
                return [future.result() for future in [program.submit(x=feed) for feed in feeds]]

            for feed, got in zip(feeds, all_runs(), strict=True):
                judge(context, f"{name}: a run", got, truth(feed, arrays))
            times[name] = min(seconds(all_runs) for _ in range(context.pick(1, 2, 5))) / runs
            context.row("split", runs=name, splits=len(kinds), copies=program.n_copies, ms_a_run=times[name] * 1e3,
                        gain=times["in turn"] / times[name])  # fmt: skip


def offload(context: Context) -> None:
    """Weights on the host, more than a limit, come to the card while it computes."""
    card = hardware(context.device)
    count, width, rows = context.pick((12, 64, 64), (16, 256, 64), (16, 2048, 512))
    arrays = layers(count, width, context.seed)
    size = sum(array.nbytes for array in arrays.values())
    limit = size // 2
    feed = np.random.default_rng(context.seed).standard_normal((rows, width)).astype(np.float32)

    class Asking(type(ow.device(context.device))):  # type: ignore[misc]  # of the device's own class
        """The same device, which brings every product's weights from the host whether that pays or not."""

        def _offload(self, step: Any) -> bool:
            return bool(step.op == "linear")

    found = ow.device(context.device)
    device = Asking(*([] if context.is_stand_in else [found.target]))  # type: ignore[attr-defined]
    times = {}
    for name, parallel in (("in turn", False), ("next weights meanwhile", True)):
        with ow.Scheduler([device, "host"], parallel=parallel) as scheduler:
            x = ow.input("x", (rows, width))
            program = scheduler.build(stack(x, ow.weights(arrays, device="host")))
            judge(context, name, program.run(x=feed), truth(feed, arrays), 1e-4)
            taken = scheduler.buffer_size(device)
            if taken > limit:
                context.failure(name, f"{taken:,} bytes are taken on the device, more than the limit of {limit:,}")
            there = sum(program.device_of(node) is device for node in program.partition.graph.nodes)
            if there < count:
                context.failure(name, f"{there} nodes run on the device, of {count} products")
            run = partial(program.run, x=feed)
            times[name] = min(seconds(run) for _ in range(context.pick(1, 2, 5)))
            context.row("offload", runs=name, weights_MiB=size / MIB, limit_MiB=limit / MIB, taken_MiB=taken / MIB,
                        ms=times[name] * 1e3, weights_GB_per_s=size / times[name] / 1e9)  # fmt: skip
    context.row("allocator", taken_by_torch_MiB=card.taken() / MIB)


# --- other backends and cards ---------------------------------------------------------------------------------------


def ort(context: Context) -> None:
    """Splits as sessions of ONNX Runtime on the same card, beside the torch device."""
    name = "ort:cpu" if context.is_stand_in else "ort:cuda:0"
    found = [device.name for device in ow.devices() if device.name.startswith("ort:")]
    if name not in found:
        context.absent(f"no {name}; ONNX Runtime shows {', '.join(found) or 'nothing'}")
    rows, width = context.pick((4, 64), (32, 256), (128, 1024))
    arrays = layers(8, width, context.seed)
    feed = np.random.default_rng(context.seed).standard_normal((rows, width)).astype(np.float32)
    runs = {}
    for device in (name, context.device):
        x = ow.input("x", (rows, width))
        program = ow.Scheduler([device, "host"]).build(stack(x, ow.weights(arrays, device=device)))
        runs[device] = partial(program.run, x=feed)
        judge(context, device, runs[device](), truth(feed, arrays), 1e-4 if context.is_stand_in else 2e-3)
    times = {device: median(found) for device, found in interleaved(runs, context.pick(3, 5, 15)).items()}
    for device, taken in times.items():
        context.row("a stack of 8 products", device=device, ms=taken * 1e3, over_torch=taken / times[context.device])


def several(context: Context) -> None:
    """Copies between cards, an all-reduce, a product whose weights are in shards. Devices of ``cpu`` stand in."""
    kind = "cpu:" if context.is_stand_in else "torch:cuda:"
    names = [device.name for device in ow.devices() if device.name.startswith(kind)][:4]
    if len(names) < 2:
        context.absent(f"{len(names)} card")
    with context.trying("copies"):
        _copies(context, names)
    with context.trying("sharded product"):
        _sharded(context, names)


def _copies(context: Context, names: Sequence[str]) -> None:
    size = context.pick(MIB, 16 * MIB, 256 * MIB)
    pattern = np.random.default_rng(context.seed).integers(0, 256, size, np.uint8)
    first, second = (ow.device(name) for name in names[:2])
    with first.alloc(size) as a, second.alloc(size) as b, second.open() as stream:
        a.upload(0, pattern)

        def copy() -> None:
            if not stream.copy_from(b, 0, a, 0, size):
                b.upload(0, a.read())
            stream.synchronize()

        copy()
        if not np.array_equal(b.read(), pattern):
            context.failure("copies", "other bytes arrive")
        best = min(seconds(copy) for _ in range(5))
        context.row("copies between cards", way=f"{names[0]} to {names[1]}", MiB=size / MIB, GB_per_s=size / best / 1e9)


def _sharded(context: Context, names: Sequence[str]) -> None:
    """Two products, cut so that a sum over all cards follows: an all-reduce."""
    width, rows = context.pick((512, 4), (1024, 32), (4096, 256))
    rng = np.random.default_rng(context.seed)
    arrays = {name: (rng.standard_normal((width, width)) / width**0.5).astype(np.float32) for name in ("up", "down")}
    feed = rng.standard_normal((rows, width)).astype(np.float32)
    hidden = np.maximum(feed.astype(np.float64) @ arrays["up"].T, 0)
    want = hidden @ arrays["down"].T
    runs = {}
    for what, devices in (("one", names[:1]), ("all", names)):
        shards = {"up": ow.Sharded(devices), "down": ow.Sharded(devices, axis=1)} if len(devices) > 1 else devices[0]
        w, x = ow.weights(arrays, device=shards), ow.input("x", (rows, width))
        scheduler = ow.Scheduler(list(devices), precision="bf16" if len(devices) > 2 else "exact")
        program = scheduler.build(ow.linear(ow.relu(ow.linear(x, w["up"])), w["down"]))
        runs[what] = partial(program.run, x=feed)
        judge(context, f"{what}: sharded product", runs[what](), want, 5e-2 if len(devices) > 2 else 1e-3)
        said = str(program.explain())
        if len(devices) > 1:
            context.row("collectives", cards=len(devices), by_the_backend="collective" in said)
    times = {what: median(found) for what, found in interleaved(runs, context.pick(3, 5, 15)).items()}
    context.row("sharded product", cards=len(names), one_ms=times["one"] * 1e3, all_ms=times["all"] * 1e3,
                faster=times["one"] / times["all"])  # fmt: skip
