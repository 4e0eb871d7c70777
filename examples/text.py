"""A character-level transformer of about a million parameters learns to write like this project's documentation.

    python examples/text.py [--device cpu] [--epochs 4] [--checkpoint text.safetensors] [--curves curves.html]

Training takes some minutes on two cores. With --checkpoint it goes on where it was stopped. Then it writes samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

import opweave as ow
import opweave_training as training

Array = np.ndarray[Any, Any]

TEXTS = ("guide/*", "training", "backend/*", "performance", "weights", "conformance", "troubleshooting")
BATCH = 32
HELD = 0.1
"""The end of the text, this share of it, is kept for validation."""


class Size(NamedTuple):
    """The size of a transformer; ``context`` is how many letters it sees."""

    layers: int = 4
    width: int = 144
    heads: int = 4
    context: int = 64


SIZE = Size()


class Text(NamedTuple):
    """A text as numbers of letters: what is trained on, and what is held out."""

    letters: str
    train: Array
    held: Array


def read_text() -> Text:
    """The pages of the documentation, one after another."""
    folder = Path(__file__).resolve().parents[1] / "docs"
    pages = [page for name in TEXTS for page in sorted(folder.glob(f"{name}.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    letters = "".join(sorted(set(text)))
    ids = np.array([letters.index(letter) for letter in text], np.int32)
    end = int(len(ids) * (1 - HELD))
    return Text(letters, ids[:end], ids[end:])


def examples(ids: Array, context: int, every: int) -> dict[str, Array]:
    """Pieces of a text that start ``every`` letters apart; the label of each letter is the one after it."""
    pieces = np.lib.stride_tricks.sliding_window_view(ids, context + 1)[::every]
    return {"ids": pieces[:, :-1], "labels": pieces[:, 1:]}


def parameters(letters: int, size: Size = SIZE, seed: int = 0) -> dict[str, Array]:
    """First values: normal, products with inputs of variance 1 have results of variance 1; norms begin at 1."""
    width = size.width
    shapes: dict[str, tuple[int, ...]] = {"letters": (letters, width), "norm": (width,), "head": (letters, width)}
    for i in range(size.layers):
        shapes |= {f"{i}.norm1": (width,), f"{i}.norm2": (width,), f"{i}.qkv": (3 * width, width)}
        shapes |= {f"{i}.out": (width, width), f"{i}.up": (4 * width, width), f"{i}.down": (width, 4 * width)}
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def transformer(ids: ow.Tensor, w: Mapping[str, ow.Tensor], size: Size = SIZE) -> ow.Tensor:
    """The scores of the next letter at each place, shape (batch, tokens, letters)."""
    batch, tokens = ids.shape
    places = ow.arange(tokens)
    x = ow.embedding(w["letters"], ids)
    for i in range(size.layers):
        with ow.scope(f"layer{i}"):
            h = ow.linear(ow.rms_norm(x, w[f"{i}.norm1"]), w[f"{i}.qkv"])
            h = h.reshape(batch, tokens, 3, size.heads, -1).transpose(2, 0, 3, 1, 4)
            q, k = ow.rope(h[0], places), ow.rope(h[1], places)
            mixed = ow.attention(q, k, h[2], causal=True).transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + ow.linear(mixed, w[f"{i}.out"])
            h = ow.gelu_tanh(ow.linear(ow.rms_norm(x, w[f"{i}.norm2"]), w[f"{i}.up"]))
            x = x + ow.linear(h, w[f"{i}.down"])
    return ow.linear(ow.rms_norm(x, w["norm"]), w["head"])


def states(arrays: Mapping[str, Array]) -> dict[str, ow.Tensor]:
    made = {name: ow.state(name, array.shape) for name, array in arrays.items()}
    for name, array in arrays.items():
        ow.write(made[name], array)
    return made


def written(
    start: str, length: int, letters: str, params: Mapping[str, ow.Tensor], size: Size = SIZE, *,
    devices: Any = None, temperature: float = 0.7, seed: int = 0,
) -> str:  # fmt: skip
    """``start``, continued letter by letter, each drawn from what the transformer expects."""
    rng = np.random.default_rng(seed)
    step = ow.compile(lambda ids: transformer(ids, params, size), devices=devices)
    ids = [letters.index(letter) for letter in start]
    for _ in range(length):
        seen = ids[-size.context :]
        padded = np.array([seen + [0] * (size.context - len(seen))], np.int32)
        scores = step(padded)[0, len(seen) - 1] / temperature
        shares = np.exp(scores - scores.max())
        ids.append(int(rng.choice(len(letters), p=shares / shares.sum())))
    step.close()
    return "".join(letters[i] for i in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="one or several names, separated by commas")
    parser.add_argument("--epochs", type=int, default=4, help="how often it reads the text")
    parser.add_argument("--checkpoint", type=Path, help="a file to go on from and to write")
    parser.add_argument("--curves", type=Path, help="an HTML page with the curves")
    args = parser.parse_args()
    size, text = SIZE, read_text()
    params = states(parameters(len(text.letters), size))
    data = training.Dataset(examples(text.train, size.context, size.context // 2))
    held = examples(text.held, size.context, size.context)
    total = args.epochs * (len(data) // BATCH)
    devices = [*args.device.split(","), "host"]
    with training.Trainer(
        lambda ids: transformer(ids, params, size), training.AdamW(params), training.cosine(3e-3, total, total // 10),
        batch=BATCH, clip_norm=1.0, devices=devices,
    ) as trainer:  # fmt: skip
        if args.checkpoint is not None and args.checkpoint.exists():
            trainer.load(args.checkpoint, data)
        rows = trainer.fit(data, args.epochs, held, checkpoint=args.checkpoint, progress=True)
    console = Console()
    count = sum(param.size for param in params.values())
    for row in rows:
        assert row.validation is not None
        console.print(f"epoch {row.epoch}: loss {row.train.loss:.3f}, held out "
                      f"{row.validation.loss:.3f}, {row.train.examples * size.context / row.train.seconds:,.0f} "
                      "letters a second", highlight=False)  # fmt: skip
    console.print(f"{count:,} parameters, {len(text.train):,} letters", highlight=False)
    if args.curves is not None:
        args.curves.write_text(training.curves(rows), encoding="utf-8")
    for seed, start in enumerate(("A device ", "The scheduler ", "## ")):
        console.rule()
        console.print(written(start, 300, text.letters, params, size, devices=devices, seed=seed), markup=False)


if __name__ == "__main__":
    main()
