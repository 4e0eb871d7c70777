"""Classify handwritten digits on every device that is found, and with the network split over two of them.

scikit-learn trains a perceptron on a part of its 1,797 digits; opweave classifies the held-out part with those weights
and must agree with scikit-learn wherever the two best logits are not practically equal. Then opweave itself trains a
perceptron and a small convolutional network, on every device and split over two.

    python examples/digits.py [--devices opencl,cpu] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import prod
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
import opweave_training as training

Array = np.ndarray[Any, Any]

TIE = 1e-5
"""Rows whose two best logits are closer than this may be labelled either way."""


PERCEPTRON = {
    "layer0.weight": (128, 64), "layer0.bias": (128,), "layer1.weight": (64, 128), "layer1.bias": (64,),
    "layer2.weight": (10, 64), "layer2.bias": (10,),
}  # fmt: skip
CONVOLUTIONAL = {
    "layer0.weight": (8, 1, 3, 3), "layer0.bias": (8,), "layer1.weight": (16, 8, 3, 3), "layer1.bias": (16,),
    "layer2.weight": (10, 256), "layer2.bias": (10,),
}  # fmt: skip
LEAST = {"perceptron": 0.97, "convolutional": 0.985}
"""The share of held-out digits that a network trained here has to label right."""


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
    seen: dict[str, Array]  # images and labels to train on

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
    return Network(arrays, np.ascontiguousarray(unseen), unseen_labels, model.predict(unseen),
                   {"images": seen, "labels": seen_labels.astype(np.int32)})  # fmt: skip


def logits(x: ow.Tensor, weights: Mapping[str, ow.Tensor], layers: int) -> ow.Tensor:
    """The perceptron: linear layers with relu between them."""
    for i in range(layers):
        x = ow.linear(x, weights[f"layer{i}.weight"], weights[f"layer{i}.bias"]).named(f"layer{i}")
        if i < layers - 1:
            x = ow.relu(x)
    return x


def convolutional(images: ow.Tensor, weights: Mapping[str, ow.Tensor]) -> ow.Tensor:
    """Two convolutions with relu, the largest of 2 x 2 pixels, a linear layer."""
    x = images.reshape(-1, 1, 8, 8)
    for i in range(2):
        x = ow.relu(ow.conv2d(x, weights[f"layer{i}.weight"], weights[f"layer{i}.bias"], padding=1))
    return ow.linear(ow.max_pool2d(x, 2).reshape(x.shape[0], -1), weights["layer2.weight"], weights["layer2.bias"])


def parameters(
    shapes: Mapping[str, tuple[int, ...]], device: str | Mapping[str, str] | None = None, seed: int = 0
) -> dict[str, ow.Tensor]:
    """States with the first values of He et al., "Delving Deep into Rectifiers", 2015; biases are 0.

    Args:
        shapes: name -> shape.
        device: where they lie: a device for all, or for names of a pattern.
    """
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in shapes.items():
        patterns = {"*": device} if not isinstance(device, Mapping) else device
        place = next(place for pattern, place in patterns.items() if fnmatchcase(name, pattern))
        params[name] = ow.state(name, shape, device=place)
        if len(shape) > 1:
            ow.write(params[name], rng.standard_normal(shape) * (2 / prod(shape[1:])) ** 0.5)
    return params


def learn(network: Network, placement: Placement) -> dict[str, float]:
    """Train both networks on a placement. Returns the share of held-out digits that each labels right."""
    held = {"images": network.images, "labels": network.labels.astype(np.int32)}
    found = {}
    models: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., ow.Tensor], int]] = {
        "perceptron": (PERCEPTRON, lambda x, params: logits(x, params, 3), 20),
        "convolutional": (CONVOLUTIONAL, convolutional, 12),
    }
    for name, (shapes, model, epochs) in models.items():
        params = parameters(shapes, placement.weights)
        steps = epochs * (len(network.seen["images"]) // 32)

        def predicted(images: ow.Tensor) -> ow.Tensor:
            return model(images, params)  # noqa: B023 - called before the loop goes on

        with training.Trainer(
            predicted, training.AdamW(params), training.cosine(0.01, steps, 20), batch=32,
            devices=[*placement.devices, "host"],
        ) as trainer:  # fmt: skip
            trainer.fit(network.seen, epochs)
            found[name] = trainer.evaluate(held).accuracy
    return found


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
    return report | {"trained": learn(network, placement)}


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
    learned = Table("placement", title="\nTrained by opweave, accuracy on the held-out digits", title_justify="left")
    for name in LEAST:
        learned.add_column(name, justify="right")
    for r in reports:
        if r["disagreements"]:
            verdict = f"[red]differ in rows {r['disagreements']}[/]"
        else:
            verdict = "[green]equal[/]" + (f", but for ties in rows {r['ties']}" if r["ties"] else "")
        table.add_row(
            r["placement"], f"{r['accuracy']:.4f}", f"{accuracy:.4f}", f"{r['images_per_second']:,.0f}",
            str(r["splits"]), str(r["copies"]), verdict,
        )  # fmt: skip
        learned.add_row(r["placement"], *[
            f"{share:.4f}" if share >= LEAST[name] else f"[red]{share:.4f}, less than {LEAST[name]}[/]"
            for name, share in r["trained"].items()
        ])  # fmt: skip
    console.print(table)
    console.print(learned)


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
    reports = []
    with progress:
        task = progress.add_task("scikit-learn is training the perceptron")
        network = train()
        for placement in placements(names, network.layers):
            progress.update(task, description=f"opweave is classifying and training on {placement.name}")
            reports.append(classify(network, placement))
    if args.json:
        accuracy = float(np.mean(network.expected == network.labels))
        print(json.dumps({"notes": notes, "scikit_learn_accuracy": accuracy, "placements": reports}, indent=2))
    else:
        show(Console(), network, notes, reports)
    unlearned = [r for r in reports for name, share in r["trained"].items() if share < LEAST[name]]
    return 1 if unlearned or any(r["disagreements"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
