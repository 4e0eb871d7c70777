"""Remote devices are used like others: memory, programs, names, questions, limits, tokens."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from opweave.contract import Usage, WorkerStream
from opweave.errors import (
    AllocationError,
    DeviceLostError,
    ExecutionError,
    FormatError,
    LifetimeError,
    Unavailable,
    UnknownNameError,
    UnsupportedOpError,
)
from opweave_cpu.device import CpuDevice, IsolatedCpuDevice
from opweave_remote.device import RemoteDevice
from opweave_remote.security import check_token
from opweave_remote.server.limits import Limits
from opweave_remote.server.serving import Server
from opweave_remote.stream import RemoteStream
from opweave_remote.wire import Kind
from opweave_remote.wires import Address
from tests.support.async_device import AsyncDevice
from tests.support.remote import TOKEN, beside, pair_dial

F32 = np.float32


def served(device, name="cpu"):
    device.name = name
    return device


@pytest.fixture
def pair():
    with beside([served(CpuDevice())]) as made:
        yield made


def test_a_graph_over_a_local_and_a_remote_device_gives_what_a_local_run_gives(pair):
    _, connection = pair
    rng = np.random.default_rng(0)
    w1, w2 = (rng.standard_normal((64, 64)).astype(F32) for _ in range(2))
    x = ow.input("x", (8, 64))
    hidden = ow.gelu(ow.linear(x, ow.constant(w1)))
    y = ow.softmax(ow.linear(hidden, ow.constant(w2)))
    values = rng.standard_normal((8, 64)).astype(F32)
    with ow.Scheduler("cpu") as local:
        want = local.build(y).run(x=values)
    for parallel in (False, True):
        with ow.Scheduler([connection.devices[0], "cpu"], parallel=parallel) as scheduler:
            program = scheduler.build(y, pins={hidden: "cpu", y: connection.devices[0]})
            assert {s.target.name for s in program.splits} == {"remote:pair/cpu", "cpu"}
            for _ in range(3):
                np.testing.assert_array_equal(program.run(x=values), want)
            assert all(np.array_equal(f.result(), want) for f in [program.submit(x=values) for _ in range(6)])


def test_states_keep_their_values_on_the_server(pair):
    _, connection = pair
    total = ow.state("total", (4,), device=connection.devices[0])
    with ow.Scheduler([connection.devices[0]]) as scheduler:
        program = scheduler.build(ow.assign(total, total + ow.input("x", (4,))))
        for n in range(1, 5):
            np.testing.assert_array_equal(program.run(x=np.ones(4, F32)), np.full(4, n, F32))
    np.testing.assert_array_equal(ow.read(total), np.full(4, 4, F32))


def test_all_nodes_of_a_build_are_asked_about_in_one_message(pair, monkeypatch):
    _, connection = pair
    asked = []
    right = connection.control.ask

    def ask(kind, *args, **more):
        asked.append((kind, args))
        return right(kind, *args, **more)

    monkeypatch.setattr(connection.control, "ask", ask)
    y = ow.input("x", (3, 5))
    for i in range(40):
        y = ow.tanh(y.T + i) * 2
    with ow.Scheduler([connection.devices[0], "host"]) as scheduler:
        scheduler.partition(y)
        questions = [args for kind, args in asked if kind is Kind.ASK]
        assert len(questions) == 1
        asked.clear()
        scheduler.partition(y + 1)
        assert len([1 for kind, _ in asked if kind is Kind.ASK]) <= 1


@pytest.mark.parametrize("parallel", [False, True])
def test_a_run_takes_one_round_trip(pair, monkeypatch, parallel):
    _, connection = pair
    x = ow.input("x", (100,))
    with ow.Scheduler(connection.devices[0], parallel=parallel) as scheduler:
        program = scheduler.build((ow.exp(x) + 1, x * 2))
        (stream,) = scheduler.streams
        if isinstance(stream, WorkerStream):
            stream = stream.inner
        assert isinstance(stream, RemoteStream)
        values = np.ones(100, F32)
        program.run(x=values)
        sent = []
        right = stream._link.wire.push

        def push(data, counts):
            sent.append(bytes(data))
            right(data, counts)

        monkeypatch.setattr(stream._link.wire, "push", push)
        monkeypatch.setattr(connection.control.wire, "push", lambda *_: pytest.fail("a message beside"))
        np.testing.assert_allclose(program.run(x=values)[0], np.exp(values) + 1, rtol=1e-6)
        assert len(sent) == 1


def test_functions_are_refused_with_a_reason(pair):
    _, connection = pair
    y = ow.custom(lambda a: a + 1, ow.input("x", (3,)), like=ow.input("x", (3,)))
    with ow.Scheduler(connection.devices[0]) as scheduler, pytest.raises(UnsupportedOpError, match="cannot be sent"):
        scheduler.build(y)
    with ow.Scheduler([connection.devices[0], "host"]) as scheduler:
        np.testing.assert_array_equal(scheduler.build(y).run(x=np.zeros(3, F32)), np.ones(3, F32))


def test_asynchronous_devices_of_a_server_work_as_others():
    with beside([served(AsyncDevice(), "async")]) as (_, connection):
        x = ow.input("x", (1000,))
        values = np.arange(1000, dtype=F32)
        with ow.Scheduler([connection.devices[0], "host"]) as scheduler:
            program = scheduler.build((x + 1, x * 2))
            for _ in range(20):
                got = program.run(x=values)
                np.testing.assert_array_equal(got[0], values + 1)
                np.testing.assert_array_equal(got[1], values * 2)


def test_a_failing_run_names_the_node_and_its_line(pair):
    _, connection = pair
    table, ids = ow.input("table", (4, 2)), ow.input("ids", (3,), "i64")
    picked = ow.embedding(table, ids)
    with ow.Scheduler(connection.devices[0]) as scheduler:
        program = scheduler.build(picked + 1)
        feeds = {"table": np.zeros((4, 2), F32), "ids": np.array([0, 1, 9])}
        with pytest.raises(ExecutionError, match="embedding") as told:
            program.run(feeds)
        assert "test_devices.py" in told.value.node
        assert told.value.device == "remote:pair/cpu"
        feeds["ids"][2] = 2
        assert program.run(feeds).shape == (3, 2)


def test_two_devices_of_a_server_copy_there(monkeypatch):
    with beside([served(IsolatedCpuDevice(0), "a"), served(IsolatedCpuDevice(1), "b")]) as (_, connection):
        one, two = connection.devices
        assert one.space is not two.space
        read = []
        right = RemoteDevice._download

        def download(device, mem, offset, out):
            read.append(len(out))
            right(device, mem, offset, out)

        monkeypatch.setattr(RemoteDevice, "_download", download)
        x = ow.input("x", (100_000,))
        y = x + 1
        with ow.Scheduler([one, two]) as scheduler:
            program = scheduler.build(y * 3, pins={y: one, y * 3: two})
            values = np.arange(100_000, dtype=F32)
            for _ in range(3):
                np.testing.assert_array_equal(program.run(x=values), (values + 1) * 3)
        assert sum(read) <= 3 * values.nbytes  # the results, and nothing on the way


def test_memory_of_a_client_is_limited_and_given_back():
    with beside([served(CpuDevice())], limits=Limits(memory=1000)) as (server, connection):
        device = connection.devices[0]
        assert device.mem_info() == (1000, 1000)
        first = device.alloc(600)
        with pytest.raises(AllocationError) as told:
            device.alloc(500)
        assert (told.value.device, told.value.requested, told.value.free) == ("remote:pair/cpu", 500, 400)
        first.free()
        assert device.mem_info() == (1000, 1000)
        device.alloc(500, Usage.WEIGHTS).free()
    assert server.metrics.read()["buffer_bytes"] == 0


def test_a_new_buffer_shows_nothing_of_others(pair):
    _, connection = pair
    device = connection.devices[0]
    for size in (100, 100_000):
        with device.alloc(size) as buffer:
            buffer.fill(7)
        with device.alloc(size) as buffer:
            assert not buffer.read().any()


def test_connections_of_a_client_are_limited():
    with beside([served(CpuDevice())], limits=Limits(connections=3)) as (_, connection):
        device = connection.devices[0]
        streams = [device.open(), device.open()]
        with pytest.raises(Unavailable, match="3 connections"):
            device.open()
        streams[0].close()
        device.open().close()
        streams[1].close()


def test_a_client_reaches_only_its_own_buffers(pair):
    _, connection = pair
    device = connection.devices[0]
    with device.alloc(10) as buffer:
        other = opweave_remote.Connection("other", connection._dial, b"a token for the tests", 10.0)
        with pytest.raises(LifetimeError, match="no buffer"):
            other.control.call(Kind.FILL, buffer.handle.number, 0, 10, 1)
        other.close()
        assert not buffer.read().any()


def test_when_a_client_goes_everything_of_it_is_freed():
    device = served(CpuDevice())
    with beside([device]) as (server, connection):
        kept = [connection.devices[0].alloc(1000) for _ in range(5)]
        stream = connection.devices[0].open()
        assert len(device.live_buffers) == 5
        connection.close()
        server.stop()
        assert not list(device.live_streams)
        assert all(buffer.freed for buffer in device.live_buffers)
        assert server.metrics.read()["buffers"] == 0
        with pytest.raises(DeviceLostError):
            kept[0].read()
        stream.settle()


def test_a_wrong_token_is_refused_and_a_server_without_the_token_too(pair):
    _, connection = pair
    with pytest.raises(Unavailable, match="token is wrong"):
        opweave_remote.Connection("wrong", connection._dial, b"another token of 16", 10.0)
    with pytest.raises(Unavailable, match="asks for a token"):
        opweave_remote.Connection("wrong", connection._dial, None, 10.0)
    bare = pair_dial(Server([served(CpuDevice())]))
    with pytest.raises(Unavailable, match="does not ask for the token"):
        opweave_remote.Connection("wrong", bare, b"another token of 16", 10.0)


def test_another_version_is_refused(pair, monkeypatch):
    _, connection = pair
    monkeypatch.setattr("opweave_remote.connection.MIN_VERSION", 2)
    monkeypatch.setattr("opweave_remote.connection.MAX_VERSION", 2)
    with pytest.raises(Unavailable, match=r"speaks versions 1 to 1 .* 2 to 2"):
        opweave_remote.Connection("old", connection._dial, b"a token for the tests", 10.0)


@pytest.mark.parametrize(
    ("text", "want"),
    [("gpu:7000", ("gpu", 7000)), ("[::1]:7000", ("::1", 7000)), (" 10.0.0.5:1 ", ("10.0.0.5", 1))],
)
def test_addresses(text, want):
    assert Address.parse(text) == want
    assert Address.parse(str(Address.parse(text))) == want


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "gpu:", ":7000", "::1:7000", "gpu:70000", "gpu:-1", "gpu:x", "[::1]", "[gpu]:1", "[]:1", "a..b:1",
     "a b:1", "a\0b:1", "me@gpu:1", "x" * 64 + ":1"],
)  # fmt: skip
def test_other_addresses_are_refused(text):
    with pytest.raises(FormatError):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("127.0.0.1.example.org", False)],
)
def test_only_addresses_that_others_cannot_reach_are_loopback(host, loopback):
    """A name that begins like one of these may be anybody's, and would be connected to without TLS."""
    assert Address(host, 7000).is_loopback is loopback


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_is_no_time_is_refused(deadline):
    with pytest.raises(Unavailable, match="deadline"):
        opweave_remote.connect("127.0.0.1:9", token=TOKEN, deadline=deadline)


def test_a_token_is_text_or_bytes_without_the_end_of_the_line():
    assert check_token("0123456789abcdef\n") == check_token(b"0123456789abcdef")
    for wrong in (32, None, bytearray(32)):
        with pytest.raises(Unavailable, match="not"):
            check_token(wrong)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="belong together"):
        opweave_remote.connect("127.0.0.1:9", token=TOKEN, tls=True, key="key.pem")


def test_a_device_that_is_not_there_is_refused(pair):
    _, connection = pair
    with pytest.raises(UnknownNameError, match="nope"):
        connection.control.call(Kind.INFO, "nope")
