"""`BinaryCache`: built programs on disk, so that a process builds only what none before it has built.

Loading a binary takes a tenth of the time in which drivers with caches of their own build a source. pyopencl's cache is
not used: it fails on damaged entries and on locks left behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Final

from opweave.runtime.host.cache import FileCache, own_cache_folder, user_cache
from opweave_opencl.drivers import variable

__all__ = ["FOLDER", "LIMIT", "BinaryCache", "keep_pyopencl_off_missing_home"]

FOLDER: Final = "OPWEAVE_OPENCL_CACHE"
"""Environment variable: the folder of built programs, or ``0`` for none."""

LIMIT: Final = 256 << 20
"""Bytes of the folder from which on the entries that were not used for longest are deleted."""


_CACHES: Final = "XDG_CACHE_HOME"

_KEY: Final = re.compile(r"[0-9a-f]{64}")


class BinaryCache(FileCache):
    """A folder with one file for each program, checked before it is given out: drivers crash on damaged binaries.

    Args:
        folder: of the files; ``None``: as `FOLDER` says, else in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(FOLDER, "opencl", folder, limit=LIMIT, checked=True)

    def programs(self) -> list[tuple[Path, os.stat_result]]:
        """The entries whose names are keys: other files may lie in a folder that the user named."""
        return [(path, status) for path, status in self.entries() if _KEY.fullmatch(path.name)]

    @staticmethod
    def key(parts: Iterable[str]) -> str:
        """The name of what is made from ``parts``: source, options, device, driver."""
        digest = sha256()
        for part in parts:
            text = part.encode()
            digest.update(b"%d:" % len(text))
            digest.update(text)
        return digest.hexdigest()


def keep_pyopencl_off_missing_home() -> None:
    """Where the user has no folder for caches, let pyopencl keep its own in the temporary folder that opweave uses.

    pyopencl stores the functions that it generates for calls of kernels. It opens that store in the user's cache folder
    when its module is imported, with the first kernel, and without such a folder the import fails.
    """
    if own_cache_folder() is not None:
        return
    with variable(_CACHES, str(user_cache())):
        import pyopencl.invoker  # noqa: F401  # where it opens the store
