"""A small run is one message to the server and one back (`Kind.LAUNCH`), in every dtype, on devices of both sorts."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import opweave as ow
from opweave.errors import DeviceLostError, ExecutionError, LifetimeError
from opweave.tracing import TRACE, TraceEvent
from opweave_cpu.device import CpuDevice, IsolatedCpuDevice
from opweave_remote.wire import Kind
from tests.support.async_device import AsyncDevice
from tests.support.remote import beside


@contextmanager
def served(make, name="cpu"):
    device = make()
    device.name = name
    with beside([device]) as (server, connection):
        yield server, connection


@contextmanager
def messages(connection):
    """The kinds of the messages that the connection's streams send, each with how many frames left at once."""
    sent: list[bytes] = []
    links = [link for link in connection.fate.links if link is not connection.control]
    kept = [(link.wire, link.wire.push) for link in links]
    for wire, push in kept:
        wire.push = partial(_noted, sent, push)
    try:
        yield sent
    finally:
        for wire, push in kept:
            wire.push = push


def _noted(sent, push, data, done):
    sent.append(bytes(data))
    push(data, done)


def kinds(sent):
    return [Kind(data[2]) for data in sent]


@pytest.mark.parametrize("make", [CpuDevice, partial(IsolatedCpuDevice, 0)], ids=["shared", "separate"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "i8", "i16", "i32", "i64", "u8", "bool"])
def test_a_small_run_is_one_message(make, dtype):
    with served(make) as (server, connection):
        x, y = ow.input("launch x", (3, 5), dtype), ow.input("launch y", (5,), dtype)
        outputs = {
            "where": ow.where(ow.equal(x, y), x, y),
            "other": ow.where(ow.equal(x, y), y, x),
            "equal": ow.equal(x, y),
        }
        rng = np.random.default_rng(0)
        with ow.Scheduler(connection.devices[0]) as scheduler:
            program = scheduler.build(outputs)
            a, b = (rng.integers(0, 2, shape).astype(x.dtype.numpy) for shape in ((3, 5), (5,)))
            program.run({x: a, y: b})
            before = server.metrics.read()["runs_total"]
            for _ in range(4):
                a, b = (rng.integers(0, 3, shape).astype(x.dtype.numpy) for shape in ((3, 5), (5,)))
                with messages(connection) as sent:
                    got = program.run({x: a, y: b})
                assert kinds(sent) == [Kind.LAUNCH]
                np.testing.assert_array_equal(got["where"], np.where(a == b, a, b))
                np.testing.assert_array_equal(got["other"], np.where(a == b, b, a))
                np.testing.assert_array_equal(got["equal"], a == b)
                kept = {name: value.copy() for name, value in got.items()}
                program.run({x: np.zeros_like(a), y: np.zeros_like(b)})
                for name, value in kept.items():  # results are the caller's own
                    np.testing.assert_array_equal(got[name], value)
                np.testing.assert_array_equal(program.read(outputs["where"]), np.zeros_like(a))
            assert server.metrics.read()["runs_total"] == before + 8


def test_a_device_that_works_asynchronously_is_waited_for():
    with served(AsyncDevice, "async") as (_, connection):
        x = ow.input("launch asynchronous", (6,))
        with ow.Scheduler(connection.devices[0]) as scheduler:
            program = scheduler.build((x + x) * x)
            for n in range(1, 5):
                values = np.arange(6, dtype=np.float32) * n
                with messages(connection) as sent:
                    np.testing.assert_array_equal(program.run({x: values}), 2 * values * values)
                assert kinds(sent) == [Kind.LAUNCH]


def test_larger_values_lie_where_they_are_and_overlapping_runs_are_queued():
    with served(CpuDevice) as (_, connection):
        large, small = ow.input("launch large", (1 << 17,)), ow.input("launch small", (4,))
        values = np.arange(1 << 17, dtype=np.float32)
        with ow.Scheduler(connection.devices[0]) as scheduler:
            program = scheduler.build(large + 1)
            with messages(connection) as sent:
                np.testing.assert_array_equal(program.run({large: values}), values + 1)
            assert Kind.LAUNCH not in kinds(sent)
        with ow.Scheduler(connection.devices[0], parallel=True) as scheduler:
            program = scheduler.build(small + 1)
            futures = [program.submit({small: np.full(4, n, np.float32)}) for n in range(8)]
            assert [f.result()[0] for f in futures] == [n + 1 for n in range(8)]


