"""Programs: sources that lie beside the kernels' modules, built once per device and set of macros."""

from __future__ import annotations

import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.resources import files
from threading import Lock
from typing import TYPE_CHECKING, Final

from opweave_opencl.caching import BinaryCache
from opweave_opencl.errors import build_error
from opweave_opencl.properties import identity

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["KEPT", "OPTIONS", "Programs", "compiled", "source"]

OPTIONS: Final = "OPWEAVE_OPENCL_BUILD_OPTIONS"
"""Environment variable: options for the driver's compiler, such as ``-cl-opt-disable``."""

KEPT: Final = 256
"""Built programs that a device keeps. Kernels of open programs keep theirs beyond that; one that is asked for again is
loaded from the cache on disk, which takes milliseconds."""

_INCLUDE: Final = re.compile(r'#include "([\w.]+)"(?:\s*//.*)?')

_COMMENT_OR_STRING: Final = re.compile(r'//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@cache
def source(file: str) -> str:
    """The text of ``kernels/<file>``."""
    return files("opweave_opencl.kernels").joinpath(file).read_text(encoding="utf-8")


def expanded(file: str, text: str) -> str:
    """``text`` with each include replaced by that file; line directives keep file and line right in messages."""
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate(text.splitlines(), 1):
        included = _INCLUDE.fullmatch(line.strip())
        if included:
            lines += [expanded(included[1], source(included[1])), f'#line {number + 1} "{file}"']
        else:
            lines.append(line)
    return "\n".join(lines)


@lru_cache(128)  # all files; generated texts come and go
def code(text: str) -> str:
    """``text`` with each include replaced by that file, and without comments, indentation and blank lines.

    This is what drivers compile: caches, opweave's and theirs, hold it for as long as the code itself stays the same.
    Left to the driver's compiler, an include would need a folder that it can read, and caches would not notice changes.
    """
    lines: list[str] = []
    for line in map(str.strip, _COMMENT_OR_STRING.sub(_kept, text).splitlines()):
        included = _INCLUDE.fullmatch(line)
        if included:
            lines.append(code(source(included[1])))
        elif line or (lines and lines[-1].endswith("\\")):  # a blank line may be the end of a macro
            lines.append(line)
    return "\n".join(lines)


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else " "


class Programs:
    """The programs of one device. Thread-safe.

    Args:
        name: the device's, for messages.
        context: which the device is in.
        device: pyopencl's.
        binaries: where built programs are kept; ``None``: in the user's cache folder.
        options: for the driver's compiler; ``None``: as `OPTIONS` says.
        kept: how many are kept: the latest.
    """

    def __init__(
        self,
        name: str,
        context: cl.Context,
        device: cl.Device,
        binaries: BinaryCache | None = None,
        options: str | None = None,
        kept: int = KEPT,
    ) -> None:
        self._kept = kept
        self._name = name
        self._context = context
        self._device = device
        self._binaries = BinaryCache() if binaries is None else binaries
        self._options = os.environ.get(OPTIONS, "") if options is None else options
        # Not of the number of compute units: parts of a device run what was built for the whole (clBuildProgram).
        self._identity = ("3", *identity(device))  # "3": of the layout of the cache
        self._built: OrderedDict[tuple[str, tuple[tuple[str, str], ...]], cl.Program] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._built)

    def get(self, name: str, macros: Mapping[str, str]) -> cl.Program:
        """``kernels/<name>.cl`` built with the given macros.

        Raises:
            KernelBuildError: the driver's compiler refuses it.
        """
        return self._find(name, f"{name}.cl", source(f"{name}.cl"), macros)

    def generated(self, text: str, macros: Mapping[str, str]) -> cl.Program:
        """A source that was generated, built with the given macros.

        Raises:
            KernelBuildError: the driver's compiler refuses it.
        """
        return self._find(text, "generated.cl", text, macros)

    def _find(self, name: str, file: str, text: str, macros: Mapping[str, str]) -> cl.Program:
        key = (name, tuple(macros.items()))
        program = self._built.get(key)
        if program is not None:
            with suppress(KeyError):  # another thread has just dropped it
                self._built.move_to_end(key)
            return program
        with self._lock:
            program = self._built.get(key)
            if program is None:
                program = self._built[key] = self.build(file, text, macros)
            while len(self._built) > self._kept:
                self._built.popitem(last=False)
        return program

    def build(self, name: str, text: str, macros: Mapping[str, str] | None = None) -> cl.Program:
        """Build a source text, or load what was built of it before; ``name`` is the file that messages say it is.

        A macro ``SUBGROUPS`` is an option for the compiler, too (``combining.cl``).

        Raises:
            KernelBuildError: the driver's compiler refuses it.
        """
        import pyopencl as cl

        head = "".join(f"#define {macro} {value}\n" for macro, value in (macros or {}).items())
        whole = head + code(text)
        options = f"{self._options} {(macros or {}).get('SUBGROUPS', '')}".strip()
        key = self._binaries.key((*self._identity, options, whole))
        with _without_remarks():
            binary = self._binaries.load(key)
            if binary is not None:
                try:
                    loaded = cl.Program(self._context, [self._device], [binary])
                    loaded.build(devices=[self._device])
                    # pyopencl asks for it whenever a kernel is made, and where it is missing looks for a kernel of that
                    # name: 20 µs instead of 5.
                    vars(loaded)["_source"] = whole
                    return loaded
                except cl.Error:  # of a driver that changed under the same version
                    self._binaries.drop(key)
            try:
                program = compiled(self._context, self._device, whole, options)
            except cl.Error as error:
                raise self._explained(error, name, text, head, options) from error
            built = dict(zip(program.devices, program.binaries, strict=False)).get(self._device)
        if built:
            self._binaries.store(key, built)
        return program

    def _explained(self, error: Exception, name: str, text: str, head: str, options: str) -> Exception:
        """The error of a build whose messages give files and lines: that of building the text as it was written."""
        import pyopencl as cl

        try:
            compiled(self._context, self._device, head + expanded(name, text), options)
        except cl.Error as located:
            error = located
        return build_error(self._name, name, text, error)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Without compilers' warnings about programs that do build (a failed build raises them), and without pyopencl's
    about the early access that keeps it from using its own cache."""
    import pyopencl as cl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        warnings.filterwarnings("ignore", "Pre-build attribute access")
        yield


def compiled(context: cl.Context, device: cl.Device, text: str, options: str = "") -> cl.Program:
    """A source text as a program for one device; raises the driver's error."""
    import pyopencl as cl

    with _without_remarks():
        program = cl.Program(context, text)
        assert program.int_ptr  # the driver's program from here on: pyopencl builds it without its own cache
        program.build(options, devices=[device])
    return program
