"""Drivers that come as Python packages, and how they are made visible to OpenCL's loader before its first search.

On Linux the loader reads ``*.icd`` files, each of which names a driver's library, in ``/etc/OpenCL/vendors`` or in the
folder that a variable names; the one in pyopencl's wheel also finds PoCL's, which is installed beside it. Intel's
runtime for CPUs comes with such a file too, in a folder of the environment that no loader reads, and with a placeholder
in it for the path of the library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

__all__ = ["PACKAGES", "VENDORS", "not_loaded", "packaged", "variable", "visible"]

PACKAGES: Final = ("intel-opencl-rt",)
"""Distributions that bring a driver which loaders do not find."""

VENDORS: Final = "OCL_ICD_VENDORS"
"""Environment variable: where loaders look for drivers instead. Whoever sets it chooses the drivers: none is added."""

_SYSTEM: Final = "/etc/OpenCL/vendors"


def packaged() -> list[Path]:
    """The libraries of the drivers in `PACKAGES`, found in the lists of files of the installed distributions."""
    found: list[Path] = []
    for package in PACKAGES:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for icd in (file for file in files if file.suffix == ".icd"):
            # The path in the file is a placeholder; the library is another file of the package, if it was installed.
            with suppress(OSError, UnicodeDecodeError):
                name = _library(Path(str(icd.locate())))
                candidates = [Path(str(file.locate())) for file in files if file.name == name]
                found += [path.parent.resolve() / name for path in candidates if path.is_file()][:1]
    return found


@contextmanager
def visible(libraries: Sequence[Path]) -> Iterator[None]:
    """Within the ``with`` block a loader that looks for drivers finds ``libraries`` in addition to those of the system.
    Does nothing where somebody has set `VENDORS`, and outside of Linux."""
    if not libraries or os.environ.get(VENDORS) or not sys.platform.startswith("linux"):
        yield
        return
    system = Path(os.environ.get("OPENCL_VENDOR_PATH") or _SYSTEM)
    with TemporaryDirectory(prefix="opweave-opencl-") as name:
        folder, known = Path(name), set()
        with suppress(OSError):
            for icd in sorted(system.glob("*.icd")):
                with suppress(OSError, UnicodeDecodeError):
                    known.add(_library(icd))
                    (folder / icd.name).symlink_to(icd)
        for library in libraries:
            if library.name not in known:  # else the system has it already, and each device would be there twice
                (folder / f"opweave-{library.name}.icd").write_text(f"{library}\n", encoding="utf-8")
        with variable(VENDORS, name):
            yield


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the ``with`` block; programs that are started later do not inherit it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _library(icd: Path) -> str:
    """The file name of the library that an ``.icd`` file names."""
    return Path(icd.read_text(encoding="utf-8").strip()).name


def not_loaded(libraries: Sequence[Path]) -> dict[Path, str]:
    """Those of the libraries made `visible` that the loader does not use all the same, and why."""
    if os.environ.get(VENDORS):
        return {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            used = file.read()
    except OSError:
        return {}
    return {library: _why_not_loaded(library) for library in libraries if library.name not in used}


def _why_not_loaded(library: Path) -> str:
    from ctypes import CDLL

    try:
        CDLL(str(library))
    except OSError as error:
        return f"it cannot be loaded: {error}"
    return f"pyopencl looked for drivers before opweave made this one visible; set {VENDORS} to a folder of .icd files"
