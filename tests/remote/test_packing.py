"""Large uploads are compressed where a connection is slow enough for that to pay, and never else."""

from __future__ import annotations

import time
import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import opweave as ow
import opweave_remote
from opweave.contract import Usage
from opweave.errors import BoundsError, ExecutionError, FormatError, LifetimeError
from opweave_cpu.device import CpuDevice
from opweave_remote import packing as packing_module
from opweave_remote.codecs import CODECS, WIDTHS, pack, unpack
from opweave_remote.connection import Connection
from opweave_remote.packing import Packing
from opweave_remote.server.cache import WeightCache
from opweave_remote.server.limits import Limits
from opweave_remote.stream import RemoteStream
from opweave_remote.wire import Kind, encode
from tests.support.async_device import AsyncDevice
from tests.support.proxy import Proxy
from tests.support.remote import TOKEN, ServerProcess, beside

RNG = np.random.default_rng(3)
NUMBERS = RNG.integers(0, 5000, 1_000_001, np.int32)  # ids, of which two bytes of four are empty
NOISE = RNG.integers(0, 256, 4 << 20, np.uint8)


@pytest.fixture
def slow(server: ServerProcess, token):
    """A connection that carries 20 MB/s."""
    with Proxy(server.address, rate=20e6) as proxy:
        connection = opweave_remote.connect(proxy.address, token_file=token)
        yield connection
        connection.close()


def sent(connection: Connection) -> int:
    return sum(link.wire.sent for link in (connection.control, *connection.bulk()))


def seconds_of_uploads(connection: Connection, values: np.ndarray) -> float:
    with connection.devices[0].alloc(values.nbytes) as buffer:
        start = time.perf_counter()
        buffer.upload(0, values)
        took = time.perf_counter() - start
        np.testing.assert_array_equal(buffer.read().view(values.dtype), values)
    return took


def test_on_a_slow_connection_uploads_are_compressed_and_faster(slow, monkeypatch):
    assert 10e6 < slow.packing.rate() < 25e6
    best, before = seconds_of_uploads(slow, NUMBERS), sent(slow)
    best = min(best, seconds_of_uploads(slow, NUMBERS))
    assert sent(slow) - before < 0.6 * NUMBERS.nbytes
    assert 0 < slow.packing.packed < 0.6 * slow.packing.raw
    monkeypatch.setattr(slow.packing, "chosen", lambda data: None)
    assert best < 0.75 * seconds_of_uploads(slow, NUMBERS)


def test_a_rate_is_that_of_the_least_disturbed_of_the_longest_probes(monkeypatch):
    trip, rate = 1e-3, 1e9
    late = {0: [0.0], 1 << 16: [-6e-5], 1 << 18: [0.0], 1 << 20: [9e-3, 2e-3, 0.0]}  # seconds by size, in turn

    def probe(links, size):
        waits = late[size]
        return trip + size * len(links) / rate + (waits.pop(0) if len(waits) > 1 else waits[0])

    monkeypatch.setattr(packing_module, "_probe", probe)
    assert Packing(lambda: [None, None], ["zstd"]).rate() == pytest.approx(rate)  # type: ignore[list-item]


def test_what_a_sample_shows_to_be_noise_is_sent_as_it_is(slow):
    seconds_of_uploads(slow, NOISE)
    assert slow.packing.raw == 0


def test_parts_that_do_not_get_smaller_are_sent_as_they_are(slow):
    mixed = np.zeros(10 << 20, np.uint8)
    mixed[4 << 20 : 8 << 20] = NOISE
    seconds_of_uploads(slow, mixed)
    assert slow.packing.raw == mixed.nbytes - (4 << 20)


def test_inputs_of_runs_are_compressed_too(slow):
    x = ow.input("packed_input", NUMBERS.shape, "i32")
    with ow.Scheduler(slow.devices[0]) as scheduler:
        program = scheduler.build(ow.max(x))
        for _ in range(2):
            assert program.run({x: NUMBERS}) == NUMBERS.max()
    assert slow.packing.raw == 2 * NUMBERS.nbytes


def test_over_loopback_nothing_is_compressed(server, token):
    connection = opweave_remote.connect(server.address, token_file=token)
    weights = RNG.standard_normal(1 << 20).astype(np.float32)
    for _ in range(5):
        seconds_of_uploads(connection, weights)
    assert connection.packing.raw == 0


def test_the_server_counts_it_and_the_doctor_tells_it(slow):
    from opweave_remote.doctor import diagnose

    seconds_of_uploads(slow, NUMBERS)
    (told,) = diagnose()
    assert "MB/s" in told.message
    assert f"compressed by {slow.packing.codec} to " in told.message


def always(connection: Connection, monkeypatch: pytest.MonkeyPatch, codec: str, rate: float = 1e4) -> None:
    """Have the connection compress by this codec, as if it were slow."""
    packing = Packing(connection.bulk, [codec])
    monkeypatch.setattr(packing, "rate", lambda: rate)
    monkeypatch.setattr(connection, "packing", packing)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("device", [CpuDevice, AsyncDevice])
