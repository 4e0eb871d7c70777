"""`BinaryCache`: built programs on disk, so that a process builds only what none before it has built.

Loading a binary takes a tenth of what drivers with caches of their own take for a source. pyopencl's cache is not used:
it fails on damaged entries and on locks left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

__all__ = ["FOLDER", "LIMIT", "BinaryCache"]

FOLDER: Final = "OPWEAVE_OPENCL_CACHE"
"""Environment variable: the folder of built programs, or ``0`` for none."""

LIMIT: Final = 256 << 20
"""Bytes of the folder from which on the entries that were not used for longest are deleted."""

_DIGEST: Final = 32


class BinaryCache:
    """A folder with one file for each program. Any number of processes and threads may use it at once.

    A folder that cannot be written, and files that are damaged, are as good as empty ones.

    Args:
        folder: where; ``None`` reads the environment, else takes the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            given = os.environ.get(FOLDER, "")
            folder = None if given == "0" else Path(given) if given else _default()
        self.folder: Final = folder
        self._swept = False

    @staticmethod
    def key(parts: Iterable[str]) -> str:
        """The name of what is made from ``parts``: source, options, device, driver."""
        digest = sha256()
        for part in parts:
            text = part.encode()
            digest.update(b"%d:" % len(text))
            digest.update(text)
        return digest.hexdigest()

    def load(self, key: str) -> bytes | None:
        """The binary of that key, or ``None``: not there, or not as it was stored."""
        if self.folder is None:
            return None
        path = self.folder / key
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        binary = stored[_DIGEST:]
        # Drivers crash on damaged binaries.
        if sha256(binary).digest() != stored[:_DIGEST]:
            self.drop(key)
            return None
        with suppress(OSError):
            os.utime(path)  # the time of the last use, by which entries are deleted
        return binary

    def store(self, key: str, binary: bytes) -> None:
        """Keep a binary."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep(self.folder)
            with NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as file:
                try:
                    file.write(sha256(binary).digest() + binary)
                    file.close()
                    os.replace(file.name, self.folder / key)  # other processes see all of it or nothing
                except BaseException:
                    with suppress(OSError):
                        os.unlink(file.name)
                    raise

    def drop(self, key: str) -> None:
        """Forget a binary that turned out to be of no use."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / key).unlink()

    def _sweep(self, folder: Path) -> None:
        """Once a process: delete what was not used for longest, down to half of the limit, where it is exceeded."""
        if self._swept:
            return
        self._swept = True
        entries = [(path, path.stat()) for path in folder.iterdir()]
        size = sum(status.st_size for _, status in entries)
        if size > LIMIT:
            for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime):
                if size <= LIMIT // 2:
                    break
                size -= status.st_size
                with suppress(OSError):
                    path.unlink()


def _default() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("opweave", appauthor=False) / "opencl"
