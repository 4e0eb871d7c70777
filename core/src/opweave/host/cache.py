"""`FileCache`: small files that can be made again, in the user's cache folder.

For profiles of devices, and for what plugins keep between processes: built programs, answers of slow drivers.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

__all__ = ["FileCache", "own_cache_folder", "user_cache"]

_DIGEST: Final = 32


class FileCache:
    """A folder with one file for each entry. Any number of processes and threads may use it at once.

    A folder that cannot be written and files that are damaged are as good as empty ones: nothing here raises. Only
    regular files are read, and only up to a size. An entry is written whole or not at all.

    Args:
        variable: environment variable that names the folder; ``0``: nothing is kept. Unset: ``opweave/<name>`` in the
            user's cache folder (`user_cache`).
        name: of the folder in the user's.
        folder: where, whatever the environment says.
        largest: bytes of the largest entry that is read or kept.
        limit: bytes of the folder from which on the entries that were not used for longest are deleted.
        checked: keep a digest with each entry, so that one that was damaged is not given out.
    """

    def __init__(
        self,
        variable: str,
        name: str,
        folder: Path | None = None,
        *,
        largest: int = 64 << 20,
        limit: int = 256 << 20,
        checked: bool = False,
    ) -> None:
        if folder is None:
            chosen = os.environ.get(variable, "")
            if chosen != "0":
                folder = Path(os.path.expanduser(chosen)) if chosen else user_cache() / name
        self.folder: Final = folder
        self.largest, self.limit, self.checked = largest, limit, checked
        self._swept = False

    def load(self, key: str) -> bytes | None:
        """The entry of that key, or ``None``: not there, or not as it was stored."""
        if self.folder is None:
            return None
        path = self.folder / key
        stored = self._read(path)
        if stored is None:
            return None
        if self.checked:
            stored, digest = stored[_DIGEST:], stored[:_DIGEST]
            if sha256(stored).digest() != digest:
                self.drop(key)
                return None
        with suppress(OSError):
            os.utime(path)  # the time of the last use, by which entries are deleted
        return stored

    def _read(self, path: Path) -> bytes | None:
        """The bytes of a regular file of at most ``largest`` bytes."""
        # Opening a named pipe would wait for somebody who writes to it.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            opened = os.open(path, flags)
        except (OSError, ValueError):
            return None
        try:
            status = os.fstat(opened)
            most = self.largest + _DIGEST * self.checked
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                return None
            with open(opened, "rb", closefd=False) as file:
                return file.read(most)
        except OSError:
            return None
        finally:
            os.close(opened)

    def store(self, key: str, data: bytes) -> bool:
        """Keep an entry; whether it could be written."""
        if self.folder is None or len(data) > self.largest:
            return False
        with suppress(OSError, ValueError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep(self.folder)
            made, path = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with open(made, "wb") as file:
                    file.write(sha256(data).digest() + data if self.checked else data)
                os.replace(path, self.folder / key)  # other processes see all of it or nothing
            except BaseException:
                with suppress(OSError):
                    os.unlink(path)
                raise
            return True
        return False

    def drop(self, key: str) -> None:
        """Forget an entry that turned out to be of no use."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / key).unlink()

    def why_not_writable(self) -> str | None:
        """Why nothing can be kept in the folder, or ``None``: it can. Tried with a file, which is deleted again."""
        if self.folder is None:
            return "it is switched off"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(4096))
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _sweep(self, folder: Path) -> None:
        """Once a process: delete what was not used for longest, down to half of the limit, where it is exceeded."""
        if self._swept:
            return
        self._swept = True
        entries = [(path, path.lstat()) for path in folder.iterdir()]
        size = sum(status.st_size for _, status in entries)
        if size > self.limit:
            for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime):
                if size <= self.limit // 2:
                    break
                size -= status.st_size
                with suppress(OSError):
                    path.unlink()


def user_cache() -> Path:
    """``opweave`` in the folder in which the user's programs keep what can be made again.

    Where the user has no folder, or one that cannot be written, as in containers that run under a number that no user
    has: a folder among the temporary files that only this user can read. A `RuntimeWarning` says so once.
    """
    folder = own_cache_folder()
    return folder / "opweave" if folder is not None else _temporary()


def own_cache_folder() -> Path | None:
    """The folder in which all programs of the user keep such files; ``None``: there is none that can be written."""
    folder = _by_custom()
    return folder if folder is not None and _may_be_made(folder) else None


def _by_custom() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if not home.is_absolute():
        return None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    return home / (Path("Library") / "Caches" if sys.platform == "darwin" else Path(".cache"))


def _may_be_made(folder: Path) -> bool:
    """Whether ``folder``, or what of it is there already, can be written."""
    for there in (folder, *folder.parents):
        if os.path.exists(there):
            return os.path.isdir(there) and os.access(there, os.W_OK)
    return False


@cache
def _temporary() -> Path:
    """A folder of this user's among the temporary files, the same one in each process if that is possible."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"opweave-{user}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        folder = Path(tempfile.mkdtemp(prefix="opweave-"))
    warnings.warn(
        f"there is no folder of this user's to keep caches in; they are kept in {folder}. To choose another place, set "
        "XDG_CACHE_HOME to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
    return folder


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, and no link to one, that only this user can write."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return mine and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
