"""`WeightCache`: weights on the server's disk, by the SHA-256 of their bytes, so that they come over the wire once."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp
from threading import Lock, Thread
from typing import Any, Final

import numpy as np

from opweave.contract import Buffer
from opweave.errors import FormatError, OpweaveError, Unavailable

__all__ = ["WeightCache"]


_MOST_EXPECTED: Final = 4096


class _Expected:
    """Bytes that a client is about to write, and what is still missing of them."""

    __slots__ = ("digest", "left", "offset", "size")

    def __init__(self, digest: bytes, offset: int, size: int) -> None:
        self.digest, self.offset, self.size, self.left = digest, offset, size, size


class WeightCache:
    """Files by the hash of their contents, in a folder for each token that only its owner can use (0700).

    Args:
        folder: where; made if it is not there.
        token: of the server: clients of another token find nothing that was uploaded by it.
        limit: bytes; files that were used least recently are removed first.
        files: weight files of this machine, whose tensors are found by their hashes too. A thread reads them once.

    Raises:
        Unavailable: the folder cannot be made or belongs to somebody else; a file that cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], token: bytes, limit: int, files: Iterable[str] = ()) -> None:
        self.folder: Final = Path(folder) / sha256(b"opweave weights\0" + token).hexdigest()[:32]
        self.limit: Final = limit
        self._lock: Final = Lock()
        self._expected: Final[dict[tuple[int, int], _Expected]] = {}
        self._own: Final[dict[bytes, np.ndarray[Any, Any]]] = {}
        self._told: Final[set[int | None]] = set()  # numbers of errors that were printed
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = self.folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
                raise PermissionError("it belongs to somebody else, or is a link")
            self.folder.chmod(0o700)
        except OSError as error:
            raise Unavailable(
                f"no weights can be kept in {self.folder}: {error}", remedy="give another folder"
            ) from error
        paths = list(files)
        for path in paths:
            if not os.access(path, os.R_OK):
                raise Unavailable(f"the weights in {path} cannot be read", remedy="give a file that this user can read")
        self.reader: Final = Thread(target=self._read_own, args=(paths,), name="opweave weights", daemon=True)
        self.reader.start()

    def _read_own(self, paths: list[str]) -> None:
        from opweave.formats.load import load_weights

        for path in paths:
            try:
                tensors = load_weights(path)
            except (OpweaveError, OSError) as error:
                print(f"no weights are read from {path}: {error}", file=sys.stderr, flush=True)
                continue
            for tensor in tensors.values():
                data = None if tensor.leaf is None else tensor.leaf.data
                if data is not None:
                    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                    self._own[sha256(raw.data).digest()] = raw

    def load(self, digest: bytes, buffer: Buffer, offset: int, size: int) -> bool:
        """Write the bytes with this hash to a buffer, whose range was checked; ``False`` where they are not here. They
        are then expected to be written by the client, and kept."""
        raw = self._own.get(digest)
        if raw is None:
            raw = self._read(digest, size)
        if raw is None or raw.size != size:
            with self._lock:
                self._expected.pop((id(buffer), offset), None)
                if len(self._expected) >= _MOST_EXPECTED:
                    del self._expected[next(iter(self._expected))]  # the oldest one is not kept then
                self._expected[id(buffer), offset] = _Expected(digest, offset, size)
            return False
        buffer.upload(offset, raw)
        return True

    def _read(self, digest: bytes, size: int) -> np.ndarray[Any, Any] | None:
        """The bytes that are kept with this hash, if they have it; a damaged file is removed."""
        path = self.folder / digest.hex()
        with suppress(OSError):
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:  # also where a client is wrong about the size
                return None
            raw = np.fromfile(path, np.uint8)
            if sha256(raw.data).digest() == digest:
                os.utime(path)
                return raw
            path.unlink()
        return None

    def wrote(self, buffer: Buffer, offset: int, size: int) -> None:
        """A client has written these bytes; when all of a tensor are there, check them and keep them.

        Raises:
            FormatError: they have another hash than the client said.
        """
        with self._lock:
            found = next((e for (of, at), e in self._expected.items()
                          if of == id(buffer) and at <= offset and offset + size <= at + e.size), None)  # fmt: skip
            if found is None:
                return
            found.left -= size
            if found.left > 0:
                return
            del self._expected[id(buffer), found.offset]
        raw = buffer.read(found.offset, found.size)
        if sha256(raw.data).digest() != found.digest:
            raise FormatError("weights arrived with another hash than was announced")
        try:
            self._keep(found.digest, raw)
        except OSError as error:
            # The client has its weights on the device; whoever runs the server is told once for each cause.
            if error.errno not in self._told:
                self._told.add(error.errno)
                print(f"weights are not kept in {self.folder}: {error}", file=sys.stderr, flush=True)

    def forget(self, buffer: Buffer) -> None:
        """Stop expecting writes to a buffer, which is about to be freed."""
        with self._lock:
            for key in [key for key in self._expected if key[0] == id(buffer)]:
                del self._expected[key]

    def _keep(self, digest: bytes, raw: np.ndarray[Any, Any]) -> None:
        if raw.size > self.limit:
            return
        self._make_room(raw.size)
        handle, name = mkstemp(dir=self.folder)  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw.data)
            os.replace(name, self.folder / digest.hex())
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _make_room(self, size: int) -> None:
        kept = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                found = path.stat()
                kept.append((found.st_mtime, found.st_size, path))
        total = sum(n for _, n, _ in kept)
        for _, n, path in sorted(kept):
            if total + size <= self.limit:
                break
            with suppress(OSError):
                path.unlink()
                total -= n
