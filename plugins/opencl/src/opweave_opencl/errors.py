"""Driver errors as opweave's.

``pyopencl`` raises its own ``MemoryError``, ``LogicError`` and ``RuntimeError``, each with a status code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opweave.errors import DeviceLostError, ExecutionError

__all__ = ["KernelBuildError", "build_error", "translate", "translated"]

# Status codes of the OpenCL specification, spelled out here so that this module needs no driver.
_NO_MEMORY: Final = {-4, -6, -61}  # MEM_OBJECT_ALLOCATION_FAILURE, OUT_OF_HOST_MEMORY, INVALID_BUFFER_SIZE
_OUT_OF_RESOURCES: Final = -5
# DEVICE_NOT_AVAILABLE, INVALID_DEVICE, INVALID_CONTEXT, INVALID_COMMAND_QUEUE; NVIDIA's for an illegal access.
_LOST: Final = {-2, -33, -34, -36, -9999}


class KernelBuildError(ExecutionError):
    """The driver's compiler refused a kernel. The message shows the line of source and the compiler's log.

    Attributes:
        source: the source that was compiled.
        log: what the compiler said.
    """

    def __init__(self, message: str, *, device: str, source: str, log: str) -> None:
        self.source, self.log = source, log
        super().__init__(message, device=device)


def translate(error: Exception, device: str, doing: str, *, allocating: bool = False) -> Exception:
    """What ``pyopencl`` raised as a typed error that names the device and what was being done.

    Returns:
        ``MemoryError`` where the driver has no memory (the core makes an `AllocationError` of it), `DeviceLostError`
        where the device or its context is gone, `ExecutionError` for other failures of the driver; errors that are not
        the driver's are returned unchanged.
    """
    code = getattr(error, "code", None)
    if not isinstance(code, int):
        return error
    if code in _NO_MEMORY or (allocating and code == _OUT_OF_RESOURCES):
        return MemoryError(f"{device} has no memory left for {doing}: {error}")
    if code in _LOST:
        return DeviceLostError(f"{device} stopped answering while {doing}: {error}")
    message = f"{device} failed while {doing}: {error}"
    if code == _OUT_OF_RESOURCES:
        message += " (a kernel needs more registers or local memory than there are, or one before it failed)"
    return ExecutionError(message, device=device)


@contextmanager
def translated(device: str, doing: str, *, allocating: bool = False) -> Iterator[None]:
    """Raise what ``pyopencl`` raises inside as a typed error; see `translate`."""
    try:
        yield
    except Exception as error:
        typed = translate(error, device, doing, allocating=allocating)
        if typed is error:
            raise
        raise typed from error


def build_error(device: str, file: str, source: str, error: Exception) -> KernelBuildError:
    """The error for a source that does not compile, with the lines around the compiler's first complaint about it."""
    # Before the log, pyopencl repeats the name of the failed call for each layer that it went through.
    log = re.sub(r"\A.*?(?=Build on )", "", str(error), flags=re.DOTALL).strip()
    # Compilers put the severity before or after file and line.
    complaint = r"(?:error: {0}:(\d+):(\d+)|{0}:(\d+):(\d+): (?:fatal )?error)".format(re.escape(file))
    found = re.search(complaint, log)
    shown = "\n" + _excerpt(source, *(int(n) for n in found.groups() if n)) if found else ""
    return KernelBuildError(
        f"{device} cannot build {file}{shown}\nbuild log:\n{log}", device=device, source=source, log=log
    )


def _excerpt(source: str, line: int, column: int) -> str:
    first = max(line - 3, 0)
    rows = [f"{n:5d} | {text}" for n, text in enumerate(source.splitlines()[first:line], first + 1)]
    return "\n".join([*rows, " " * (7 + column) + "^"])
