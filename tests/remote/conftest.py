"""Needs opweave-remote and opweave-cpu. Servers are real processes unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(autouse=True)
def no_servers_left() -> Iterator[None]:
    """Connections that a test leaves are closed."""
    yield
    for _, made in list(backend._SERVERS.values()):
        if made is not None:
            made.close()
    backend._SERVERS.clear()
