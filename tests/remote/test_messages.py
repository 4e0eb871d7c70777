"""Mutated messages against a server: typed refusals, no crash, no memory beyond the limits."""

from __future__ import annotations

import copy
import gc
import os
import random
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import msgpack
import numpy as np
import pytest

import opweave as ow
from opweave.contract import Plan
from opweave.errors import OpweaveError
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_cpu.device import CpuDevice
from opweave_remote.connection import Connection
from opweave_remote.security import new_nonce, proof
from opweave_remote.server.launches import BoundLaunch
from opweave_remote.server.limits import Limits
from opweave_remote.server.serving import Server
from opweave_remote.server.session import Session
from opweave_remote.server.streams import StreamChannel
from opweave_remote.wire import HEAD, MAGIC, MAX_BEFORE_PROOF, SCHEMA, Kind, encode
from opweave_remote.wires import SESSION, STREAM, Wire
from tests.support.real_devices import make
from tests.support.remote import TOKEN, pair_dial

MUTATIONS = int(os.environ.get("OPWEAVE_TEST_MUTATIONS", "5000"))
MEMORY = 1 << 20
WITH_DATA = (Kind.WRITE, Kind.WRITE_PACKED, Kind.UPLOAD, Kind.UPLOAD_PACKED, Kind.LAUNCH, Kind.PROBE)
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
    device.name = "cpu"
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


FRAMES = 100_000
INTEGERS = (0, 1, 2, 3, 7, 16, 64, 255, 1000, 1 << 20, 1 << 32, (1 << 63) - 1)
TEXTS = ("", "cpu", "any", "weights", "f32", "zlib", "host", "\0", "x" * 300)
BYTES = (b"", b"\0" * 16, b"\0" * 32, b"x" * 64)
LISTS = (*VALUES, [[1, 0, 16]], [1, 2], [add_step(1)], [[add_step(1)]])


def of_any_values(kind: Kind, rng: random.Random) -> bytes:
    """A frame whose arguments have the types of its kind, and any values."""
    # What FREE and DROP do not understand ends the connection: most of theirs are lists of numbers.
    numbers = kind in (Kind.FREE, Kind.DROP) and rng.random() < 0.99
    draw = {"u": INTEGERS, "s": TEXTS, "b": BYTES, "*": ([], [2], [7, 1 << 40]) if numbers else LISTS}
    packed = msgpack.packb([rng.choice(draw[letter]) for letter in SCHEMA[kind]])
    data = bytes(rng.choice((0, 1, 16, 64))) if kind in WITH_DATA else b""
    return HEAD.pack(MAGIC, kind, 0, len(packed), len(data)) + packed + data


def broken(frame: bytes, rng: random.Random) -> bytes:
    """The frame with some bytes replaced, left out, or added."""
    raw = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    at = rng.randrange(len(raw))
    return bytes(rng.choice((raw, raw[:at], raw[:at] + rng.randbytes(3) + raw[at:])))


def test_malformed_frames_behind_the_proof_leave_nothing():
    """Frames with any values, which are answered, and at the end of each connection one of broken bytes."""
    rng = random.Random(35)
    device = CpuDevice()
    device.name = "cpu"
    server = Server([device], token=TOKEN, limits=Limits(memory=MEMORY, data=1 << 16, message=1 << 16))
    of_control = [kind for kind, *_ in honest(True)]
    of_stream = [kind for kind, *_ in honest(False) if kind not in (Kind.OPEN, Kind.PULL)]
    answers: Counter[Kind] = Counter()
    sent = 0
    while sent < FRAMES:
        client = Client(server)
        client.control.say(Kind.ALLOC, 1, "cpu", 1, 1000, "any")
        client.control.expect(Kind.DONE)
        client.stream.say(Kind.OPEN, 1, 1, "cpu", {})
        client.stream.expect(Kind.DONE)
        for wire, kinds in ((client.stream, of_stream), (client.control, of_control)):
            frames = [of_any_values(rng.choice(kinds), rng) for _ in range(200)]
            frames.append(broken(rng.choice(frames), rng))
            sent += len(frames)
            with suppress(OSError):  # it was refused
                wire.send([b"".join(frames)])
                wire.sock.shutdown(socket.SHUT_WR)
            answers.update(drain(wire))
            assert server.metrics.read()["buffer_bytes"] <= MEMORY
        client.close()
        until_nobody_is_left(server)
    assert {Kind.DONE, Kind.FAILED, Kind.REFUSED, Kind.DATA} <= set(answers)
    assert answers[Kind.FAILED] > FRAMES // 4
    check_sound(server)


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing waits for Python to look for cycles, which it does when it likes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept(device: ow.Device) -> Counter[str]:
    """What keeps the memory of clients, as far as their server on ``device`` has it."""
    objects = gc.get_objects()
    found = [o for o in objects if type(o) in (Session, StreamChannel, BoundLaunch)]
    found += [o for o in objects if type(o) is Plan and o.stream.device is device]
    return Counter([type(o).__name__ for o in found])


def run_until_it_ends(program: Any, values: np.ndarray[Any, Any]) -> None:
    with suppress(OpweaveError):
        while True:
            program.run(x=values)


@pytest.mark.parametrize(("name", "kills"), [("cpu", 200), ("opencl", 10), ("torch", 10)])
def test_clients_that_are_killed_in_the_middle_of_a_run_leave_no_memory(name, kills):
    """The system ends the connections of a process that is killed, in any order, whatever is under way."""
    rng, device = random.Random(3), make(name)
    # From a mebibyte on, reservations count the memory of a buffer.
    y = ow.tanh(ow.linear(ow.input("x", (64, 512)), ow.constant(np.full((512, 512), 1 / 512, np.float32))))
    values = np.ones((64, 512), np.float32)
    server = Server([device], token=TOKEN)
    dial, sockets = pair_dial(server), []

    def dial_and_know(preamble: bytes) -> socket.socket:
        sockets.append(dial(preamble))
        return sockets[-1]

    with without_collector():
        known, reserved = kept(device), RESERVATIONS.reserved
        for _ in range(kills):
            connection = Connection("killed", dial_and_know, TOKEN, 10.0)
            with suppress(OpweaveError), ow.Scheduler(connection.devices[0]) as scheduler:
                program = scheduler.build(y)
                program.run(x=values)
                running = Thread(target=run_until_it_ends, args=(program, values))
                running.start()
                time.sleep(rng.uniform(0, 0.004))
                rng.shuffle(sockets)
                for sock in sockets:
                    with suppress(OSError):  # the client has closed it
                        sock.shutdown(socket.SHUT_RDWR)
                running.join()
            sockets.clear()
            connection.close()
        until_nobody_is_left(server)
        server.stop()  # waits for the threads of the last connections
        assert kept(device) == known
        assert RESERVATIONS.reserved == reserved
        assert server.metrics.read()["buffer_bytes"] == 0


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
    device.name = "cpu"
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
