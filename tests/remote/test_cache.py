"""Weights by the hash of their contents: sent once, kept on the server's disk, checked when written and when loaded."""

from __future__ import annotations

import resource
import stat

import numpy as np
import pytest

from opweave.contract import Usage
from opweave.errors import FormatError, Unavailable
from opweave_cpu.device import CpuDevice
from opweave_remote.server.cache import WeightCache
from opweave_remote.wire import Kind
from tests.support.remote import TOKEN, beside

VALUES = np.random.default_rng(0).integers(0, 256, 5_000_000, np.uint8)


def upload(folder, values=VALUES, limit=1 << 30):
    """Upload weights to a new server with a cache there; the bytes, and the bytes that went over the bulk links."""
    device = CpuDevice()
    device.name = "cpu"
    with (
        beside([device], cache=WeightCache(folder, TOKEN, limit)) as (_, connection),
        connection.devices[0].alloc(values.size, Usage.WEIGHTS) as buffer,
    ):
        buffer.upload(0, values)
        sent = sum(link.wire.sent for link in connection.bulk())
        return buffer.read(), sent


def test_weights_come_over_the_wire_once(tmp_path):
    for first in (True, False):
        got, sent = upload(tmp_path)
        np.testing.assert_array_equal(got, VALUES)
        assert (sent > VALUES.size) is first


def test_the_folder_is_its_owner_s_and_apart_for_each_token(tmp_path):
    upload(tmp_path)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = WeightCache(tmp_path, b"another token of 16", 1 << 30)
    assert other.folder != folder


def test_a_damaged_file_is_not_used(tmp_path):
    upload(tmp_path)
    (file,) = next(tmp_path.iterdir()).iterdir()
    raw = bytearray(file.read_bytes())
    raw[77] ^= 1
    file.write_bytes(raw)
    got, sent = upload(tmp_path)
    np.testing.assert_array_equal(got, VALUES)
    assert sent > VALUES.size


def test_a_full_disk_costs_the_cache_only_and_is_said(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # no file of this process may be longer
    try:
        got, _ = upload(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    np.testing.assert_array_equal(got, VALUES)
    (folder,) = tmp_path.iterdir()
    assert list(folder.iterdir()) == []
    assert f"weights are not kept in {folder}: " in capsys.readouterr().err


def test_a_client_that_is_wrong_about_the_size_removes_nothing(tmp_path):
    upload(tmp_path)
    (file,) = next(tmp_path.iterdir()).iterdir()
    device = CpuDevice()
    device.name = "cpu"
    with (
        beside([device], cache=WeightCache(tmp_path, TOKEN, 1 << 30)) as (_, connection),
        connection.devices[0].alloc(100, Usage.WEIGHTS) as buffer,
    ):
        assert connection.control.call(Kind.HAVE, buffer.handle.number, 0, 100, bytes.fromhex(file.name)) is False
    assert file.exists()


def test_a_folder_that_is_a_link_and_a_file_that_is_not_there_are_refused(tmp_path):
    folder = WeightCache(tmp_path / "right", TOKEN, 1 << 30).folder
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / folder.name).symlink_to(tmp_path)
    with pytest.raises(Unavailable, match="link"):
        WeightCache(tmp_path / "wrong", TOKEN, 1 << 30)
    with pytest.raises(Unavailable, match="nowhere"):
        WeightCache(tmp_path / "right", TOKEN, 1 << 30, ["nowhere.gguf"])


def test_the_least_recently_used_go_when_there_is_no_room(tmp_path):
    for n in range(3):
        upload(tmp_path, VALUES + np.uint8(n), limit=11_000_000)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 2


def test_weights_that_are_not_what_was_announced_are_refused(tmp_path):
    device = CpuDevice()
    device.name = "cpu"
    with (
        beside([device], cache=WeightCache(tmp_path, TOKEN, 1 << 30)) as (_, connection),
        connection.devices[0].alloc(100, Usage.WEIGHTS) as buffer,
    ):
        number = buffer.handle.number
        assert connection.control.call(Kind.HAVE, number, 0, 100, bytes(32)) is False
        with pytest.raises(FormatError, match="another hash"):
            connection.control.call(Kind.WRITE, number, 0, data=memoryview(bytes(100)))
    assert list(next(tmp_path.iterdir()).iterdir()) == []
