"""PoCL of PyPI on AMD's processors with AVX-512, for which it would choose the wrong library of built-in functions.

PoCL 3.0 has one such library for each set of instructions, and chooses it by what the processor has. Its compiler, LLVM
14, generates code for the processor that it recognises by its number. It knows no processor of AMD with AVX-512, and
takes Zen 4 for Zen 3. So kernels pass vectors of 64 bytes in two registers to built-in functions that expect them in
one: results are wrong, or the compiler crashes. With the library for AVX2, as on a Zen 3, both agree.

No option of PoCL chooses the library. It is looked for in a folder relative to that of the driver, so the driver is
loaded by a link in a folder of links, where the name of the library for AVX-512 leads to the one for AVX2. This must
come before OpenCL's loader first looks for platforms: a driver that is loaded already is not loaded again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import Final

from opweave.runtime.host.cache import user_cache
from opweave.runtime.host.processor import cpu_fields
from opweave_opencl.drivers import variable

__all__ = ["PACKAGE", "chooses_wrongly", "leave", "matched", "matching_library", "too_late"]

PACKAGE: Final = "pocl-binary-distribution"
_VERSION: Final = "3.0"
_CHOSEN: Final = "-avx512.bc"
_RIGHT: Final = "-avx2.bc"
_CACHE: Final = "POCL_CACHE_DIR"

_LOADING: Final = Lock()
_folder: Path | None = None
_asked = False


def chooses_wrongly() -> bool:
    """Whether this is a processor for which PoCL 3.0 chooses a library that does not match its compiler."""
    processor = cpu_fields()
    amd = processor.get("vendor_id") == "AuthenticAMD"
    return sys.platform.startswith("linux") and amd and "avx512f" in processor.get("flags", "").split()


def too_late() -> bool:
    """Whether PoCL of PyPI uses the wrong library in this process."""
    return chooses_wrongly() and not matched() and bool(_installed())


def matched() -> bool:
    """Whether PoCL uses another library of built-in functions in this process than it would choose."""
    return _folder is not None


def leave() -> None:
    """Let PoCL choose for itself in this process, if it has not been loaded yet."""
    global _asked
    _asked = True


@contextmanager
def matching_library() -> Iterator[None]:
    """Within the ``with`` block OpenCL's loader finds PoCL with the library that matches its compiler. Does nothing
    where PoCL chooses the right one, and where it is loaded already."""
    global _folder, _asked
    with _LOADING:
        if not _asked:
            _asked = True
            _folder = _load()
    if _folder is None:
        yield
        return
    # PoCL's cache has kernels that were built with the other library, under the same keys.
    base = Path(os.environ.get(_CACHE) or _folder)
    with variable(_CACHE, str(base / "kernels-avx2")):
        yield


def _load() -> Path | None:
    """Load the driver by a link; returns the folder of links."""
    if not chooses_wrongly():
        return None
    from ctypes import CDLL

    try:
        files = _installed()
        driver = next((file for file in files if file.name.startswith("libpocl")), None)
        if driver is None or not any(file.name.endswith(_CHOSEN) for file in files):
            return None
        with suppress(OSError):
            CDLL(str(files[driver]), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return None  # somebody else was first
        folder = _links(files)
        CDLL(str(folder / driver), mode=os.RTLD_LAZY)
    except OSError:  # nothing can be written, or the driver cannot be loaded: then it is found as ever, and tried
        return None
    return folder


def _installed() -> dict[Path, Path]:
    """The driver's files by their place in the package, if it is the version that is known to choose wrongly."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return {}
    if package.version != _VERSION:
        return {}
    files = {
        Path(str(file)): Path(str(file.locate())).resolve() for file in package.files or [] if ".libs" in file.parts
    }
    return files if all(path.is_file() for path in files.values()) else {}


def _links(files: dict[Path, Path]) -> Path:
    """A folder in the user's cache with links to the files."""
    wrong = next(file for file in files if file.name.endswith(_CHOSEN))
    right = files[wrong.with_name(wrong.name.removesuffix(_CHOSEN) + _RIGHT)]
    links = files | {wrong: right}
    digest = sha256("\0".join(f"{link}\0{path}" for link, path in links.items()).encode()).hexdigest()[:16]
    folder = user_cache() / f"pocl-{digest}"
    if not folder.exists():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(mkdtemp(dir=folder.parent, prefix=".pocl-"))
        try:
            for link, path in links.items():
                (made / link).parent.mkdir(parents=True, exist_ok=True)
                (made / link).symlink_to(path)
            with suppress(OSError):  # another process was faster
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder
