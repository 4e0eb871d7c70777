"""Seconds from the start of a process to the first token of a GGUF model, and its memory, by device and by llama.cpp.

    python benchmarks/loading.py m.gguf [--devices cpu torch:cpu ...] [--json]

Each is measured in processes of its own, the best of the rounds: the file is in the system's cache by then. llama.cpp
is measured where xllamacpp is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec

ROUNDS = 3
PROMPT = "The capital of France is"

OURS = """
import json, sys, time
begin = time.perf_counter()
import opweave_models
llm = opweave_models.load(sys.argv[1], sys.argv[2], context=512)
loaded = time.perf_counter() - begin
next(iter(llm.generate(sys.argv[3], max_tokens=1)))
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


def measured(code: str, *arguments: str) -> dict[str, float]:
    """The best of some processes."""
    runs = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", code + END, *arguments], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda run: run["token"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runners = dict.fromkeys(args.devices, OURS)
    if find_spec("xllamacpp") is not None:
        runners["llama.cpp"] = THEIRS
    rows = []
    for name, code in runners.items():
        row = measured(code, args.path, name, PROMPT)
        rows.append({"runner": name, **row})
        if not args.json:
            print(f"{name:12} loaded {row['loaded']:6.2f} s  first token {row['token']:6.2f} s  "
                  f"{row['resident'] / 2**20:6.0f} MiB resident, {row['anonymous'] / 2**20:6.0f} MiB of it no files",
                  flush=True)  # fmt: skip
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
