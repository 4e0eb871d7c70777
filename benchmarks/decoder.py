"""A prompt and single tokens of a GGUF model, by opweave and by llama.cpp in one process, in turns.

    python benchmarks/decoder.py m.gguf [--devices cpu ...] [--prompt 512] [--contexts 100 1000] [--json]

Needs llama-cpp-python. Both use as many threads, f16 keys and values, and round activations to 8 bits beside quantized
weights. Prints tokens a second, the best of the rounds, and our rate over llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

import opweave_models

ROUNDS = 3
STEPS = 16
Measure = Callable[[list[int], int], tuple[float, float]]


def ours(path: str, device: str, context: int) -> Measure:
    model = opweave_models.load(path, device, context=context, kv="f16", precision="int8")
    model.warm()

    def measure(ids: list[int], steps: int) -> tuple[float, float]:
        with model.session() as session:
            session.feed(ids)
            begin = perf_counter()
            token = int(session.logits().argmax())
            first = perf_counter()
            for _ in range(steps):
                session.feed([token])
                token = int(session.logits().argmax())
            return len(ids) / (first - begin), steps / (perf_counter() - first)

    return measure


def theirs(path: str, threads: int, context: int) -> Measure:
    import llama_cpp

    options = {"n_batch": 512, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    model: Any = llama_cpp.Llama(path, n_ctx=context, **options)

    def measure(ids: list[int], steps: int) -> tuple[float, float]:
        model.reset()
        model._ctx.kv_cache_clear()
        begin = perf_counter()
        model.eval(ids)
        token = int(np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),)).argmax())
        first = perf_counter()
        for _ in range(steps):
            model.eval([token])
            token = int(np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),)).argmax())
        return len(ids) / (first - begin), steps / (perf_counter() - first)

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    longest = max(args.contexts) + STEPS + 1
    runners = {"llama.cpp": theirs(args.path, args.threads, longest)}
    runners |= {device: ours(args.path, device, longest) for device in args.devices}
    vocabulary = opweave_models.open_model(args.path).config.vocabulary
    rows: list[dict[str, Any]] = []
    for context in args.contexts:
        ids = np.random.default_rng(0).integers(5, vocabulary, context).tolist()
        best = dict.fromkeys(runners, (0.0, 0.0))
        for _ in range(ROUNDS):
            for name, run in runners.items():
                prompt, answer = run(ids, STEPS)
                best[name] = max(prompt, best[name][0]), max(answer, best[name][1])
        for name, (prompt, answer) in best.items():
            ratio = [rate / peer for rate, peer in zip((prompt, answer), best["llama.cpp"], strict=True)]
            rows.append({"context": context, "runner": name, "prompt": prompt, "answer": answer,
                         "prompt_ratio": ratio[0], "answer_ratio": ratio[1]})  # fmt: skip
            if not args.json:
                print(f"{context:6} tokens  {name:12} prompt {prompt:8,.0f}/s ({ratio[0]:.2f})  "
                      f"answer {answer:6.1f}/s ({ratio[1]:.2f})", flush=True)  # fmt: skip
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
