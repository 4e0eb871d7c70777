"""Mutated messages against a server: typed refusals, no crash, no memory beyond the limits."""

from __future__ import annotations

import copy
import os
import random
import socket
import time
import zlib
from collections import Counter
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest

import opweave as ow
from opweave_cpu.device import CpuDevice
from opweave_remote.connection import Connection
from opweave_remote.security import new_nonce, proof
from opweave_remote.server.limits import Limits
from opweave_remote.server.serving import Server
from opweave_remote.wire import HEAD, MAGIC, MAX_BEFORE_PROOF, Kind, encode
from opweave_remote.wires import SESSION, STREAM, Wire
from tests.support.remote import TOKEN, pair_dial

MUTATIONS = int(os.environ.get("OPWEAVE_TEST_MUTATIONS", "5000"))
MEMORY = 1 << 20
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 7, 255, 1 << 20, 1 << 40, (1 << 63) - 1, 1.5, float("nan"), "", "cpu", "f32", "add", "any",
    "custom", "x" * 300, b"", b"\0" * 32, [], [1], [[]], {}, {"axis": 0}, {"dtype": "f32"},
)  # fmt: skip


class Client:
    """A connection by hand, as no honest client makes it."""

    def __init__(self, server: Server) -> None:
        self.dial = pair_dial(server)
        self.session = self.key = b""
        self.control = self.open(SESSION, "session", TOKEN)
        self.stream = self.open(STREAM, "stream", self.key)

    def open(self, preamble: bytes, role: str, key: bytes) -> Wire:
        wire = Wire(self.dial(preamble), MAX_BEFORE_PROOF, 0)
        wire.sock.settimeout(20)
        _, _, nonce, _ = wire.expect(Kind.CHALLENGE).args
        own = new_nonce()
        wire.say(Kind.HELLO, 1, role, self.session, own, proof(key, b"client", nonce, own, role.encode(), self.session))
        wire.reader.max_args = wire.reader.max_data = 1 << 26
        _, session, session_key, _ = wire.expect(Kind.WELCOME).args
        if role == "session":
            self.session, self.key = session, session_key
        return wire

    def close(self) -> None:
        for wire in (self.stream, self.control):
            wire.close()


def add_step(number: int) -> list[Any]:
    arg = [number, 0, "f32", [4], [4], 1]
    return ["add", [number, 64, "f32", [4], [4], 0], [arg, arg], {}, True, "sum", "exact"]


def honest(control: bool) -> list[tuple[Kind, list[Any], bytes]]:
    """Messages that a server takes, in an order that makes sense."""
    if control:
        return [
            (Kind.ALLOC, [1, "cpu", 1, 1000, "any"], b""),
            (Kind.WRITE, [2, 1, 0], bytes(64)),
            (Kind.READ, [3, 1, 0, 64], b""),
            (Kind.FILL, [4, 1, 0, 10, 3], b""),
            (Kind.COPY, [5, 1, 100, 1, 0, 50], b""),
            (Kind.ASK, [6, "cpu", [add_step(0)]], b""),
            (Kind.INFO, [7, "cpu"], b""),
            (Kind.HAVE, [8, 1, 0, 64, bytes(32)], b""),
            (Kind.GRANT, [9, 1, 0, 64], b""),
            (Kind.ABORT, [1], b""),
            (Kind.WRITE_PACKED, [10, 1, 0, 64, "zlib", 4], zlib.compress(bytes(64))),
            (Kind.PROBE, [11], bytes(64)),
            (Kind.FREE, [[1]], b""),
        ]
    return [
        (Kind.OPEN, [1, 1, "cpu", {}], b""),
        (Kind.FUSE, [2, [add_step(0)]], b""),
        (Kind.COMPILE, [3, 1, [[[add_step(1)], 0, None, [], [], [], [], []]]], b""),
        (Kind.UPLOAD, [1, 0], bytes(16)),
        (Kind.UPLOAD_PACKED, [1, 0, 16, "zlib", 1], zlib.compress(bytes(16))),
        (Kind.RUN, [1], b""),
        (Kind.MOVE, [1, 0, 1, 64, 16], b""),
        (Kind.DOWNLOAD, [4, 1, 64, 16], b""),
        (Kind.RECORD, [5], b""),
        (Kind.WAIT, [1, 1], b""),
        (Kind.PULL, [1, 0, "127.0.0.1:9", bytes(64), 16], b""),
        (Kind.BIND, [7, 2, [[1, 0, 16]], [1], [[1, 64, 16]]], b""),
        (Kind.LAUNCH, [8, 2], bytes(16)),
        (Kind.SYNC, [6], b""),
        (Kind.DROP, [[1, 2]], b""),
    ]


