"""Whether a device works: it is tried once for each driver, version and processor."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opweave.runtime.host.processor import cpu_fields
from opweave_opencl.caching import BinaryCache
from opweave_opencl.probe import DEVICE, SECONDS, SOURCE, Trial, limit, probe
from opweave_opencl.program import source
from opweave_opencl.properties import identity

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["RETRY", "SLOW", "processor", "why_failing", "why_unusable"]

RETRY: Final = 3600.0
"""Seconds after which a device that did not work is tried again."""

SLOW: Final = 0.02
"""Seconds: that a device does not work is remembered if trying took longer. Else each process tries again, so that a
repaired driver works at once."""

_LOCK: Final = ".probe.lock"
_KNOWN: Final[dict[str, bytes]] = {}  # key -> answer, which this process read or found


def why_unusable(device: cl.Device, answers: BinaryCache | None = None) -> str | None:
    """Why ``device`` cannot be used, with the driver's own words, or ``None``: it works. Otherwise as `why_failing`."""
    return why_failing(device, DEVICE, (source(SOURCE),), answers)


def why_failing(
    device: cl.Device, trial: Trial, sources: Sequence[str], answers: BinaryCache | None = None
) -> str | None:
    """What comes of a trial, with the driver's own words, or ``None``: it works.

    That it works is remembered, and for an hour that it builds nothing, crashes, hangs or computes wrong results, if
    trying took longer than `SLOW`. Other failures may be temporary and are not remembered. Of processes and threads
    that ask at the same time, one tries the device and the others wait for its answer.

    Args:
        sources: what is tried: other ones are tried anew.
        answers: where that is remembered; ``None``: in the user's cache folder.
    """
    answers = BinaryCache() if answers is None else answers
    key = answers.key(("health 3", *identity(device), *processor(), trial.function, *trial.arguments, *sources))
    known = _recall(key, answers)
    if known is None:
        with _alone(answers.folder):
            known = _recall(key, answers)  # another may have tried it meanwhile
            if known is None:
                known = _try(device, trial, key, answers)
    return known or None


def _try(device: cl.Device, trial: Trial, key: str, answers: BinaryCache) -> str:
    start = time.perf_counter()
    why, lasting = probe(device, trial)
    if lasting and (not why or time.perf_counter() - start >= SLOW):
        _KNOWN[key] = json.dumps({"why": why, "time": time.time()}).encode()
        answers.store(key, _KNOWN[key])
    return why


def _recall(key: str, answers: BinaryCache) -> str | None:
    """The remembered answer (``""``: the device works), or ``None`` where there is none or it is too old."""
    answer = _KNOWN.get(key) or answers.load(key)
    try:
        found = json.loads(answer or b"null")
        why, when = str(found["why"]), float(found["time"])
    except (ValueError, TypeError, KeyError):
        return None
    if why and not 0 <= time.time() - when < RETRY:
        _KNOWN.pop(key, None)
        return None
    _KNOWN[key] = answer or b""
    return why


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Keep other threads and processes out of the ``with`` block for the same folder, where the system has locks of
    files. Waits for them to leave it, but no longer than trying a device may take."""
    try:
        import fcntl
    except ImportError:
        folder = None
    if folder is None:
        yield
        return
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        file = open(folder / _LOCK, "ab")  # noqa: SIM115
    except OSError:
        yield
        return
    with file:
        end = time.monotonic() + (limit() or SECONDS)
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.02)
        yield


def processor() -> list[str]:
    """Model and instruction sets of the processor, on which the result of a driver's compiler depends."""
    fields = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    found = [f"{field}: {value}" for field, value in cpu_fields().items() if field in fields]
    return found or [platform.machine(), platform.processor()]
