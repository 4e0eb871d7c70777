"""Whether a device works: a small kernel is built and run on it, once for each driver, version and processor.

A driver may list a device for which its compiler builds nothing, as PoCL does on processors that came out after it.
"""

from __future__ import annotations

import json
import platform
import re
import time
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from opweave_opencl.caching import BinaryCache
from opweave_opencl.kernel_objects import new_kernel
from opweave_opencl.program import compiled
from opweave_opencl.properties import identity

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["RETRY", "SLOW", "why_unusable"]

RETRY: Final = 3600.0
"""Seconds after which a device for which no kernel could be built is tried again."""

SLOW: Final = 0.02
"""Seconds: that no kernel could be built is remembered if trying took longer. Else each process tries again, so that a
repaired driver works at once."""

_SOURCE: Final = "kernel void probe(global float *y) { size_t i = get_global_id(0); y[i] = exp(y[i]) + 1.0f; }\n"
_SIZE: Final = 64
_WORKS: Final[set[str]] = set()  # keys of what this process found in order


def why_unusable(device: cl.Device, answers: BinaryCache | None = None) -> str | None:
    """Why no kernel runs on ``device``, in the driver's own words, or ``None``: it works.

    That it works is remembered, and for an hour that its compiler fails, if that took longer than `SLOW`. Other
    failures may be temporary and are not remembered.

    Args:
        answers: where; ``None``: in the user's cache folder.
    """
    answers = BinaryCache() if answers is None else answers
    key = answers.key(("health 1", *identity(device), *_processor(), _SOURCE))
    if key in _WORKS:
        return None
    known = _read(answers.load(key))
    if known is None:
        start = time.perf_counter()
        known = _try(device)
        slow = time.perf_counter() - start >= SLOW
        if not known or (slow and known.startswith(_BUILD)):
            answers.store(key, json.dumps({"why": known, "time": time.time()}).encode())
    if not known:
        _WORKS.add(key)
    return known or None


def _read(answer: bytes | None) -> str | None:
    """A remembered answer, ``""``: it works; ``None`` where there is none or it is too old."""
    try:
        found = json.loads(answer or b"null")
        why, when = str(found["why"]), float(found["time"])
    except (ValueError, TypeError, KeyError):
        return None
    return why if not why or 0 <= time.time() - when < RETRY else None


_BUILD: Final = "it builds no kernel: "


def _try(device: cl.Device) -> str:
    """Why a small kernel does not run, ``""``: it does."""
    import pyopencl as cl

    doing = "it opens no context: "
    try:
        context = cl.Context([device])
        queue = cl.CommandQueue(context, device)
        doing = _BUILD
        program = compiled(context, device, _SOURCE)
        doing = "it runs no kernel: "
        values = np.linspace(0, 1, _SIZE, dtype=np.float32)
        memory = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=values)
        kernel = new_kernel(program, "probe")
        kernel.set_arg(0, memory)
        cl.enqueue_nd_range_kernel(queue, kernel, (_SIZE,), None)
        result = np.empty_like(values)
        cl.enqueue_copy(queue, result, memory)
        queue.finish()
    except cl.Error as error:
        return doing + _words(error)
    if not np.allclose(result, np.exp(values) + 1, rtol=1e-3):
        return f"{doing}exp(1) + 1 gives {result[-1]}"
    return ""


def _words(error: Exception) -> str:
    """What the driver said, without what pyopencl says around it."""
    log = str(error).partition("\nBuild on ")[2].partition(":\n")[2]
    lines = [line.strip() for line in (log or str(error)).splitlines() if not line.startswith("(options:")]
    return re.sub(r"\s+", " ", "; ".join(line for line in lines if line))[:600]


@cache
def _processor() -> tuple[str, ...]:
    """Model and instruction sets of the processor, on which the result of a driver's compiler depends."""
    fields = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).partition("\n\n")[0]
        return tuple(line for line in first.splitlines() if line.startswith(fields))
    except OSError:
        return (platform.machine(), platform.processor())
