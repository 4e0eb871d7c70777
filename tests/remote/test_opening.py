"""Reaching a server: names with several addresses, ports where something else listens, servers that take their time."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import opweave_remote
from opweave.errors import Unavailable
from opweave_remote import dialing
from opweave_remote.server.front import listen
from opweave_remote.wire import HEAD, MAGIC, Kind
from opweave_remote.wires import HEARTBEAT, SESSION, STREAM, Address
from tests.support.remote import ServerProcess

TEXT = "a token for these tests"
CHALLENGE = HEAD.pack(MAGIC, Kind.CHALLENGE, 0, 60, 0)


@contextmanager
def something_else(said, then):
    """The address of a port that says ``said`` to whoever comes, and ``then`` byte after byte, two in a second."""
    over = threading.Event()

    def speak():
        sock, _ = listener.accept()
        with sock:
            try:
                sock.sendall(said)
                for byte in then:
                    if over.wait(0.5):
                        return
                    sock.sendall(bytes((byte,)))
                over.wait(30)
            except OSError:  # the client has left
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        thread.join(10)


@pytest.mark.parametrize(
    ("said", "then", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", b"", "does not speak as opweave-remote does"),
        (b"", b"", "did not answer within 1 s"),
        (CHALLENGE, bytes(60), "did not answer within 1 s"),
    ],
    ids=["ssh", "silent", "slow"],
)
def test_another_program_on_the_port_is_told_within_the_deadline(said, then, words):
    start = time.monotonic()
    with something_else(said, then) as address:
        with pytest.raises(Unavailable, match=words) as told:
            opweave_remote.connect(address, token=TEXT, deadline=1)
        assert "another program" in told.value.remedy
        assert time.monotonic() - start < 5


def test_tls_with_a_server_that_sends_byte_after_byte_ends_within_the_deadline():
    record = b"\x16\x03\x03\x40\x00" + bytes(60)  # the beginning of a record of 16 KiB
    start = time.monotonic()
    with something_else(record[:5], record[5:]) as address:
        with pytest.raises(Unavailable, match="cannot be reached: it took longer than"):
            opweave_remote.connect(address, token=TEXT, deadline=1, tls=True)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("silent", [False, True])
def test_of_several_addresses_the_one_that_answers_is_used(silent):
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = ("127.0.0.1", 9)  # refuses
        if silent:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            first = full.getsockname()
            for _ in range(3):  # more than it holds: the next one gets no answer
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(first)
        start = time.monotonic()
        found = [(socket.AF_INET, where) for where in (first, server.getsockname())]
        with dialing.reach(found, 2.0) as sock:
            assert sock.getpeername() == server.getsockname()
        assert time.monotonic() - start < (2 if silent else 1)


def reached(stack, dial, preamble):
    """The address that a new connection has reached."""
    sock = dial(preamble)
    stack.callback(sock.close)
    assert isinstance(sock, socket.socket)
    return sock.getpeername()


def test_all_connections_of_a_client_reach_the_same_of_the_servers_that_share_a_name(monkeypatch):
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname() for _ in range(2)]

        def rotating(*_, **__):
            servers.reverse()
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", where) for where in servers]

        monkeypatch.setattr(socket, "getaddrinfo", rotating)
        dial = dialing.tcp_dial(Address("balanced.example", 1), None, None, 5.0)
        used = {reached(stack, dial, preamble) for preamble in (SESSION, STREAM, STREAM, HEARTBEAT)}
        assert len(used) == 1
        again = dialing.tcp_dial(Address("balanced.example", 1), None, None, 5.0)
        assert reached(stack, again, SESSION) not in used


def test_a_port_that_is_taken_is_said_once():
    with listen(Address("127.0.0.1", 0)) as taken:
        where = Address(*taken.getsockname())
        with pytest.raises(Unavailable, match="already in use") as told:
            listen(where)
    assert str(told.value).count(str(where.port)) == 1
    assert "running there already" in told.value.remedy


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 and IPv4 on one socket")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too():
    with listen(Address("::", 0)) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), 5).close()


def test_a_server_that_waits_for_its_clients_gives_them_connections_and_refuses_others(token):
    server = ServerProcess("--token-file", str(token), "--grace", "60")
    try:
        connection = opweave_remote.connect(server.address, token_file=token)
        server.process.send_signal(signal.SIGTERM)
        other = server.address.replace("127.0.0.1", "localhost")
        time.sleep(1)
        with pytest.raises(Unavailable, match="being stopped"):
            opweave_remote.connect(other, token_file=token)
        values = np.arange(1 << 22, dtype=np.uint8)
        with connection.devices[0].alloc(values.size) as buffer:  # by connections that did not exist before
            buffer.upload(0, values)
            np.testing.assert_array_equal(buffer.read(), values)
        with connection.devices[0].open() as stream:
            stream.synchronize()
        connection.close()
        assert server.process.wait(10) == 0
    finally:
        server.stop()


def test_a_second_signal_ends_a_server_that_waits_for_its_clients(token):
    server = ServerProcess("--token-file", str(token), "--grace", "60")
    try:
        connection = opweave_remote.connect(server.address, token_file=token)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="timed out"):
            server.process.wait(1)
        assert connection.devices[0].mem_info()[1] > 0  # it serves who is there
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
    finally:
        server.stop()
