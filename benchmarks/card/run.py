"""Runs parts, each in a process of its own with a limit, within a time in all, and takes in what they find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import IO, Any, Final

from benchmarks.card.part import Part

__all__ = ["GRACE", "Outcome", "run_parts"]

ROOT: Final = Path(__file__).resolve().parents[2]
WHOLE: Final = 480.0
"""Seconds of a run for which the limits of the parts are written."""

LEAST: Final = 3.0
"""Seconds without which a part is not begun."""

GRACE: Final = 1.0
"""Seconds that ending processes and writing the results may take."""

POLL: Final = 0.1
LINES: Final = 60
"""Lines of a failed part's output that are kept."""

RESTARTS: Final = 20


class Outcome:
    """What became of a part.

    Attributes:
        status: ``waiting``, ``running``, ``passed``, ``failed``, ``timed out`` (it was ended at its limit),
            ``crashed`` (its process ended by itself), ``not here`` or ``not reached``.
        why: what to say about that.
        rows, failures: as the part wrote them.
        log: the end of its output, where it did not pass.
    """

    def __init__(self, part: Part) -> None:
        self.part: Final = part
        self.status, self.why, self.log = "waiting", "", ""
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self.seconds = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "name": self.part.name, "title": self.part.title, "status": self.status, "why": self.why,
            "seconds": round(self.seconds, 1), "failures": self.failures, "rows": self.rows, "log": self.log,
        }  # fmt: skip


