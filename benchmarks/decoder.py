"""A prompt and single tokens of GGUF models, by opweave and by llama.cpp in one process, in turns.

    python benchmarks/decoder.py m.gguf ... [--devices cpu cpu,opencl:0 ...] [--contexts 100 1000] [--steps 32]

Both use as many threads, f16 keys and values, and round activations to 8 bits beside quantized weights. Figures are
tokens a second, the best of the rounds; *ratio* is ours over llama.cpp's, where xllamacpp is installed; *slowest* is
the slowest step as a multiple of the median, in the best round: ``--steps 500`` shows how even many are.

``cpu,opencl:0`` is a model in two halves. Where each device is measured alone too, *to parts* is a token's time over
what the layers of each device take there, by bytes of weights. Remote devices are those of ``OPWEAVE_REMOTE``.

Targets: ahead of llama.cpp; the slowest step at most twice the median; several devices at most 1.1 times the sum of
their parts, 1.2 times with a remote one.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

import opweave_models
from benchmarks import _llama
from benchmarks._llama import PEER
from benchmarks._measure import Report, parser
from opweave_models.commands import rates


def compare(report: Report, path: str, given: argparse.Namespace) -> None:
    """One file, in every context, by every runner."""
    longest = max(given.contexts) + given.steps + 1
    with ExitStack() as stack:
        models = {}
        for name in given.devices:
            split = [1.0] * len(name.split(",")) if "," in name else None
            loaded = opweave_models.load(path, name, context=longest, kv="f16", precision="int8", split=split)
            models[name] = stack.enter_context(loaded)
            models[name].warm()
        runners = {name: partial(rates, model) for name, model in models.items()}
        if find_spec("xllamacpp") is not None:
            runners[PEER] = partial(_llama.rates, _llama.server(path, 1, longest, given.threads))
        for context in given.contexts:
            ids = np.random.default_rng(0).integers(5, loaded.config.vocabulary, context).tolist()
            best = dict.fromkeys(runners, (0.0, 0.0, inf))
            for _ in range(1 if given.quick else 3):
                for name, run in runners.items():
                    prompt, answer, slowest = run(ids, given.steps)
                    best[name] = max(prompt, best[name][0]), max(answer, best[name][1]), min(slowest, best[name][2])
            show(report, f"{Path(path).stem}, {context:,}", best, models)


def show(
    report: Report, what: str, best: dict[str, tuple[float, float, float]], models: dict[str, opweave_models.Model]
) -> None:
    """Rows and targets of a file and a context."""
    peer = best.get(PEER)
    for name, (prompt, answer, slowest) in best.items():
        row: dict[str, float | str] = {"model_and_tokens": what, "by": name, "prompt": prompt, "answer": answer}
        if peer:
            row |= {"prompt_ratio": prompt / peer[0], "answer_ratio": answer / peer[1]}
        if isfinite(slowest):
            row["slowest"] = slowest
            report.target(f"{what}: slowest step by {name}", slowest, 2, "medians")
        if "," in name and best.keys() >= set(name.split(",")):
            shares = models[name].plan.shares
            parts = sum(share.weights / best[share.device][1] for share in shares)
            row["to_parts"] = to_parts = sum(share.weights for share in shares) / answer / parts
            report.target(f"{what}: {name} to its parts", to_parts, 1.2 if "remote" in name else 1.1, "")
        report.row(**row)
    if peer:
        for i, part in enumerate(("prompt", "answer")):
            report.target(
                f"{what}: {part}", peer[i] / max(best[name][i] for name in models), 1, "times llama.cpp's time"
            )


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("paths", nargs="+", metavar="m.gguf")
    command.add_argument("--devices", nargs="+", default=["cpu"])
    command.add_argument("--contexts", nargs="+", type=int, default=[100, 1000])
    command.add_argument("--steps", type=int, default=32)
    command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = command.parse_args()
    report = Report("decoder", given)
    for path in given.paths:
        compare(report, path, given)
    report.finish("Tokens a second of language models")


if __name__ == "__main__":
    main()
