"""Seconds from the start of a process to the first token of a GGUF model, and its memory, by device and by llama.cpp.

    python benchmarks/loading.py m.gguf [--devices cpu torch:cpu ...] [--json]

Each is measured in processes of its own, the best of the rounds: the file is in the system's cache by then. *anonymous*
is memory without the pages of files. llama.cpp is measured where xllamacpp is installed.

Targets: a second to the first token; at most 1.5 times the file in memory, beyond what a process takes that computes
one small product on the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._llama import PEER
from benchmarks._measure import Report, parser

PROMPT = "The capital of France is"

OURS = """
import json, sys, time
begin = time.perf_counter()
import opweave_models
llm = opweave_models.load(sys.argv[1], sys.argv[2], context=512)
loaded = time.perf_counter() - begin
next(iter(llm.generate(sys.argv[3], max_tokens=1)))
"""
BARE = """
import json, sys, time
begin = loaded = time.perf_counter()
import numpy, opweave, opweave_models
with opweave.Scheduler(opweave.device(sys.argv[2])) as scheduler:
    rows = numpy.ones((64, 64), numpy.float32)
    scheduler.build(opweave.input("x", (64, 64)) @ opweave.input("y", (64, 64))).run(x=rows, y=rows)
"""
THEIRS = """
import json, sys, time
begin = time.perf_counter()
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.warmup = sys.argv[1], 512, False
server = xllamacpp.Server(options)
loaded = time.perf_counter() - begin
server.handle_completions({"prompt": sys.argv[3], "n_predict": 1})
"""
END = """
taken = time.perf_counter() - begin
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"loaded": loaded, "token": taken, "anonymous": int(status["RssAnon"].split()[0]) * 1024,
                  "resident": int(status["VmRSS"].split()[0]) * 1024}))
"""


def measured(rounds: int, code: str, *arguments: str) -> dict[str, float]:
    """The best of some processes."""
    command = [sys.executable, "-c", code + END, *arguments]
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as installed
    runs = []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=compiled)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda run: run["token"])


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("path", metavar="m.gguf")
    command.add_argument("--devices", nargs="+", default=["cpu"])
    given = command.parse_args()
    report = Report("loading", given)
    size = Path(given.path).stat().st_size
    runners = dict.fromkeys(given.devices, OURS)
    if find_spec("xllamacpp") is not None:
        runners[PEER] = THEIRS
    for name, code in runners.items():
        run = measured(1 if given.quick else 3, code, given.path, name, PROMPT)
        memory = {f"{kind}_MiB": run[kind] / 2**20 for kind in ("resident", "anonymous")}
        report.row(by=name, loaded_s=run["loaded"], first_token_s=run["token"], **memory)
        if code is OURS:
            bare = measured(1, BARE, given.path, name)["resident"]
            report.target(f"{name}: first token", run["token"], 1, "s")
            report.target(f"{name}: memory", (run["resident"] - bare) / size, 1.5, "times the file")
    report.finish(f"Loading {Path(given.path).name}")


if __name__ == "__main__":
    main()
