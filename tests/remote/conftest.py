"""Needs opweave-remote and opweave-cpu. Servers are real processes unless a test says otherwise."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from opweave_remote import backend
from tests.support.remote import ServerProcess, own_token


@pytest.fixture(scope="session")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_token(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def server(token: Path) -> Iterator[ServerProcess]:
    """A server on loopback."""
    made = ServerProcess("--token-file", str(token))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Certificates of an authority, of another one, and one that has expired."""
    folder = tmp_path_factory.mktemp("tls")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other.pem")
    past = datetime.datetime.now() - datetime.timedelta(days=1)
    made = {
        "server": ca.issue_cert("localhost", "127.0.0.1"),
        "client": ca.issue_cert("somebody@example.org"),
        "expired": ca.issue_cert("localhost", "127.0.0.1", not_after=past),
        "stranger": other.issue_cert("else@example.org"),
    }
    for name, cert in made.items():
        cert.private_key_pem.write_to_path(folder / f"{name}.key")
        (folder / f"{name}.pem").write_bytes(b"".join(c.bytes() for c in cert.cert_chain_pems))
    return lambda name: str(folder / name)


@pytest.fixture(autouse=True)
def no_servers_left() -> Iterator[None]:
    """Connections that a test leaves are closed."""
    yield
    for _, made in list(backend._SERVERS.values()):
        if made is not None:
            made.close()
    backend._SERVERS.clear()
