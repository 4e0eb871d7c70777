"""`NodeServer`: what Ray runs on a node: a server of opweave-remote with the node's own plugins and devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Final

import numpy as np

from opweave_remote.greeting import greet
from opweave_remote.server.front import Front, listen
from opweave_remote.server.limits import Limits
from opweave_remote.wire import MAX_BEFORE_PROOF, Kind, encode
from opweave_remote.wires import Address, Wire

__all__ = ["NodeServer"]

_TIMEOUT: Final = 60.0


class NodeServer:
    """A server of opweave-remote. Made by Ray, in a process of its own.

    Args:
        host: the node's address, where it listens on a free port.
        devices: names of devices to show; none: all of the node.
        token: what clients have to know.
        certificate, key, authority: PEM; the last one issued the certificates of all servers of the cluster.
        limits: fields of `opweave_remote.server.limits.Limits`.

    Raises:
        OpweaveError: the node has no such devices, or none.
    """

    def __init__(
        self,
        host: str,
        devices: list[str],
        token: bytes,
        certificate: bytes,
        key: bytes,
        authority: bytes,
        limits: dict[str, Any],
    ) -> None:
        self._folder: Final = TemporaryDirectory(prefix="opweave-ray-")  # 0700
        files = {}
        contents = {"token": token, "cert.pem": certificate, "key.pem": key, "ca.pem": authority}
        for name, content in contents.items():
            path = Path(self._folder.name) / name
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            files[name] = str(path)
        settings = {
            "devices": devices,
            "token_file": files["token"],
            "tls": [files["cert.pem"], files["key.pem"], None],
            "limits": limits,
            "peer_ca": files["ca.pem"],  # the servers of a cluster copy directly from one another
        }
        self._most: Final = Limits(**limits).data
        self._entering: Final = Lock()
        self._entered: tuple[bytes, Wire] | None = None
        self._front: Final = Front(listen(Address(host, 0)), settings, lambda line: print(line, file=sys.stderr))

    def address(self) -> str:
        """``host:port`` where it listens."""
        return str(self._front.address)

    def write(self, session: bytes, key: bytes, buffer: int, offset: int, data: np.ndarray[Any, Any]) -> None:
        """Write bytes, which Ray has brought, to a buffer; raises `FormatError` if the server answers a failure."""
        with self._inside(session, key) as wire:
            for at in range(0, data.size, self._most):
                piece = data[at : at + self._most].data
                wire.send([encode(Kind.WRITE, 1, buffer, offset + at, size=len(piece)), piece])
                wire.expect(Kind.DONE)

    def read(self, session: bytes, key: bytes, buffer: int, offset: int, size: int) -> np.ndarray[Any, Any]:
        """Bytes of a buffer, which Ray brings to the client; raises `FormatError` if the server answers a failure."""
        out = np.empty(size, np.uint8)
        with self._inside(session, key) as wire:
            for at in range(0, size, self._most):
                piece = out[at : at + self._most].data
                wire.say(Kind.READ, 1, buffer, offset + at, len(piece))
                wire.expect(Kind.DATA)
                wire.reader.into(piece)
        return out

    @contextmanager
    def _inside(self, session: bytes, key: bytes) -> Iterator[Wire]:
        """A connection of a session to the process that computes. It is kept until another session comes, or something
        goes wrong."""
        with self._entering:
            try:
                if self._entered is None or self._entered[0] != session:
                    self._leave()
                    wire = Wire(self._front.enter(), MAX_BEFORE_PROOF, 0)
                    self._entered = session, wire
                    wire.sock.settimeout(_TIMEOUT)
                    greet(wire, "bulk", session, key)
                    wire.reader.max_args = wire.reader.max_data = self._most
                yield self._entered[1]
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered[1].close()
            self._entered = None

    def ended(self) -> bool:
        """Wait until it has ended. When the process or the node is lost, Ray raises an error in its place."""
        return self._front.ended.wait()

    def stop(self) -> None:
        """End the server; its clients have lost their devices."""
        self._leave()
        self._front.stop(0.0)
        self._folder.cleanup()
