"""Trying a device: a few kernels are built and run on it, and their results compared with NumPy's.

A driver may list a device for which its compiler builds nothing, crashes, does not end, or generates wrong code, as
PoCL does on processors that came out after it. So a device is tried in a process of its own, where one can be started.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave_opencl import pocl
from opweave_opencl.kernel_objects import new_kernel
from opweave_opencl.program import code, compiled, source
from opweave_opencl.properties import identity

if TYPE_CHECKING:
    import pyopencl as cl

    Array = np.ndarray[Any, Any]

__all__ = [
    "DEVICE", "SECONDS", "SOURCE", "TIMEOUT", "Case", "Tell", "Trial", "Verdict", "answer", "in_process", "limit",
    "probe", "tried",
]  # fmt: skip

SOURCE: Final = "probe.cl"

TIMEOUT: Final = "OPWEAVE_OPENCL_PROBE_TIMEOUT"
"""Environment variable: seconds that trying a device may take; ``0``: it is tried in this process, without a limit."""

SECONDS: Final = 120.0
"""The default of `TIMEOUT`. (``opweave devices`` gives up a process after 60 s, unless ``--timeout`` allows more.)"""

Tell = Callable[[str], object]
"""Called with what comes next, which may end the process."""


class Trial(NamedTuple):
    """What is tried, as another process can be told.

    Attributes:
        function: ``module:name`` of a function of a device and the arguments, which returns a `Verdict`. Its argument
            ``tell`` is a `Tell`.
    """

    function: str
    arguments: tuple[str, ...] = ()


DEVICE: Final = Trial("opweave_opencl.probe:in_process")
"""Whether a device works at all."""


class Case(NamedTuple):
    """A kernel that is tried: the arrays that it reads, its correct result, work-items of a group and number of groups
    (0: a work-item computes 16 results)."""

    given: tuple[Array, ...]
    right: Array
    group: int
    groups: int = 0


_X: Final = ((np.arange(1024) * 37 % 199 - 99) / 1.5).astype(np.float32)
_N: Final = (np.arange(1024) * 53 % 601 - 300).astype(np.int32)
_GROUP: Final = 16
_WHOLE: Final = _X.astype(np.int32)
_CASES: Final[Mapping[str, Case]] = {
    "conversions": Case((_X, _N), _N.astype(np.int8) + _WHOLE.astype(np.int8), _GROUP),
    "comparisons": Case((_X, _N), (_X > 0).astype(np.uint8), _GROUP),
    "choices": Case((_X, _N), np.where(_X < _N, _N, np.where(_N < -100, -_N, _WHOLE)).astype(np.int32), _GROUP),
    "functions": Case((_X, _N), (np.exp(_X / 8) / (1 + np.maximum(_X, 0))).astype(np.float16), _GROUP),
    "sums": Case((_X, _N), _X.reshape(-1, 16 * _GROUP).sum(1), _GROUP, 1024 // (16 * _GROUP)),
}
"""The kernels of `SOURCE`."""


class Verdict(NamedTuple):
    """The outcome of trying a device.

    Attributes:
        why: why the device is unusable, ``""``: it works.
        lasting: whether the next try would most likely come to the same.
    """

    why: str
    lasting: bool


WORKS: Final = Verdict("", True)


def probe(device: cl.Device, trial: Trial = DEVICE) -> Verdict:
    """Try ``device``, in a process of its own if possible."""
    seconds = limit()
    found = _in_child(device, seconds, trial) if seconds and _can_start_python() else None
    # The other process may have failed because of this one: some cards serve one process at a time.
    return _function(trial)(device, *trial.arguments) if found is None or (found.why and not found.lasting) else found


def _function(trial: Trial) -> Callable[..., Verdict]:
    module, _, name = trial.function.partition(":")
    found: Callable[..., Verdict] = getattr(import_module(module), name)
    return found


def limit() -> float:
    """Seconds that trying a device may take, by `TIMEOUT`; 0: it is tried in this process."""
    try:
        seconds = float(os.environ.get(TIMEOUT) or SECONDS)
    except ValueError:
        return SECONDS
    return max(seconds, 0.0) if isfinite(seconds) else SECONDS


# --- in this process ------------------------------------------------------------------------------------------------


def in_process(device: cl.Device, tell: Tell = lambda doing: None) -> Verdict:
    """Try ``device`` in this process."""
    return tried(device, source(SOURCE), _CASES, tell)


def tried(device: cl.Device, text: str, cases: Mapping[str, Case], tell: Tell, options: str = "") -> Verdict:
    """Build a source with options of the compiler, run its kernels in this process, and compare what they write behind
    what they read."""
    import pyopencl as cl

    failing = "it opens no context: "
    tell("opening a context")
    try:
        context = cl.Context([device])
        queue = cl.CommandQueue(context, device)
        failing = "it builds no kernel: "
        tell("building kernels")
        program = compiled(context, device, code(text), options)
        failing = "it runs no kernel: "
        for name, case in cases.items():
            tell(f"building or running the kernel {name!r}")
            wrong = _compare(name, _run(context, queue, program, name, case), case.right)
            if wrong:
                return Verdict(wrong, True)
        tell("reading built kernels")
        assert program.binaries  # PoCL builds kernels once more for that, for any number of work-items
    except cl.Error as error:
        return Verdict(failing + _words(error), "builds" in failing)
    return WORKS


def _run(context: cl.Context, queue: cl.CommandQueue, program: cl.Program, name: str, case: Case) -> Array:
    import pyopencl as cl

    flags = cl.mem_flags
    kernel = new_kernel(program, name)
    result = np.zeros_like(case.right)
    memory = [cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=array) for array in case.given]
    memory.append(cl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=result))
    for index, buffer in enumerate(memory):
        kernel.set_arg(index, buffer)
    most = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, queue.device)
    group = 1 << (min(case.group, most).bit_length() - 1)
    items = group * case.groups or result.size // 16
    cl.enqueue_nd_range_kernel(queue, kernel, (items,), (group,))
    cl.enqueue_copy(queue, result, memory[-1])
    queue.finish()
    return result


def _compare(name: str, result: Array, right: Array) -> str:
    """What is wrong with a result, ``""``: nothing."""
    exact = right.dtype.kind in "iu"
    good = result == right if exact else np.isclose(result, right, rtol=2e-3, atol=1e-3, equal_nan=True)
    if good.all():
        return ""
    first = int(np.argmin(good))
    return (
        f"it computes wrong results: {np.count_nonzero(~good)} of {good.size} of the kernel {name!r}, "
        f"first {result[first]} instead of {right[first]}"
    )


def _words(error: Exception) -> str:
    """What the driver said, without what pyopencl says around it."""
    log = str(error).partition("\nBuild on ")[2].partition(":\n")[2]
    lines = [line.strip() for line in (log or str(error)).splitlines() if not line.startswith("(options:")]
    return re.sub(r"\s+", " ", "; ".join(line for line in lines if line))[:600]


# --- in a process of its own ----------------------------------------------------------------------------------------

# What drivers print goes to standard error. The path comes first: the child finds the packages where this process did.
_START = (
    "import json, os, sys; out = os.dup(1); os.dup2(2, 1); asked = json.load(sys.stdin); sys.path[:] = asked['path']; "
    "from opweave_opencl.probe import answer; answer(asked, out)"
)


def _can_start_python() -> bool:
    """Whether `sys.executable` is an interpreter, not a program that embeds one, which would be started once more."""
    name = Path(sys.executable or "").name.lower()
    return name.startswith(("python", "pypy", "graalpy")) and not getattr(sys, "frozen", False)


def answer(asked: Mapping[str, Any], out: int) -> None:
    """In the child: find the device, say so, try it, and end at once."""
    if not asked["matched"]:
        pocl.leave()
    from opweave_opencl.discovery import find_devices

    def report(**facts: Any) -> None:
        os.write(out, json.dumps(facts).encode() + b"\n")

    device = next((f.device for f in find_devices() if list(identity(f.device)) == asked["identity"]), None)
    if device is not None:
        trial = Trial(asked["function"], tuple(asked["arguments"]))
        verdict = _function(trial)(device, *trial.arguments, tell=lambda doing: report(doing=doing))
        report(**verdict._asdict())
    os._exit(0)


def _in_child(device: cl.Device, seconds: float, trial: Trial) -> Verdict | None:
    """Try ``device`` in a process of its own; ``None``: it cannot be started, or does not find the device."""
    asked = {"path": sys.path, "identity": identity(device), "matched": pocl.matched(), **trial._asdict()}
    hung = False
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", _START], stdin=subprocess.PIPE, stdout=out, stderr=errors,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )  # fmt: skip
        except OSError:
            return None
        try:
            child.communicate(json.dumps(asked).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        reports = _lines(out)
        errors.seek(0)
        said = errors.read()[-(1 << 14) :].decode(errors="replace").splitlines()
    if not reports:
        return None
    if "why" in reports[-1]:
        return Verdict(str(reports[-1]["why"]), bool(reports[-1]["lasting"]))
    doing = reports[-1].get("doing", "")
    if hung:
        return Verdict(f"it hangs: {doing} did not end within {seconds:g} s ({TIMEOUT})", True)
    words = next((line.strip()[:200] for line in reversed(said) if "error" in line.lower()), "")
    return Verdict(f"its driver {_how(child.returncode)} when {doing}{words and ': '}{words}", True)


def _lines(out: Any) -> Sequence[dict[str, Any]]:
    """What the child has reported."""
    out.seek(0)
    found = []
    for line in out.read().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return [line for line in found if isinstance(line, dict)]


def _how(status: int) -> str:
    if status >= 0:
        return f"ends the process with exit status {status}"
    try:
        return f"crashes ({Signals(-status).name})"
    except ValueError:
        return f"crashes (signal {-status})"
