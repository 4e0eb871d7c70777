"""Connections that come, on loaded machines and from attackers: healthy servers are not given up, strangers that are
slow or idle are, and forked processes leave the connection to their parent."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from opweave_cpu.device import CpuDevice
from opweave_remote.heartbeat import QUESTION, Life, answer, question, receive_exactly
from opweave_remote.server.limits import Limits
from opweave_remote.server.monitor import Monitor
from opweave_remote.server.newcomers import Newcomers
from opweave_remote.server.serving import Server
from opweave_remote.wires import SESSION
from tests.support.remote import TOKEN, beside

KEY, NAME = b"k" * 32, b"s" * 16


def cpu():
    device = CpuDevice()
    device.name = "cpu"
    return device


def asking(monitor, newcomers):
    """A connection whose questions are answered, and the thread that does it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)

    def serve():
        newcomers.enter(theirs)
        try:
            with theirs:
                monitor.answer(theirs, newcomers)
        except (EOFError, OSError):
            pass
        finally:
            newcomers.leave()

    threading.Thread(target=serve, daemon=True).start()
    return ours


def test_a_first_question_that_overtakes_the_news_of_its_session_is_answered():
    monitor = Monitor()
    with asking(monitor, Newcomers(10)) as sock:
        sock.sendall(question(NAME, KEY, 1))
        time.sleep(0.05)
        monitor.watch(NAME, KEY, 10)
        for number in (1, 2):
            assert receive_exactly(sock, 41) == answer(KEY, number, Life.RUNNING)
            sock.sendall(question(NAME, KEY, number + 1))
    monitor.forget(NAME)


@pytest.mark.parametrize("asked", [question(NAME, b"wrong", 1), question(b"?" * 16, KEY, 1)], ids=["forged", "unknown"])
def test_questions_of_strangers_are_not_answered(asked):
    monitor = Monitor()
    monitor.watch(NAME, KEY, 10)
    with asking(monitor, Newcomers(0.1)) as sock:
        sock.sendall(asked)
        assert sock.recv(1) == b""
    monitor.forget(NAME)


def test_a_client_asks_over_few_connections_at_a_time():
    monitor, newcomers = Monitor(), Newcomers(10)
    monitor.watch(NAME, KEY, 10)
    socks = [asking(monitor, newcomers) for _ in range(5)]
    for sock in socks:
        sock.sendall(question(NAME, KEY, 1))
    answered = [sock.recv(QUESTION.size) for sock in socks]
    assert sorted(map(bool, answered)) == [False, True, True, True, True]
    for sock in socks:
        sock.close()
    monitor.forget(NAME)


def test_who_sends_byte_after_byte_is_ended_in_time_and_clients_come_in():
    server = Server([cpu()], token=TOKEN, limits=Limits(handshake=0.3))
    ours, theirs = socket.socketpair()
    server.admit(theirs)
    ours.settimeout(10)
    start = time.monotonic()
    with pytest.raises(OSError):  # noqa: PT011, PT012
        for byte in SESSION + bytes(1000):
            ours.send(bytes([byte]))
            time.sleep(0.02)
    assert time.monotonic() - start < 5
    ours.close()
    server.stop()
    with beside([cpu()], limits=Limits(handshake=0.3)) as (_, connection):
        time.sleep(0.4)  # who has proved whose it is may be silent
        connection.devices[0].alloc(10).free()


def test_a_flood_of_connections_ends_its_oldest_ones():
    newcomers, ended = Newcomers(60, most=2), []
    pairs = [socket.socketpair() for _ in range(3)]

    def serve(i):
        newcomers.enter(pairs[i][1])
        pairs[i][1].recv(1)
        ended.append(i)
        newcomers.leave()

    threads = []
    for i in range(3):
        threads.append(threading.Thread(target=serve, args=(i,), daemon=True))
        threads[-1].start()
        while len(newcomers._since) < min(i + 1, 2):
            time.sleep(0.001)
    threads[0].join(10)
    assert ended == [0]
    for ours, _ in pairs[1:]:
        ours.close()
    for thread in threads:
        thread.join(10)
    for sock in (pairs[0][0], *[theirs for _, theirs in pairs]):
        sock.close()


def test_a_connection_that_breaks_while_it_is_opened_does_not_lose_the_server(monkeypatch):
    with beside([cpu()]) as (_, connection):
        right, broken = connection._dial, [EOFError("broken off"), ConnectionResetError(), TimeoutError()]

        def dial(preamble):
            if broken:
                raise broken.pop(0)
            return right(preamble)

        monkeypatch.setattr(connection, "_dial", dial)
        with connection.devices[0].open() as stream:
            stream.synchronize()
        assert not broken
        assert connection.alive
        monkeypatch.setattr(connection, "deadline", 0.1)
        broken += [ConnectionRefusedError()] * 1000
        with pytest.raises(Exception, match="cannot be reached"):
            connection.devices[0].open()
        assert not connection.alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:os.fork")  # of libraries that other tests loaded; the child uses none of them
def test_a_forked_process_leaves_the_connection_to_its_parent():
    with beside([cpu()]) as (_, connection):
        child = os.fork()
        if not child:
            told = 1
            try:
                lost = not connection.alive and "forked" in str(connection.fate.error)
                connection.close()
                told = 0 if lost else 2
            finally:
                os._exit(told)
        assert os.waitpid(child, 0)[1] == 0
        assert connection.alive
        connection.devices[0].alloc(10).free()
