"""What each limit of a device's kernels saves in programs that people run: an encoder, a step of a decoder, training
steps, a network that finds text.

    python benchmarks/limits.py [--device cpu] [--limits NAME ...] [--programs NAME ...] [--json]

A limit that a program reads is set to the ends of its range: one of them leads all operands the same way through a
kernel, so that the other way, or dividing the work, is switched off. The figure is the time of a run then, over its
time with the limits as they are; both programs are there at once, and take turns. A limit whose greatest figure is
near 1 earns nothing in these programs. ``inf``: a run takes more than ten seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

import opweave as ow
from opweave.contract import NEVER
from opweave_conformance.decisions import decisions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks import training
from benchmarks._measure import interleaved, machine
from benchmarks.card import models

SAMPLES: Final = 7
PATIENCE: Final = 10
"""Seconds that a program is built and first run in."""

LLAMA: Final = models.Llama(8, 512, 8, 4, 64, 1408, 32000, 1024)

Build = Callable[[str], Callable[[], Any]]
"""Of a device's name: builds a program on it, and returns its run."""


def of_task(task: models.Task, device: str) -> Callable[[], Any]:
    quantized = task.dtype == "q4_0"
    arrays = {
        name: ow.quantize(array, task.dtype) if quantized and array.ndim == 2 else array
        for name, array in task.arrays.items()
    }
    weights: dict[str, ow.Tensor] = dict(ow.weights(arrays, device=device))
    for name, shape in task.caches.items():
        weights[name] = ow.state(name, shape, "f16" if quantized else task.dtype, device=device)
    inputs = {name: ow.input(name, array.shape, array.dtype) for name, array in task.feeds.items()}
    scheduler = ow.Scheduler([device, "host"], precision="int8" if quantized else "exact")
    return partial(scheduler.build(task.ours(inputs, weights)).run, dict(task.feeds))


def of_training(name: str, device: str) -> Callable[[], Any]:
    # A batch that is learnt by heart has gradients so small that processors compute with them at half the speed.
    return training.ours(training.tasks()[name], device, 1 << 40, rate=0.0)[1]


def of_ocr(device: str) -> Callable[[], Any]:
    import opweave_onnx
    from examples import ocr

    network = opweave_onnx.load(ocr.FOLDER / f"{ocr.FILES['find']}.onnx", [device, "host"])
    image = ocr.normalized(ocr.picture())  # type: ignore[no-untyped-call]
    return partial(network.run, {network.inputs[0].name: image})


def programs() -> dict[str, Build]:
    arrays = models.minilm_arrays()
    step = models.decoder_step(LLAMA, "f32")
    return {
        **{f"encoder {batch}x{tokens}": partial(of_task, models.encoder(arrays, batch, tokens, "f32"))
           for batch, tokens in ((1, 16), (1, 128), (8, 128))},
        "encoder 1x128 bf16": partial(of_task, models.encoder(arrays, 1, 128, "bf16")),
        "decoder f32": partial(of_task, step),
        "decoder bf16": partial(of_task, models.decoder_step(LLAMA, "bf16")),
        "decoder q4_0": partial(of_task, step._replace(dtype="q4_0")),
        **{f"training {name}": partial(of_training, name) for name in training.tasks()},
        "ocr": of_ocr,
    }  # fmt: skip


def ends(limit: ow.Limit) -> list[int]:
    """The values of a limit that are measured: all of a choice between a few ways, else the least and the greatest."""
    values = list(limit.values().values())
    few = values[-1] - values[0] < len(values)
    return [v for v in (values if few else [limit.smallest, values[-1]]) if v != limit.value]


def shown(value: int) -> str:
    return "never" if value == NEVER else f"{value:,}"


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def ratio(build: Build, device: str, limit: ow.Limit, value: int, usual: Callable[[], Any]) -> float:
    try:
        with limit.at(value), patience(PATIENCE):
            other = build(device)
            other()
    except TimeoutError:
        return inf
    times = interleaved({"usual": usual, "other": other}, SAMPLES, 5e-3)
    return min(times["other"]) / min(times["usual"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limits", nargs="+")
    parser.add_argument("--programs", nargs="+")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    limits = {limit.name: limit for limit in ow.device(args.device).limits}
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    for program, build in programs().items():
        if args.programs and program not in args.programs:
            continue
        with decisions() as read:
            build(args.device)()  # networks of files are built when they are first run
        usual = build(args.device)  # not with what observed the limits
        asked = [(limits[n], v) for n in read if not args.limits or n in args.limits for v in ends(limits[n])]
        for limit, value in track(asked, program, console=console, transient=True):
            found = ratio(build, args.device, limit, value, usual)
            rows.append({"program": program, "limit": limit.name, "usual": limit.value, "value": value, "ratio": found})
            console.print(f"{program}: {limit.name}={shown(value)} {found:.2f}", highlight=False)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    table = Table("limit", "as it is", "set to", "run takes", "in", title=f"Limits of {args.device}, greatest first")
    best = {row["limit"]: row for row in sorted(rows, key=lambda row: float(row["ratio"]))}
    for row in sorted(best.values(), key=lambda row: -float(row["ratio"])):
        ratio_of_row, usual_value = f"{row['ratio']:.2f} times", shown(row["usual"])
        table.add_row(row["limit"], usual_value, shown(row["value"]), ratio_of_row, row["program"])
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