def mutated(value: Any, rng: random.Random) -> Any:
    """The same with one part replaced."""
    if type(value) is list and value and rng.random() < 0.85:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng), *value[i + 1 :]]
    return copy.deepcopy(rng.choice(VALUES))


def drain(wire: Wire) -> list[Kind]:
    """The kinds of all answers until the connection ends."""
    kinds = []
    try:
        while True:
            frame = wire.reader.frame()
            kinds.append(frame.kind)
            wire.reader.skip(frame.size)
    except (EOFError, OSError):
        return kinds


@pytest.mark.parametrize("control", [True, False])
def test_messages_with_other_values_are_refused_and_the_server_goes_on(control):
    rng = random.Random(5)
    device = CpuDevice()
    device._name = "cpu"
    server = Server([device], token=TOKEN, limits=Limits(memory=MEMORY, data=1 << 16, message=1 << 16))
    answers: Counter[Kind] = Counter()
    while answers.total() < MUTATIONS // 2:
        client = Client(server)
        if not control:
            client.control.say(Kind.ALLOC, 1, "cpu", 1, 1000, "any")
            client.control.expect(Kind.DONE)
        wire = client.control if control else client.stream
        with suppress(OSError):  # it was refused
            for _ in range(4):
                for kind, args, data in honest(control):
                    given = mutated(args, rng) if rng.random() < 0.3 else args
                    if type(given) is not list or (given is not args and kind in (Kind.PULL, Kind.WAIT)):
                        continue
                    packed = msgpack.packb(given)
                    wire.send([HEAD.pack(MAGIC, kind, 0, len(packed), len(data)) + packed, data])
            wire.sock.shutdown(socket.SHUT_WR)
        answers.update(drain(wire))
        assert server.metrics.read()["buffer_bytes"] <= MEMORY  # of this client, the only one
        client.close()
        until_nobody_is_left(server)
    assert {Kind.DONE, Kind.FAILED, Kind.REFUSED, Kind.DATA} <= set(answers)
    check_sound(server)


def until_nobody_is_left(server: Server) -> None:
    deadline = time.monotonic() + 20
    while server.metrics.read()["clients"]:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def check_sound(server: Server) -> None:
    """The server serves an honest client, and nothing is left of the others."""
    until_nobody_is_left(server)
    assert server.metrics.read()["buffer_bytes"] == 0
    connection = Connection("honest", pair_dial(server), TOKEN, 10.0)
    with ow.Scheduler(connection.devices[0]) as scheduler:
        got = scheduler.build(ow.input("x", (3,)) + 1).run(x=np.zeros(3, np.float32))
        np.testing.assert_array_equal(got, np.ones(3, np.float32))
    connection.close()
    server.stop()


def test_mutated_bytes_before_and_behind_the_proof_end_the_connection_only():
    rng = random.Random(11)
    device = CpuDevice()
    device._name = "cpu"
    server = Server([device], token=TOKEN, limits=Limits(memory=MEMORY, data=1 << 16, message=1 << 16, handshake=5))
    for i in range(max(MUTATIONS // 50, 50)):
        if i % 2:
            sock = pair_dial(server)(rng.choice([SESSION, STREAM, b"GET /", b"\x16\x03\x01\x02\x00"]))
            raw = bytearray(
                encode(Kind.HELLO, 1, rng.choice(["session", "stream", "pull"]), bytes(32), bytes(32), bytes(32))
            )
        else:
            client = Client(server)
            sock = client.control.sock
            raw = bytearray(b"".join(encode(k, *a, size=len(d)) + d for k, a, d in honest(True)))
        for _ in range(rng.randint(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        sock.settimeout(20)
        try:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except OSError:
            pass
        sock.close()
        if not i % 2:
            client.close()
    check_sound(server)
