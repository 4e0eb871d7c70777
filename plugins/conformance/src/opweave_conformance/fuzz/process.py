"""`Child`: a process in which scripts run one after the other, so that one that crashes or hangs takes nothing else
down.

The process is kept for many scripts, since loading devices and compiling kernels takes longer than running most of
them, and replaced after a crash or a hang.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple

from opweave.errors import OpweaveError, UnsupportedOpError
from opweave.registry.isolation import how_it_ended

__all__ = ["Child", "Outcome", "serve"]

# The answers go to standard output as it was at first; whatever else is printed goes to standard error.
_START: Final = (
    "import os, sys; out = os.dup(1); os.dup2(2, 1); sys.path[:] = {path!r}; "
    "from opweave_conformance.fuzz.process import serve; serve(out)"
)

WORDS: Final = 2000
"""Lines of standard error that are kept: a crash prints the stacks of all threads."""


class Outcome(NamedTuple):
    """What became of a script.

    Attributes:
        kind: ``""``: it ended as it should; ``"refused"``: no device runs a node; ``"Mismatch"`` or the name of another
            exception; ``"crash"``; ``"hang"``.
        reason: the message.
        reached: [operation, device, how often] of what it ran.
        buffers: bytes of the devices' buffers that are still there afterwards; -1: not asked.
    """

    kind: str
    reason: str = ""
    reached: tuple[tuple[str, str, int], ...] = ()
    buffers: int = -1

    @property
    def failed(self) -> bool:
        return self.kind not in ("", "refused")


class Child:
    """Runs scripts in another process.

    Args:
        seconds: how long one may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds: Final = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._readers: tuple[Thread, ...] = ()
        self._words: deque[str] = deque(maxlen=WORDS)

    def run(self, script: str, *, count_buffers: bool = False) -> Outcome:
        """Run a script and say how it ended."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"script": script, "count": count_buffers}) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self.seconds)
        except Empty:
            self.close()
            return Outcome("hang", f"it has not ended after {self.seconds:g} s")
        except OSError:
            line = ""
        if not line:
            status = process.wait()
            words = self._last_words()
            self.close()
            return Outcome("crash", f"{how_it_ended(status)}{words}")
        answer = json.loads(line)
        return Outcome(answer["kind"], answer["reason"], tuple(map(tuple, answer["reached"])), answer["buffers"])

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for reader in self._readers:
                reader.join()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def _last_words(self) -> str:
        """Where Python says that it was when the process crashed."""
        self._readers[-1].join()
        words = [line.rstrip() for line in self._words]
        fatal = [i for i, line in enumerate(words) if line.startswith("Fatal Python error")]
        if not fatal:
            return ""
        words = words[fatal[-1] :]
        # All threads are listed, in any order; the one that crashed may be none of Python's.
        current = next((i for i, line in enumerate(words) if line.startswith("Current thread")), 1)
        return "".join(f"\n{line}" for line in (words[0], *words[current:][:12]))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-X", "faulthandler", "-c", _START.format(path=sys.path)]
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                errors="replace",
            )  # fmt: skip
            lines, words = SimpleQueue[str](), deque[str](maxlen=WORDS)
            self._lines, self._words = lines, words
            self._readers = (
                Thread(target=_read, args=(process, lines), name="opweave fuzz", daemon=True),
                Thread(target=words.extend, args=(process.stderr,), name="opweave fuzz errors", daemon=True),
            )
            for reader in self._readers:
                reader.start()
            try:
                lines.get(timeout=max(self.seconds, 300))  # the devices are loaded
            except Empty:
                self.close()
                raise OpweaveError("the devices are not loaded after 300 s; `opweave devices` shows which") from None
        return self._process


def _read(process: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")  # the process has ended


# --- in the other process -------------------------------------------------------------------------------------------


def serve(out: int) -> None:
    """Run the scripts that come on standard input, one JSON document a line, and answer each by a line."""
    import opweave as ow

    devices = ow.devices()
    defaults = [(limit, limit.value) for device in devices for limit in device.limits]
    with open(out, "w", encoding="ascii") as answers:
        answers.write("ready\n")
        answers.flush()
        for line in sys.stdin:
            asked = json.loads(line)
            kind, reason, reached = _run(asked["script"])
            for limit, value in defaults:
                if limit.value != value:  # setting one has what was compiled compiled again
                    limit.value = value
            buffers = -1
            if asked["count"]:
                gc.collect()
                buffers = sum(b.size for device in devices for b in list(device.live_buffers) if not b.freed)
            answers.write(json.dumps({"kind": kind, "reason": reason, "reached": reached, "buffers": buffers}) + "\n")
            answers.flush()
    os._exit(0)  # without waiting for what a failed script left


def _run(script: str) -> tuple[str, str, list[tuple[str, str, int]]]:
    from opweave_conformance.fuzz.check import REACHED

    REACHED.clear()
    names: dict[str, Any] = {"__name__": "fuzz"}
    kind = reason = ""
    try:
        exec(compile(script, "<fuzz>", "exec"), names)
    except UnsupportedOpError as error:
        kind, reason = "refused", str(error)
    except BaseException as error:
        kind, reason = type(error).__name__, _shortened(error)
    names.clear()
    return kind, reason, [(op, device, n) for (op, device), n in REACHED.items()]


def _shortened(error: BaseException) -> str:
    """The message, and where an exception comes from that is none of a check's."""
    text = str(error)
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    if type(error).__name__ != "Mismatch" and frames:
        text += f"\n{type(cause).__name__} in {frames[-1].filename}, line {frames[-1].lineno}"
    return text[:2000]