def test_states_and_programs_that_take_turns_keep_their_order():
    with served(CpuDevice) as (_, connection):
        device = connection.devices[0]
        total = ow.state("launch total", (4,), device=device)
        x, wide = ow.input("launch add", (4,)), ow.input("launch wide", (1 << 17,))
        with ow.Scheduler([device, "host"]) as scheduler:
            add = scheduler.build(ow.assign(total, total + x))
            other = scheduler.build(wide[:4] + total)
            for n in range(1, 6):
                np.testing.assert_array_equal(add.run({x: np.ones(4, np.float32)}), np.full(4, n, np.float32))
                got = other.run({wide: np.ones(1 << 17, np.float32)})
                np.testing.assert_array_equal(got, np.full(4, n + 1, np.float32))
        np.testing.assert_array_equal(ow.read(total), np.full(4, 5, np.float32))


@pytest.mark.parametrize("make", [CpuDevice, partial(IsolatedCpuDevice, 0)], ids=["shared", "separate"])
def test_a_failing_launch_names_its_node_and_the_next_one_works(make):
    with served(make) as (_, connection):
        x, i = ow.input("launch table", (3, 1)), ow.input("launch rows", (2,), "i32")
        picked = ow.embedding(x, i)
        values = np.arange(3, dtype=np.float32)[:, None]
        with ow.Scheduler(connection.devices[0]) as scheduler:
            program = scheduler.build(picked * 2)
            for _ in range(2):
                if connection.devices[0].raises_index_errors:
                    with pytest.raises(ExecutionError) as told:
                        program.run({x: values, i: np.array([0, 9], np.int32)})
                    assert "test_launches.py" in told.value.node
                    assert told.value.device == connection.devices[0].name
                got = program.run({x: values, i: np.array([2, 1], np.int32)})
                np.testing.assert_array_equal(got, [[4], [2]])


def test_programs_that_are_closed_leave_no_launch_and_lost_servers_are_named():
    with served(CpuDevice) as (server, connection):
        x = ow.input("launch closed", (4,))
        (session,) = server._sessions.values()
        with ow.Scheduler(connection.devices[0]) as scheduler:
            for n in range(5):
                program = scheduler.build(x + float(n))
                program.run({x: np.zeros(4, np.float32)})
                program.close()
                del program
                gc.collect()
            program = scheduler.build(x - 1)
            program.run({x: np.zeros(4, np.float32)})
            (channel,) = [stream for stream in session.streams.values() if stream._launches]
            assert len(channel._launches) == 1
            server.stop()
            with pytest.raises(ExecutionError) as told:
                program.run({x: np.zeros(4, np.float32)})
            assert isinstance(told.value.__cause__, DeviceLostError)


def test_a_launch_over_memory_that_was_freed_is_refused_and_its_data_are_skipped():
    with served(CpuDevice) as (_, connection):
        device = connection.devices[0]
        with device.open() as stream:
            link, buffer = stream._link, device.alloc(64)
            number = buffer.handle.number
            link.call(Kind.BIND, 900, [[number, 0, 16]], [], [[number, 8, 8]])
            out = memoryview(bytearray(8))
            data = memoryview(bytes(range(16)))
            assert link.call(Kind.LAUNCH, 900, data=data, into=out) is None
            assert bytes(out) == bytes(range(8, 16))
            for rows in ([[number, 60, 8]], [[number + 50, 0, 8]], [[number, -1, 8]], [[number]], 3):
                for writes, reads in ((rows, []), ([], rows)):
                    with pytest.raises(Exception, match=r"range|bytes|buffer"):
                        link.call(Kind.BIND, 901, writes, [], reads)
            with pytest.raises(LifetimeError, match="no plan 77"):
                link.call(Kind.BIND, 901, [], [77], [])
            with pytest.raises(LifetimeError, match="no launch"):
                link.call(Kind.LAUNCH, 900, data=data[:5], into=out)
            stream.settle()
            stream.recover()
            buffer.free()
            connection.send_dropped()
            device.mem_info()
            with pytest.raises(LifetimeError, match="freed"):
                link.call(Kind.LAUNCH, 900, data=data, into=out)
            stream.settle()
            stream.recover()


def test_a_traced_launch_is_told_with_its_time_and_gives_its_result():
    with served(CpuDevice) as (_, connection):
        x = ow.input("launch traced", (4,))
        with ow.Scheduler(connection.devices[0]) as scheduler:
            program = scheduler.build(ow.exp(x) + 1)
            values = np.arange(4, dtype=np.float32)
            want = program.run({x: values})
            events: list[TraceEvent] = []
            with TRACE.listen(events.append):
                np.testing.assert_array_equal(program.run({x: values}), want)
            assert [e.data["device"] for e in events if e.kind == "plan"] == [connection.devices[0].name]
