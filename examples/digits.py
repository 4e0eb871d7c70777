"""Classify handwritten digits on every device that is found, and with the network split over two of them.

scikit-learn trains a perceptron on a part of its 1,797 digits; opweave classifies the held-out part with those weights
and must agree with scikit-learn wherever the two best logits are not practically equal.

    python examples/digits.py [--devices opencl,cpu] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import opweave as ow

Array = np.ndarray[Any, Any]

TIE = 1e-5
"""Rows whose two best logits are closer than this may be labelled either way."""


class Placement(NamedTuple):
    """Where the layers' weights lie: one device for all, or one for the first layers and one for the last."""

    name: str
    devices: list[str]
    weights: str | dict[str, str]


class Network(NamedTuple):
    """scikit-learn's perceptron as plain arrays, and the images that it has not seen."""

    arrays: dict[str, Array]
    images: Array
    labels: Array
    expected: Array  # scikit-learn's own answers

    @property
    def layers(self) -> int:
        return len(self.arrays) // 2


def train(seed: int = 0) -> Network:
    """Train on two thirds of the digits. Layer i's weight has shape (out, in), as `ow.linear` takes it."""
    images, labels = load_digits(return_X_y=True)
    seen, unseen, seen_labels, unseen_labels = train_test_split(
        (images / 16).astype(np.float32), labels, test_size=1 / 3, random_state=seed, stratify=labels
    )
    model = MLPClassifier((128, 64, 32), max_iter=150, early_stopping=True, random_state=seed)
    model.fit(seen, seen_labels)
    arrays = {}
    for i, (weight, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        arrays[f"layer{i}.weight"] = np.ascontiguousarray(weight.T, dtype=np.float32)
        arrays[f"layer{i}.bias"] = np.asarray(bias, dtype=np.float32)
    return Network(arrays, np.ascontiguousarray(unseen), unseen_labels, model.predict(unseen))


def logits(x: ow.Tensor, weights: ow.Weights, layers: int) -> ow.Tensor:
    """The perceptron: linear layers with relu between them."""
    for i in range(layers):
        x = ow.linear(x, weights[f"layer{i}.weight"], weights[f"layer{i}.bias"]).named(f"layer{i}")
        if i < layers - 1:
            x = ow.relu(x)
    return x


def find_devices(note: list[str]) -> list[str]:
    """Every device but `host`; without a second one two virtual CPU devices with separate memories."""
    try:
        ow.device("opencl")
    except (ow.PluginError, ow.UnknownNameError) as error:
        os.environ.setdefault("OPWEAVE_CPU_DEVICES", "2")
        note.append(f"no OpenCL device ({str(error).splitlines()[0]}): using two virtual CPU devices instead")
    return [d.name for d in ow.devices() if d.kind is not ow.Kind.HOST]


def placements(names: list[str], layers: int) -> list[Placement]:
    """Each device alone, then the first two sharing the layers."""
    result = [Placement(name, [name], name) for name in names]
    if len(names) > 1:
        first, second = names[:2]
        half = layers // 2
        split = {f"layer{i}.*": first if i < half else second for i in range(layers)}
        result.append(Placement(f"{first} + {second}", [first, second], split))
    return result


def classify(network: Network, placement: Placement) -> dict[str, Any]:
    """Build for a placement, classify, compare with scikit-learn, and time the whole held-out part."""
    weights = ow.weights(network.arrays, device=placement.weights)
    images = ow.input("images", network.images.shape)
    scores = logits(images, weights, network.layers)
    scheduler = ow.Scheduler(placement.devices)
    program = scheduler.build({"scores": scores, "labels": ow.argmax(scores, axis=1)})
    result = program.run(images=network.images)
    seconds = []
    for _ in range(9):
        start = perf_counter()
        program.run(images=network.images)
        seconds.append(perf_counter() - start)
    best_two = np.sort(result["scores"], axis=1)[:, -2:]
    differs = np.flatnonzero(result["labels"] != network.expected)
    margins = best_two[:, 1] - best_two[:, 0]
    report = {
        "placement": placement.name,
        "accuracy": float(np.mean(result["labels"] == network.labels)),
        "images_per_second": len(network.images) / median(seconds),
        "splits": len(program.splits),
        "copies": program.n_copies,
        "ties": [int(row) for row in differs if margins[row] < TIE],
        "disagreements": [int(row) for row in differs if margins[row] >= TIE],
        "explain": str(program.explain()),
    }
    scheduler.close()
    return report


def show(console: Console, network: Network, notes: list[str], reports: list[dict[str, Any]]) -> None:
    for note in notes:
        console.print(f"[yellow]{note}[/]")
    devices = Table("device", "kind", "description", title="Devices", title_justify="left")
    for device in ow.devices():
        devices.add_row(device.name, device.kind.value, device.description)
    console.print(devices)
    console.print("\n[bold]Placement of the split network[/]" if len(reports) > 1 else "\n[bold]Placement[/]")
    console.print(reports[-1]["explain"], highlight=False, markup=False)
    accuracy = float(np.mean(network.expected == network.labels))
    table = Table(title=f"\n{len(network.images)} held-out digits", title_justify="left")
    table.add_column("placement", no_wrap=True)
    for title in ("accuracy", "sklearn", "images/s", "splits", "copies"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("labels")
    for r in reports:
        if r["disagreements"]:
            verdict = f"[red]differ in rows {r['disagreements']}[/]"
        else:
            verdict = "[green]equal[/]" + (f", but for ties in rows {r['ties']}" if r["ties"] else "")
        table.add_row(
            r["placement"], f"{r['accuracy']:.4f}", f"{accuracy:.4f}", f"{r['images_per_second']:,.0f}",
            str(r["splits"]), str(r["copies"]), verdict,
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="names separated by commas, e.g. opencl,cpu; default: every device found")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    args = parser.parse_args()
    notes: list[str] = []
    try:
        if args.devices:
            names = [ow.device(name.strip()).name for name in args.devices.split(",")]
        else:
            names = find_devices(notes)
    except ow.OpweaveError as error:
        print(f"digits: {error}", file=sys.stderr)
        return 2
    progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), transient=True, console=Console(stderr=True))
    with progress:
        progress.add_task("scikit-learn is training the perceptron")
        network = train()
    reports = [classify(network, p) for p in placements(names, network.layers)]
    if args.json:
        accuracy = float(np.mean(network.expected == network.labels))
        print(json.dumps({"notes": notes, "scikit_learn_accuracy": accuracy, "placements": reports}, indent=2))
    else:
        show(Console(), network, notes, reports)
    return 1 if any(r["disagreements"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