def test_all_devices_receive_what_was_sent_and_weights_are_kept(tmp_path, monkeypatch, codec, device):
    made = device()
    made.name = "cpu"
    with beside([made], cache=WeightCache(tmp_path, TOKEN, 1 << 30)) as (server, connection):
        always(connection, monkeypatch, codec)
        for found in (0, 1):
            with connection.devices[0].alloc(NUMBERS.nbytes + 3, Usage.WEIGHTS) as buffer:
                buffer.upload(3, NUMBERS)
                np.testing.assert_array_equal(buffer.read(3).view(np.int32), NUMBERS)
            assert server.metrics.read()["cache_hits_total"] == found
        counted = server.metrics.read()
        assert counted["unpacked_bytes_total"] == connection.packing.raw == NUMBERS.nbytes
        assert counted["packed_bytes_total"] == connection.packing.packed < NUMBERS.nbytes
        stream = connection.devices[0].open()
        with connection.devices[0].alloc(NUMBERS.nbytes) as buffer:
            stream.upload(buffer, 0, NUMBERS)
            stream.synchronize()
            np.testing.assert_array_equal(buffer.read().view(np.int32), NUMBERS)
        stream.close()
        assert connection.packing.raw == 2 * NUMBERS.nbytes


def test_a_codec_that_one_side_does_not_know_is_not_used(monkeypatch):
    assert Packing(list, ["brotli", "zlib"]).codec == "zlib"
    assert Packing(list, ["brotli"]).codec == ""
    assert Packing(list, ["brotli"]).chosen(memoryview(bytes(1 << 20))) is None


# --- what does not hold what it says ----------------------------------------------------------------------------------


def big(codec: str, size: int) -> bytes:
    return pack(CODECS[codec], 1, memoryview(bytes(size)))


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("said", [0, 1, 1000, (64 << 20) - 1, (64 << 20) + 1])
def test_a_bomb_makes_no_more_bytes_than_the_message_says(codec, said):
    bomb = memoryview(big(codec, 64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="hold"):
            unpack(codec, 1, bomb, said)
        assert tracemalloc.get_traced_memory()[1] < 4 * said + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_frame_of_zstd_without_its_size_is_refused():
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(FormatError):
        unpack("zstd", 1, memoryview(data), 1000)


@pytest.mark.parametrize("codec", list(CODECS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutated_data_gives_the_stated_number_of_bytes_or_a_format_error(codec, data):
    raw = data.draw(st.binary(min_size=1, max_size=300)) * data.draw(st.integers(1, 5))
    width = data.draw(st.sampled_from(WIDTHS))
    packed = bytearray(pack(CODECS[codec], width, memoryview(raw)))
    assert bytes(unpack(codec, width, memoryview(packed), len(raw))) == raw
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for mutated in (packed, packed[:cut], packed + b"\0"):
        try:
            got = unpack(codec, width, memoryview(mutated), len(raw))
        except FormatError:
            continue
        assert len(got) == len(raw)
    with pytest.raises(FormatError):
        unpack(codec, width, memoryview(pack(CODECS[codec], width, memoryview(raw)) + b"\0"), len(raw))


@pytest.mark.parametrize(
    ("number", "offset", "size", "codec", "width", "data", "error"),
    [
        (1, 0, 1000, "zlib", 1, big("zlib", 1000), None),
        (1, 0, 1000, "brotli", 1, big("zlib", 1000), FormatError),
        (1, 0, 1000, "zlib", 3, big("zlib", 1000), FormatError),
        (1, 0, 999, "zlib", 1, big("zlib", 1000), FormatError),
        (1, 0, 1001, "zlib", 1, big("zlib", 1000), FormatError),
        (1, 0, 1000, "zlib", 1, bytes(50), FormatError),
        (1, 0, 1 << 20, "zlib", 1, big("zlib", 1 << 20), FormatError),  # above the server's limit
        (1, 500, 1000, "zlib", 1, big("zlib", 1000), BoundsError),
        (9, 0, 1000, "zlib", 1, big("zlib", 1000), LifetimeError),
    ],
    ids=["right", "codec", "width", "more", "fewer", "damaged", "large", "behind", "freed"],
)
@pytest.mark.parametrize("device", [CpuDevice, AsyncDevice])
def test_each_refusal_has_its_error_and_the_connection_goes_on(number, offset, size, codec, width, data, error, device):
    made = device()
    made.name = "cpu"
    with beside([made], limits=Limits(data=1 << 16)) as (_, connection), connection.devices[0].alloc(1000) as buffer:
        stream = connection.devices[0].open()
        assert isinstance(stream, RemoteStream)
        number = buffer.handle.number if number == 1 else 999
        args = number, offset, size, codec, width
        asked = connection.control.ask(Kind.WRITE_PACKED, *args, data=memoryview(data))
        stream._link.post(encode(Kind.UPLOAD_PACKED, *args, size=len(data)), memoryview(data))
        if error is None:
            asked.result()
            stream.synchronize()
        else:
            with pytest.raises(error):
                asked.result()
            with pytest.raises(ExecutionError) as raised:
                stream.synchronize()
            assert isinstance(raised.value.__cause__, error)
            stream.recover()
        buffer.upload(0, np.arange(1000, dtype=np.uint8))
        stream.upload(buffer, 0, np.full(4, 7, np.uint8))
        stream.synchronize()
        np.testing.assert_array_equal(buffer.read()[:8], [7, 7, 7, 7, 4, 5, 6, 7])
        stream.close()
