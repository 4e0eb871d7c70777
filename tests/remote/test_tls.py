"""TLS 1.3: certificates of servers and of clients, and what is wrong with them."""

from __future__ import annotations

import ssl

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from opweave.errors import Unavailable
from tests.support.remote import ServerProcess, serve_process


def tls(files, name="server"):
    return "--tls-cert", files(f"{name}.pem"), "--tls-key", files(f"{name}.key")


@pytest.fixture(scope="module")
def secure(files, token):
    made = ServerProcess("--token-file", str(token), *tls(files))
    yield made
    made.stop()


def test_a_program_runs_and_large_arrays_come_over_unchanged(secure, token, files):
    connection = opweave_remote.connect(secure.address, token_file=token, ca=files("ca.pem"))
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1500, 1000)).astype(np.float32)
    with ow.Scheduler(connection.devices[0]) as scheduler:
        np.testing.assert_array_equal(scheduler.build(-ow.input("x", values.shape)).run(x=values), -values)
    with connection.devices[0].alloc(30_000_000) as buffer:
        raw = rng.integers(0, 256, 30_000_000, np.uint8)
        buffer.upload(0, raw)
        np.testing.assert_array_equal(buffer.read(), raw)


def test_versions_before_tls_1_3_are_refused(secure, files):
    context = ssl.create_default_context(cafile=files("ca.pem"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    import socket

    host, _, port = secure.address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"opw1S")
        with pytest.raises(ssl.SSLError, match=r"(?i)version"):
            context.wrap_socket(sock, server_hostname="localhost")


@pytest.mark.parametrize("ca", ["other.pem", None])
def test_a_server_of_another_authority_is_refused(secure, token, files, ca):
    with pytest.raises(Unavailable, match="no TLS"):
        opweave_remote.connect(secure.address, token_file=token, tls=True, ca=None if ca is None else files(ca))


def test_a_server_of_another_name_is_refused(secure, token, files):
    with pytest.raises(Unavailable, match="no TLS"):
        opweave_remote.connect(secure.address, token_file=token, ca=files("ca.pem"), server_name="elsewhere")


def test_a_client_without_tls_is_refused(secure, token):
    with pytest.raises(Unavailable, match="TLS"):
        opweave_remote.connect(secure.address, token_file=token, deadline=2)


def test_an_expired_certificate_is_refused(token, files):
    with (
        serve_process("--token-file", str(token), *tls(files, "expired")) as server,
        pytest.raises(Unavailable, match="expired"),
    ):
        opweave_remote.connect(server.address, token_file=token, ca=files("ca.pem"))


def test_mutual_tls_needs_no_token(files):
    with serve_process("--client-ca", files("ca.pem"), *tls(files)) as server:
        own = {"cert": files("client.pem"), "key": files("client.key")}
        connection = opweave_remote.connect(server.address, ca=files("ca.pem"), **own)
        connection.devices[0].alloc(10).free()
        for wrong in ({}, {"cert": files("stranger.pem"), "key": files("stranger.key")}):
            with pytest.raises(Unavailable):
                opweave_remote.connect(server.address, ca=files("ca.pem"), **wrong)
