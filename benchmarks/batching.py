"""Tokens a second of several sequences of a GGUF model that are answered together, by opweave and by llama.cpp.

    python benchmarks/batching.py m.gguf ... [--devices cpu ...] [--sequences 1 4 16] [--json]

Prompts of 64 tokens, then 32 tokens for each sequence, the best of the rounds. llama.cpp's server runs in this process
where xllamacpp is installed, with as many slots and threads; the ratio is of all tokens of a round, prompts included.

Target: ahead of llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

import opweave_models
from benchmarks import _llama
from benchmarks._llama import PEER
from benchmarks._measure import Report, parser

PROMPT = 64
STEPS = 32
Measure = Callable[[list[list[int]]], float]


def ours(stack: ExitStack, path: str, device: str, sequences: int) -> Measure:
    model = stack.enter_context(opweave_models.load(path, device, context=PROMPT + STEPS + 1, sequences=sequences))
    model.warm()

    def measure(prompts: list[list[int]]) -> float:
        sessions = [model.session() for _ in prompts]
        begin = perf_counter()
        found = model.advance({s.sequence: ids for s, ids in zip(sessions, prompts, strict=True)})
        for _ in range(STEPS - 1):
            found = model.advance({sequence: [int(logits.argmax())] for sequence, logits in found.items()})
        seconds = perf_counter() - begin
        for session in sessions:
            session.close()
        return len(prompts) * STEPS / seconds

    return measure


def theirs(path: str, sequences: int) -> Measure:
    server = _llama.server(path, sequences, 256 * sequences)

    def answer(ids: list[int]) -> None:
        body = json.dumps(_llama.request(ids, STEPS)).encode()
        with urllib.request.urlopen(f"{server.listening_address}/completion", body) as response:
            response.read()

    def measure(prompts: list[list[int]]) -> float:
        with ThreadPoolExecutor(len(prompts)) as pool:
            begin = perf_counter()
            list(pool.map(answer, prompts))
            return len(prompts) * STEPS / (perf_counter() - begin)

    return measure


def compare(report: Report, path: str, given: argparse.Namespace) -> None:
    """One file with every number of sequences, by every runner."""
    vocabulary = opweave_models.open_model(path).config.vocabulary
    for count in given.sequences:
        with ExitStack() as stack:
            runners = {device: ours(stack, path, device, count) for device in given.devices}
            if find_spec("xllamacpp") is not None:
                runners[PEER] = theirs(path, count)
            prompts = np.random.default_rng(0).integers(5, vocabulary, (count, PROMPT)).tolist()
            best = dict.fromkeys(runners, 0.0)
            for _ in range(1 if given.quick else 3):
                for name, run in runners.items():
                    best[name] = max(best[name], run(prompts))
        for name, rate in best.items():
            ratio = {"ratio": rate / best[PEER]} if PEER in best else {}
            report.row(model=Path(path).stem, sequences=count, by=name, tokens_a_second=rate, **ratio)
        if PEER in best:
            ahead = best[PEER] / max(best[device] for device in given.devices)
            report.target(f"{Path(path).stem}, {count} sequences", ahead, 1, "times llama.cpp's time")


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("paths", nargs="+", metavar="m.gguf")
    command.add_argument("--devices", nargs="+", default=["cpu"])
    command.add_argument("--sequences", nargs="+", type=int, default=[1, 4, 16])
    given = command.parse_args()
    report = Report("batching", given)
    for path in given.paths:
        compare(report, path, given)
    report.finish("Sequences that are answered together")


if __name__ == "__main__":
    main()
