"""Programs: sources that lie beside the kernels' modules, built once per device and set of macros."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from threading import Lock
from typing import TYPE_CHECKING, Final

from opweave_opencl.errors import build_error

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["Programs", "source"]

_INCLUDE: Final = re.compile(r'#include "([\w.]+)"')


@cache
def source(file: str) -> str:
    """The text of ``kernels/<file>``."""
    return files("opweave_opencl.kernels").joinpath(file).read_text(encoding="utf-8")


def expanded(file: str, text: str) -> str:
    """``text`` with the files that it includes put in, and line directives by which messages name places rightly.

    Left to the driver's compiler, an include would need a folder that it can read, and caches would not notice changes.
    """
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate(text.splitlines(), 1):
        included = _INCLUDE.fullmatch(line.strip())
        if included:
            lines += [expanded(included[1], source(included[1])), f'#line {number + 1} "{file}"']
        else:
            lines.append(line)
    return "\n".join(lines)


class Programs:
    """The programs of one context. Thread-safe.

    Drivers cache compiled programs on disk, and where they do not, pyopencl does.
    """

    def __init__(self, device: str, context: cl.Context) -> None:
        self._device = device
        self._context = context
        self._built: dict[tuple[str, tuple[tuple[str, str], ...]], cl.Program] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._built)

    def get(self, name: str, macros: Mapping[str, str]) -> cl.Program:
        """``kernels/<name>.cl`` built with the given macros.

        Raises:
            KernelBuildError: the driver's compiler refuses it.
        """
        key = (name, tuple(macros.items()))
        program = self._built.get(key)
        if program is None:
            with self._lock:
                program = self._built.get(key) or self.build(f"{name}.cl", source(f"{name}.cl"), macros)
                self._built[key] = program
        return program

    def build(self, name: str, text: str, macros: Mapping[str, str] | None = None) -> cl.Program:
        """Build a source text; ``name`` is the file that messages say it is.

        Raises:
            KernelBuildError: the driver's compiler refuses it.
        """
        import pyopencl as cl

        head = "".join(f"#define {macro} {value}\n" for macro, value in (macros or {}).items())
        whole = head + expanded(name, text)
        with warnings.catch_warnings():
            # Remarks about a program that did build; a failed build raises them.
            warnings.simplefilter("ignore", cl.CompilerWarning)
            try:
                program: cl.Program = cl.Program(self._context, whole).build()
            except cl.Error as error:
                raise build_error(self._device, name, text, error) from error
        return program
