"""`NodeServer`: what Ray runs on a node: a server of opweave-remote with the node's own plugins and devices."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from opweave_remote.server.front import Front, listen
from opweave_remote.wires import Address

__all__ = ["NodeServer"]


class NodeServer:
    """A server of opweave-remote. Made by Ray, in a process of its own.

    Args:
        host: the node's address, where it listens on a free port.
        devices: names of devices to show; none: all of the node.
        token: what clients have to know.
        certificate, key, authority: PEM; the last one is who has issued certificates to all servers of the cluster.
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
        self._front: Final = Front(listen(Address(host, 0)), settings, lambda line: print(line, file=sys.stderr))

    def address(self) -> str:
        """Where it listens."""
        return str(self._front.address)

    def ended(self) -> bool:
        """Wait until it has ended. Ray answers for it when the process or the node is lost."""
        return self._front.ended.wait()

    def stop(self) -> None:
        """End the server; its clients have lost their devices."""
        self._front.stop(0.0)
        self._folder.cleanup()
