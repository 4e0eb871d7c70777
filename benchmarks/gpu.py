"""Everything that only a card can show, by one command: is it right, and how fast is it?

    python benchmarks/gpu.py --out DIR [--minutes 8] [--device torch:cuda:0]

Needs a card, Python 3.11 or newer, torch for the card, and opweave's packages; ``--bundle DIR`` makes a folder of
wheels for a machine without a registry. Each part is a process of its own with a limit. ``DIR/results.json`` and
``DIR/index.html`` are written as parts go; what was not reached is named as such. The exit status is 1 if something
failed. ``--device torch:cpu`` takes the same way without a card: torch on the processor, with memory of its own, stands
in; ``--short`` has the smallest sizes, for a first look.

Figures beside torch are medians of interleaved runs in one process, by the wall clock and by events of the device.
Aims: at most 1.05 times a CUDA graph made by hand, ahead of ``torch.compile(mode="reduce-overhead")`` in half of the
rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import strftime
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks.card.part import Part
from benchmarks.card.run import Outcome, run_parts

CHECKS, SCENES, SPEED = "benchmarks.card.checks", "benchmarks.card.scenes", "benchmarks.card.speed"
TWO_CPUS = (("OPWEAVE_CPU_DEVICES", "2"),)
FEW_THREADS = (("TORCHINDUCTOR_COMPILE_THREADS", "2"),)  # of each of several processes

PARTS: Final = (
    Part("compile", "torch.compile fills its cache, beside the checks", f"{SPEED}:compile_ahead", 150, beside=True,
         short=False, workers=0, environment=FEW_THREADS),
    Part("devices", "Devices and doctor", f"{CHECKS}:devices", 30),
    Part("smoke", "A case of every operation, a graph of every family", f"{CHECKS}:smoke", 35),
    Part("conformance", "Conformance: hygiene, memory, asynchrony, faults", f"{CHECKS}:conformance", 55, resumes=True),
    Part("tests", "Tests that need a card", f"{CHECKS}:tests", 40, short=False),
    Part("graphs", "Captured graphs", f"{SCENES}:graphs", 20),
    Part("split", "Over the card and the processor, and back", f"{SCENES}:split", 20),
    Part("offload", "Weights that do not fit", f"{SCENES}:offload", 20),
    Part("opencl", "OpenCL on the same card", f"{CHECKS}:opencl", 25, resumes=True),
    Part("ort", "ONNX Runtime on the same card", f"{SCENES}:ort", 20),
    Part("cards", "Several cards", f"{SCENES}:several", 25, environment=TWO_CPUS),
    Part("peaks", "What the card can do: bandwidth, products, transfers", f"{SPEED}:peaks", 20, alone=True),
    Part("chain", "Speed: a chain of additions", f"{SPEED}:chain_of_additions", 30, alone=True),
    Part("encoder", "Speed: MiniLM-L6", f"{SPEED}:encoder", 50, alone=True),
    Part("decoder", "Speed: a decoder's step", f"{SPEED}:decoder", 35, alone=True),
    Part("training", "Speed: a training step", f"{SPEED}:training", 25, alone=True),
    Part("sample", "Conformance: a sample of operations and splits", f"{CHECKS}:sample", 60, fills=True, resumes=True,
         workers=0, alone=True),
)  # fmt: skip
"""In the order in which they run. The limits are those of a run of eight minutes: what a part leaves over, the last one
uses."""


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for results.json and index.html")
    parser.add_argument("--minutes", type=float, default=8.0, help="all ends within this time (8)")
    parser.add_argument("--device", default="torch:cuda:0", help="the card; torch:cpu stands in for one")
    parser.add_argument("--seed", type=int, default=0, help="of all random values, and of what is sampled")
    parser.add_argument("--short", action="store_true", help="smallest sizes, single samples")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in parts],
                        help=f"only these parts, of {' '.join(part.name for part in parts)}")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document too")
    parser.add_argument("--bundle", type=Path, help="make a folder of wheels for a machine without a registry, and end")
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info), help="version that the wheels are for")
    given = parser.parse_args(arguments)
    if given.bundle is not None:
        from benchmarks.card.bundle import make_bundle

        return make_bundle(given.bundle, given.python)
    if given.out is None:
        parser.error("--out is missing")
    if given.minutes <= 0:
        parser.error("--minutes must be more than 0")
    if not given.device.startswith("torch:cuda"):
        os.environ["OPWEAVE_TORCH_SEPARATE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin would take longer than the small sizes
    chosen = [p for p in parts if (p.short or not given.short) and (not given.only or p.name in given.only)]
    if given.short:  # two at a time: no figure of it counts
        chosen = [part._replace(alone=False, beside=k % 2 == 0) for k, part in enumerate(chosen)]
    given.out.mkdir(parents=True, exist_ok=True)
    record = _Record(given)
    outcomes = run_parts(
        chosen, {"device": given.device, "short": given.short, "seed": given.seed}, given.minutes * 60, record.write
    )
    record.ended = strftime("%Y-%m-%d %H:%M:%S")
    record.write(outcomes)
    if given.json:
        print(json.dumps(record.document(outcomes), indent=1))
    return int(any(outcome.status in ("failed", "crashed", "timed out") for outcome in outcomes))


class _Record:
    """The results on disk, and what is told on standard error."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.began, self.ended = strftime("%Y-%m-%d %H:%M:%S"), ""
        self.told: set[str] = set()

    def document(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        shown = ("device", "minutes", "short", "seed")
        return {
            "benchmark": "gpu", "began": self.began, "ended": self.ended,
            "options": {name: getattr(self.given, name) for name in shown},
            "parts": [outcome.document() for outcome in outcomes],
        }  # fmt: skip

    def write(self, outcomes: Sequence[Outcome]) -> None:
        from benchmarks.card.page import page

        document = self.document(outcomes)
        for name, text in (("results.json", json.dumps(document, indent=1)), ("index.html", page(document))):
            fresh = self.given.out / f".{name}"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.given.out / name)  # whoever reads meanwhile sees a whole file
        for outcome in outcomes:
            if outcome.status not in ("waiting", "running") and outcome.part.name not in self.told:
                self.told.add(outcome.part.name)
                why = f": {outcome.why}" if outcome.why else ""
                print(f"{outcome.seconds:6.1f} s  {outcome.part.name:12} {outcome.status}{why}", file=sys.stderr)
                for failure in outcome.failures[:5]:
                    print(f"{'':10}{failure['what']}: {failure['why'].partition(chr(10))[0]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