class _Worker:
    """A process of a part, and what it has written so far."""

    def __init__(self, part: Part, number: int, count: int, folder: Path, given: dict[str, Any], end: float) -> None:
        self.part, self.number, self.count, self.given, self.end = part, number, count, given, end
        self.file = folder / f"{part.name}.{number}.jsonl"
        self.output: IO[str] = (folder / f"{part.name}.{number}.log").open("w+", encoding="utf-8", errors="replace")
        self.file.touch()
        self._read, self.current, self.restarts = 0, "", 0
        self.done: set[str] = set()
        self.absent, self.died, self.hung = "", "", False
        self.start()

    def start(self) -> None:
        specification = {
            **self.given, "function": self.part.function, "seconds": max(self.end - monotonic(), 0.1),
            "worker": self.number, "workers": self.count, "file": str(self.file), "skip": sorted(self.done),
        }  # fmt: skip
        environment = {
            **os.environ, **dict(self.part.environment), "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }  # fmt: skip
        self.ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.card.child", json.dumps(specification)], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def poll(self, outcome: Outcome) -> bool:
        """Take over what was written; whether the process still runs."""
        if self.ended:
            return False
        running = self.process.poll() is None
        if running and monotonic() >= self.end:
            self.hung, running = True, False
        if not running:
            self.stop()  # what it started may still run
        self._take(outcome)
        if not running and not self.hung and self.process.returncode not in (0, 1):
            return self._crashed(outcome)
        return running

    def _crashed(self, outcome: Outcome) -> bool:
        """Note it; whether it was started again."""
        code = self.process.returncode
        died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        at = f" at {self.current}" if self.current else ""
        resumes = self.part.resumes and self.current and self.restarts < RESTARTS and self.end - monotonic() > LEAST
        if not resumes:
            self.died = f"its process ended with {died}{at}"
            return False
        outcome.failures.append({"what": self.current, "why": f"the process ended with {died}"})
        self.done.add(self.current)
        self.current = ""
        self.restarts += 1
        self.start()
        return True

    def _take(self, outcome: Outcome) -> None:
        with self.file.open(encoding="utf-8") as lines:
            lines.seek(self._read)
            while (text := lines.readline()).endswith("\n"):
                self._read = lines.tell()
                line = json.loads(text)
                match line["kind"]:
                    case "row":
                        outcome.rows.append({"table": line["table"], **line["figures"]})
                    case "failure":
                        outcome.failures.append({"what": line["what"], "why": line["why"]})
                    case "begin":
                        self.current = line["what"]
                    case "done":
                        self.done.add(line["what"])
                        self.current = ""
                    case "absent":
                        self.absent = line["why"]

    def stop(self) -> None:
        """End the process and those that it started."""
        self.ended = True
        try:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        except ProcessLookupError:
            pass
        self.process.wait()

    def log(self) -> str:
        self.output.seek(0)
        return "".join(self.output.readlines()[-LINES:])


class _Running:
    """A part that was begun."""

    def __init__(self, outcome: Outcome, folder: Path, given: dict[str, Any], seconds: float) -> None:
        self.outcome, part = outcome, outcome.part
        self.began = monotonic()
        count = part.workers or min(8, max(1, (os.cpu_count() or 1) // 2))
        end = self.began + seconds
        outcome.status = "running"
        self.limit = seconds
        self.workers = [_Worker(part, number, count, folder, given, end) for number in range(count)]

    def poll(self) -> bool:
        """Whether it still runs; if not, its outcome is known."""
        self.outcome.seconds = monotonic() - self.began
        states = [worker.poll(self.outcome) for worker in self.workers]  # all of them, each time
        if any(states):
            return True
        self._judge()
        return False

    def stop(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.stop()
                worker.hung = True
        self.poll()

    def _judge(self) -> None:
        outcome, workers = self.outcome, self.workers
        hung = [worker for worker in workers if worker.hung]
        died = [worker.died for worker in workers if worker.died]
        at = ", ".join(sorted({worker.current for worker in hung if worker.current}))
        if hung:
            outcome.status = "timed out"
            outcome.why = f"ended after {outcome.seconds:.0f} s" + (f", at {at}" if at else "")
        elif died:
            outcome.status, outcome.why = "crashed", died[0]
        elif outcome.failures:
            outcome.status, outcome.why = "failed", f"{len(outcome.failures)} failed"
        elif any(worker.process.returncode for worker in workers):
            outcome.status, outcome.why = "failed", "its process ended with exit status 1"
        elif workers[0].absent:
            outcome.status, outcome.why = "not here", workers[0].absent
        elif not outcome.rows:
            outcome.status, outcome.why = "failed", "it reported nothing"
        else:
            outcome.status = "passed"
        if outcome.status not in ("passed", "not here"):
            outcome.log = "\n".join(
                worker.log() for worker in workers if worker.hung or worker.died or len(workers) < 2
            )
        for worker in workers:
            worker.output.close()


def run_parts(
    parts: Sequence[Part], given: dict[str, Any], seconds: float, changed: Callable[[Sequence[Outcome]], None]
) -> list[Outcome]:
    """Run all parts, in order.

    Args:
        given: ``device``, ``short`` and ``seed`` of `Context`.
        seconds: all may take so long, whatever happens.
        changed: is called with the outcomes whenever there is something new.
    """
    end = monotonic() + seconds - GRACE
    outcomes = [Outcome(part) for part in parts]
    scale = 1.0 if given["short"] else seconds / WHOLE
    beside: list[_Running] = []
    with TemporaryDirectory(prefix="opweave-gpu-") as name:
        try:
            for outcome in outcomes:
                part, left = outcome.part, end - monotonic()
                if part.alone:
                    _wait(beside, outcomes, changed)
                    left = end - monotonic()
                limit = left if part.fills else min(part.seconds * scale, left)
                if limit < min(LEAST, part.seconds):
                    outcome.status, outcome.why = "not reached", "no time was left"
                    continue
                running = _Running(outcome, Path(name), given, limit)
                if part.beside:
                    beside.append(running)
                else:
                    _wait([running], outcomes, changed, beside)
            _wait(beside, outcomes, changed)
        finally:
            for running in beside:
                running.stop()
    changed(outcomes)
    return outcomes


def _wait(
    running: list[_Running], outcomes: Sequence[Outcome], changed: Callable[[Sequence[Outcome]], None],
    beside: list[_Running] | None = None,
) -> None:  # fmt: skip
    """Wait for parts, and look after those that run beside them."""
    told = 0.0
    here = list(running)
    try:
        while here:
            here = [one for one in here if one.poll()]
            if beside:
                beside[:] = [one for one in beside if one.poll()]
            if monotonic() - told > 1 or not here:
                changed(outcomes)
                told = monotonic()
            if here:
                sleep(POLL)
    finally:
        for one in here:
            one.stop()
    running[:] = []
