"""Bytes go from server to server, without a detour over the client."""

from __future__ import annotations

import numpy as np
import pytest

import opweave_remote
from opweave.errors import LifetimeError
from opweave_cpu.device import CpuDevice
from opweave_remote.device import RemoteDevice
from opweave_remote.stream import RemoteStream
from opweave_remote.wire import Kind, encode
from tests.support.remote import beside, serve_process


def test_a_copy_between_two_servers_takes_no_byte_over_the_client(server, token, monkeypatch):
    with serve_process("--token-file", str(token)) as second:
        one = opweave_remote.connect(server.address, token_file=token).devices[0]
        two = opweave_remote.connect(second.address, token_file=token).devices[0]
        values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
        with one.alloc(1 << 20) as source, two.alloc(1 << 21) as target, two.open() as stream:
            source.upload(0, values)
            with monkeypatch.context() as patch:
                patch.setattr(RemoteDevice, "_download", lambda *args: pytest.fail("a detour"))
                assert stream.copy_from(target, 4096, source, 0, 1 << 20)
                stream.synchronize()
            np.testing.assert_array_equal(target.read(4096, 1 << 20), values)


def test_fewer_bytes_are_queued_and_wait_for_no_earlier_work_of_the_target():
    made = [CpuDevice(), CpuDevice()]
    for device in made:
        device.name = "cpu"
    values = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    with beside(made[:1]) as (_, first), beside(made[1:]) as (_, second):
        one, two = first.devices[0], second.devices[0]
        with one.alloc(2000) as source, two.alloc(2000) as target, one.open() as writer, two.open() as stream:
            assert isinstance(stream, RemoteStream)
            waited = []
            stream._synchronize = lambda: waited.append(True)  # type: ignore[method-assign]
            writer.upload(source, 500, values)
            assert stream.copy_from(target, 8, source, 500, 1000, source=writer)
            stream.record().synchronize()
            assert not waited
            np.testing.assert_array_equal(target.read(8, 1000), values)
            del stream._synchronize


def test_a_grant_is_good_once(server, token):
    connection = opweave_remote.connect(server.address, token_file=token)
    device = connection.devices[0]
    with device.alloc(1 << 20) as source, device.alloc(1 << 20) as target, device.open() as stream:
        grant = connection.control.call(Kind.GRANT, source.handle.number, 0, 100)
        for again in (False, True):
            assert isinstance(stream, RemoteStream)
            stream._link.post(encode(Kind.PULL, target.handle.number, 0, server.address, grant, 100))
            if again:
                with pytest.raises(Exception, match="no such grant"):
                    stream.synchronize()
                stream.recover()
            else:
                stream.synchronize()


def test_a_grant_of_too_much_is_refused(server, token):
    connection = opweave_remote.connect(server.address, token_file=token)
    with connection.devices[0].alloc(10) as buffer, pytest.raises(IndexError):
        connection.control.call(Kind.GRANT, buffer.handle.number, 0, 11)
    with pytest.raises(LifetimeError):
        connection.control.call(Kind.GRANT, 12345, 0, 1)
