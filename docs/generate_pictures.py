"""Makes the pictures of README and guide in ``docs/pictures``, from real runs: ``python docs/generate_pictures.py``.

Needs what the tests need, and Chromium, which makes pictures of pages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html import escape
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
from sklearn.datasets import load_digits

import opweave as ow
import opweave_cost
import opweave_onnx
import opweave_training as training
from opweave.tracing import TraceEvent

PICTURES: Final = Path(__file__).with_name("pictures")

COLOURS: Final = {"plan": "#3b76b5", "copy": "#d9822b"}

Page = Callable[[Path], None]


def model() -> opweave_onnx.Model:
    """The model of the README, over two devices."""
    path = files("magika") / "models/standard_v3_3/model.onnx"
    return opweave_onnx.load(path, devices=["cpu", "opencl"], weights={"*Conv_0*": "opencl", "*": "cpu"})


def explain(page: Path) -> None:
    """Which node of the model runs where, and why."""
    with model() as loaded:
        loaded(bytes=np.zeros((1, 2048), np.int32))
        loaded.explain().save(page)


def mlp(*devices: str) -> ow.Tensor:
    """Products of 1,024 features, each on the next device."""
    rng = np.random.default_rng(0)
    rows = ow.input("rows", (256, 1024))
    for i, device in enumerate(devices):
        with ow.scope(f"layer{i}"):
            weights = ow.weights({f"w{i}": rng.standard_normal((1024, 1024), np.float32) / 32}, device=device)
            rows = ow.gelu(ow.linear(rows, weights[f"w{i}"]))
    return ow.softmax(rows)


def profile(page: Path) -> None:
    """Where the time of a run over two devices goes."""
    with ow.Scheduler(["cpu", "opencl"]) as scheduler:
        program = scheduler.build(mlp("cpu", "opencl", "cpu"))
        opweave_cost.profile_run(program, {"rows": np.ones((256, 1024), np.float32)}, runs=20).save(page)


def timeline(page: Path) -> None:
    """Runs over two devices that overlap; each of these computes in the thread that is traced."""
    os.environ["OPWEAVE_CPU_DEVICES"] = "2"
    batch = np.ones((256, 1024), np.float32)
    with ow.Scheduler(["cpu:0", "cpu:1"], parallel=True) as scheduler:
        program = scheduler.build(mlp("cpu:0", "cpu:1"))
        program.run(rows=batch)
        with opweave_cost.trace() as recorded:
            for future in [program.submit(rows=batch) for _ in range(6)]:
                future.result()
    page.write_text(drawn([event for event in recorded.events if event.kind in COLOURS]), encoding="utf-8")


def drawn(events: list[TraceEvent]) -> str:
    """A bar for each event, in a row for each device."""
    tracks = sorted({str(event.data["device"]) for event in events})
    begin, end = min(event.start for event in events), max(event.end for event in events)
    scale = 820 / (end - begin)
    bars = [f'<text x="0" y="{60 * i + 34}">{escape(name)}</text>' for i, name in enumerate(tracks)]
    for event in events:
        x, y = 110 + (event.start - begin) * scale, 60 * tracks.index(str(event.data["device"])) + 10
        label = escape(f"{event.kind} {event.name}")
        bars.append(f'<rect x="{x:.1f}" y="{y}" width="{max(1, (event.end - event.start) * scale):.1f}" height="40" '
                    f'fill="{COLOURS[event.kind]}" stroke="white"><title>{label}</title></rect>')  # fmt: skip
    bottom = 60 * len(tracks) + 24
    bars += [f'<rect x="{110 + 90 * i}" y="{bottom - 14}" width="14" height="14" fill="{colour}"/>'
             f'<text x="{130 + 90 * i}" y="{bottom - 2}">{kind}</text>'
             for i, (kind, colour) in enumerate(COLOURS.items()) if any(e.kind == kind for e in events)]  # fmt: skip
    bars.append(f'<text x="860" y="{bottom - 2}">{(end - begin) / 1e6:.1f} ms</text>')
    return (f'<body style="font: 13px sans-serif; margin: 16px"><svg width="960" height="{bottom + 10}">'
            f"{''.join(bars)}</svg></body>")  # fmt: skip


def curves(page: Path) -> None:
    """A perceptron that learns to classify digits."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    rng = np.random.default_rng(0)
    params = {"hidden": ow.state("hidden", (64, 64)), "out": ow.state("out", (10, 64))}
    for param in params.values():
        ow.write(param, rng.standard_normal(param.shape) / 8)

    def perceptron(pixels: ow.Tensor) -> ow.Tensor:
        return ow.linear(ow.relu(ow.linear(pixels, params["hidden"])), params["out"])

    order = rng.permutation(len(labels))
    learn, check = ({"pixels": images[part], "labels": labels[part]} for part in (order[:1400], order[1400:]))
    with training.Trainer(perceptron, training.AdamW(params), training.cosine(0.01, 440), batch=64, devices="cpu") as t:
        rows = t.fit(learn, epochs=20, validation=check)
    page.write_text(training.curves(rows), encoding="utf-8")


def photograph(make: Page, height: int, folder: Path, chromium: str) -> None:
    """A picture of the page that ``make`` writes, in a process of its own: devices are found once in each."""
    page = folder / f"{make.__name__}.html"
    maker = get_context("spawn").Process(target=make, args=(page,))
    maker.start()
    maker.join()
    if maker.exitcode:
        sys.exit(f"{make.__name__} failed")
    subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={folder / 'profile'}", f"--window-size=1000,{height}",
         f"--screenshot={PICTURES / make.__name__}.png", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is not installed")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for make, height in ((explain, 900), (profile, 700), (timeline, 190), (curves, 760)):
            photograph(make, height, Path(folder), chromium)


if __name__ == "__main__":
    main()
