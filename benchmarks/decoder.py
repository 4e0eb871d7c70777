"""A prompt and single tokens of a GGUF model, by opweave and by llama.cpp in one process, in turns.

    python benchmarks/decoder.py m.gguf [--devices cpu ...] [--contexts 100 1000] [--steps 16] [--json]

Both use as many threads, f16 keys and values, and round activations to 8 bits beside quantized weights. Prints tokens a
second, the best of the rounds; our rate over llama.cpp's, where xllamacpp is installed; and the slowest step as
a multiple of the median, in the best round: ``--steps 500`` shows how even many are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

import opweave_models
from benchmarks import _llama
from opweave_models.commands import rates

ROUNDS = 3
Measure = Callable[[list[int], int], tuple[float, float, float]]


def ours(path: str, device: str, context: int) -> Measure:
    model = opweave_models.load(path, device, context=context, kv="f16", precision="int8")
    model.warm()
    return partial(rates, model)


def theirs(path: str, threads: int, context: int) -> Measure:
    server = _llama.server(path, 1, context, threads)

    def measure(ids: list[int], steps: int) -> tuple[float, float, float]:
        times = server.handle_completions(_llama.request(ids, steps))["timings"]
        return times["prompt_per_second"], times["predicted_per_second"], inf

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    longest = max(args.contexts) + args.steps + 1
    runners = {"llama.cpp": theirs(args.path, args.threads, longest)} if find_spec("xllamacpp") else {}
    runners |= {device: ours(args.path, device, longest) for device in args.devices}
    vocabulary = opweave_models.open_model(args.path).config.vocabulary
    rows: list[dict[str, Any]] = []
    for context in args.contexts:
        ids = np.random.default_rng(0).integers(5, vocabulary, context).tolist()
        best = dict.fromkeys(runners, (0.0, 0.0, inf))
        for _ in range(ROUNDS):
            for name, run in runners.items():
                prompt, answer, slowest = run(ids, args.steps)
                best[name] = max(prompt, best[name][0]), max(answer, best[name][1]), min(slowest, best[name][2])
        for name, (prompt, answer, slowest) in best.items():
            peer = best.get("llama.cpp")
            ratio = (prompt / peer[0], answer / peer[1]) if peer else (None, None)
            shown = slowest if isfinite(slowest) else None
            rows.append({"context": context, "runner": name, "prompt": prompt, "answer": answer, "slowest": shown,
                         "prompt_ratio": ratio[0], "answer_ratio": ratio[1]})  # fmt: skip
            if not args.json:
                beside = [f" ({each:.2f})" if each else "" for each in ratio]
                print(f"{context:6} tokens  {name:12} prompt {prompt:8,.0f}/s{beside[0]}  answer {answer:6.1f}/s"
                      f"{beside[1]}" + (f"  slowest step {shown:.2f} medians" if shown else ""),
                      flush=True)  # fmt: skip
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
