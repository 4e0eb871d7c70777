"""`FileCache`: small files in the user's cache folder, which can be deleted at any time.

For profiles of devices, and for what plugins keep between processes: compiled programs, results of slow queries.
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

    Nothing here raises: if the folder cannot be written, or a file is damaged, the entry counts as missing. Only
    regular files are read, and only up to a size. An entry is written completely or not at all.

    Args:
        variable: name of the environment variable with the path of the folder; its value ``0`` switches the cache off.
            If it is not set, the folder is ``opweave/<name>`` in the user's cache folder (`user_cache`).
        name: name of the folder in the user's cache folder.
        folder: the folder to use in place of all that.
        largest: entries above this many bytes are neither read nor written.
        limit: if the folder exceeds this many bytes, the least recently used entries are deleted.
        checked: store a SHA-256 digest with each entry, so that damaged entries count as missing.
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
        """The entry ``key``, or ``None`` if it is missing or damaged."""
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
            os.utime(path)  # time of the last use
        return stored

    def _read(self, path: Path) -> bytes | None:
        """The bytes of a regular file of at most ``largest`` bytes."""
        # Without O_NONBLOCK, opening a named pipe would wait until a process writes to it.
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
        """Write an entry. Returns whether that succeeded."""
        if self.folder is None or len(data) > self.largest:
            return False
        with suppress(OSError, ValueError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            made, path = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with open(made, "wb") as file:
                    file.write(sha256(data).digest() + data if self.checked else data)
                os.replace(path, self.folder / key)  # atomic: other processes see all of the entry or nothing
            except BaseException:
                with suppress(OSError):
                    os.unlink(path)
                raise
            return True
        return False

    def drop(self, key: str) -> None:
        """Delete an entry."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / key).unlink()

    def names(self) -> list[str]:
        """What the folder has, by name, which costs no look at each file; none if it is missing or cannot be read."""
        with suppress(OSError):
            return os.listdir(self.folder) if self.folder is not None else []
        return []

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """Every regular file of the folder and its status; none if the folder is missing or cannot be read."""
        found = []
        with suppress(OSError):
            for path in self.folder.iterdir() if self.folder is not None else ():
                with suppress(OSError):  # another process deleted it
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        found.append((path, status))
        return found

    def why_not_writable(self) -> str | None:
        """Why nothing can be written to the folder, or ``None`` if it can. Tries it with a temporary file."""
        if self.folder is None:
            return "it is switched off"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(4096))
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _sweep(self) -> None:
        """Once per process: if the limit is exceeded, delete the least recently used entries down to half of it."""
        if self._swept:
            return
        self._swept = True
        entries = self.entries()
        size = sum(status.st_size for _, status in entries)
        if size > self.limit:
            for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime):
                if size <= self.limit // 2:
                    break
                size -= status.st_size
                with suppress(OSError):
                    path.unlink()


def user_cache() -> Path:
    """The folder ``opweave`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache`` or the system's equivalent).

    If the user has no such folder or cannot write to it, as in containers that run with an unknown user id, this is a
    folder in the temporary directory that only this user can read; a `RuntimeWarning` says so once.
    """
    folder = own_cache_folder()
    return folder / "opweave" if folder is not None else _temporary()


def own_cache_folder() -> Path | None:
    """The folder in which all programs of the user keep such files; ``None``: there is none that can be written."""
    folder = _user_folder()
    return folder if folder is not None and _can_be_made(folder) else None


def _user_folder() -> Path | None:
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


def _can_be_made(folder: Path) -> bool:
    """Whether ``folder``, or its closest existing parent, is writable."""
    for there in (folder, *folder.parents):
        if os.path.exists(there):
            return os.path.isdir(there) and os.access(there, os.W_OK)
    return False


@cache
def _temporary() -> Path:
    """A private folder of this user in the temporary directory; the same one in each process if possible."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"opweave-{user}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        folder = Path(tempfile.mkdtemp(prefix="opweave-"))
    warnings.warn(
        f"this user has no writable cache folder; caches are kept in {folder}. To choose another folder, set "
        "XDG_CACHE_HOME to a writable one",
        RuntimeWarning,
        stacklevel=2,
    )
    return folder


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, that only this user can access."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return mine and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
