"""Ranges and rows of states and buffers: written and read, at once and on streams, on the shipped backends."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.contract.transfers import STAGED_BYTES
from tests.support.example_backend import ExampleDevice
from tests.support.real_devices import make, real_device

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8, np.uint8, bool]
device = real_device
KEYS = [
    np.s_[3:5], np.s_[2], np.s_[:, 1:3], np.s_[..., 2], np.s_[1:4, :, 2:5], np.s_[::2], np.s_[:, ::3, 1],
    np.s_[4:4], np.s_[...], np.s_[5:, 3, 4], np.s_[::3, ::2, ::2],
]  # fmt: skip
SHAPE = (6, 5, 7)


def numbers(dtype, shape=SHAPE, seed=0):
    return np.random.default_rng(seed).integers(0, 2 if dtype is bool else 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_view_of_a_state_shows_is_written_and_read(device, dtype):
    held = numbers(dtype)
    state = ow.state("cache", SHAPE, held.dtype.name, device=device)
    ow.write(state, held)
    for i, key in enumerate(KEYS):
        values = numbers(dtype, held[key].shape, seed=i + 1)
        ow.write(state[key], values)
        held[key] = values
        assert np.array_equal(ow.read(state), held)
        assert np.array_equal(ow.read(state[key]), values)


@pytest.mark.parametrize("device_", ["unplaced", "example"])
def test_also_of_states_without_memory_and_by_devices_without_hooks_for_rows(device_):
    state = ow.state("cache", SHAPE, fill=2, device=ExampleDevice() if device_ == "example" else None)
    held = np.full(SHAPE, 2, np.float32)
    for i, key in enumerate(KEYS):
        values = numbers(np.float32, held[key].shape, seed=i)
        ow.write(state[key], values)
        held[key] = values
        assert np.array_equal(ow.read(state), held)
        assert np.array_equal(ow.read(state[key]), values)


def test_transposed_views_are_written_in_their_own_order(device):
    state = ow.state("cache", (4, 6), device=device)
    values = numbers(np.float32, (6, 4))
    ow.write(state.T, values)
    assert np.array_equal(ow.read(state), values.T)
    ow.write(state.T[1:3], values[:2])
    assert np.array_equal(ow.read(state)[:, 1:3], values[:2].T)


def test_on_a_stream_transfers_are_in_its_order(device):
    state = ow.state("cache", SHAPE, device=device)
    held, seen = np.zeros(SHAPE, np.float32), []
    with device.open() as stream:
        for i, key in enumerate(KEYS):
            values = numbers(np.float32, held[key].shape, seed=i)
            ow.write(state[key], values, stream=stream)
            held[key] = values
            seen.append((ow.read(state[key], stream=stream), values))
            seen.append((ow.read(state, stream=stream), held.copy()))
        repeated = ow.read(ow.broadcast_to(state[:, :1], SHAPE), stream=stream)
        stream.synchronize()
    for got, want in seen:
        assert np.array_equal(got, want)
    assert np.array_equal(repeated, np.broadcast_to(held[:, :1], SHAPE))


def test_a_stream_with_a_thread_of_its_own_does_it_too(device):
    state = ow.state("cache", SHAPE, device=device)
    values = numbers(np.float32, (6, 2, 7))
    with device.open(worker=True) as stream:
        ow.write(state[:, 1:3], values, stream=stream)
        got = ow.read(state[:, 1:3], stream=stream)
        stream.synchronize()
    assert np.array_equal(got, values)


def test_the_buffer_of_a_state_is_public(device):
    """Rows of 3 columns, by hand: on a stream and at once."""
    state = ow.state("cache", (8, 10), device=device)
    shown = state[2:6, 4:7]
    place = shown.placement
    assert place is not None
    assert place.tensor is shown
    assert place.offset == state.placement.offset + (2 * 10 + 4) * 4
    rows = numbers(np.float32, (4, 3))
    with device.open() as stream:
        stream.upload_2d(place.buffer, place.offset, 40, rows)
        out = np.zeros((4, 9), np.float32)
        stream.download_2d(place.buffer, place.offset, 40, out[:, 2:5])
        stream.synchronize()
    assert np.array_equal(out[:, 2:5], rows)
    assert not out[:, :2].any()
    assert not out[:, 5:].any()
    held = np.zeros((8, 10), np.float32)
    held[2:6, 4:7] = rows
    assert np.array_equal(ow.read(state), held)
    place.buffer.upload_2d(place.offset, 40, rows[::-1].copy())
    assert np.array_equal(ow.read(shown), rows[::-1])
    assert ow.state("other", 3).placement is None
    assert ow.input("x", 3).placement is None


@given(
    data=st.data(), count=st.integers(0, 9), width=st.integers(0, 13), gap=st.integers(0, 8), apart=st.integers(0, 5),
    offset=st.integers(0, 32),
)  # fmt: skip
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_any_size_at_any_distance(device, data, count, width, gap, apart, offset):
    pitch, size = width + gap, 400
    held = np.random.default_rng(count).integers(0, 256, size, np.uint8)
    rows = np.random.default_rng(width).integers(0, 256, (count, width + apart), np.uint8)[:, :width]
    with device.alloc(size) as buffer, device.open() as stream:
        buffer.upload(0, held)
        writer = data.draw(st.sampled_from([buffer.upload_2d, lambda *a: stream.upload_2d(buffer, *a)]))
        writer(offset, pitch, rows)
        for i, row in enumerate(rows):
            held[offset + i * pitch : offset + i * pitch + width] = row
        out = np.zeros_like(rows)
        stream.download_2d(buffer, offset, pitch, out)
        stream.synchronize()
        assert np.array_equal(buffer.read(), held)
        assert np.array_equal(out, rows)
        out[...] = 0
        buffer.download_2d(offset, pitch, out)
        assert np.array_equal(out, rows)


def test_rows_far_from_each_other_are_transferred_one_by_one():
    """Without a hook for rows, and with more bytes between them than are worth reading."""
    device = ExampleDevice()
    pitch = STAGED_BYTES
    rows = numbers(np.uint8, (3, 5))
    with device.alloc(2 * pitch + 5) as buffer:
        buffer.clear(7)
        buffer.upload_2d(0, pitch, rows)
        out = np.zeros((3, 5), np.uint8)
        buffer.download_2d(0, pitch, out)
        assert np.array_equal(out, rows)
        assert (buffer.read(5, pitch - 5) == 7).all()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 0, 100), "bf16"), ((2, 9, 0), "f32"), ((2, 9, 0), "q4_k"), ((0,), "i64")]
)
def test_states_without_elements_are_written_and_read_as_any_other(device, shape, dtype):
    for where in (None, device):
        state = ow.state("empty", shape, dtype, device=where)
        values = np.zeros(shape, np.uint8 if dtype == "q4_k" else state.dtype.numpy)
        ow.write(state, ow.Blocks(values, shape, state.dtype) if dtype == "q4_k" else values)
        assert ow.read(state).shape == shape


def test_what_is_wrong_is_said_before_anything_is_written(device):
    state = ow.state("cache", (4, 6), device=device)
    x = ow.input("x", (2, 6))
    for tensor, values, error, message in (
        (state[1:3], np.zeros((3, 6)), ow.ShapeError, "do not fit"),
        (state[1:3], np.zeros((2, 6), complex), ow.DTypeError, "complex"),
        (ow.broadcast_to(state[:1], (4, 6)), np.zeros((4, 6)), ow.LayoutError, "shows elements repeatedly"),
        (x[:1], np.zeros((1, 6)), ow.SchedulerError, "not a state or a view of one"),
        (ow.index_copy(state, np.array([1, 2]), x)[1:3], np.zeros((2, 6)), ow.SchedulerError, "not a state"),
    ):
        with pytest.raises(error, match=message):
            ow.write(tensor, values)
    assert not ow.read(state).any()
    buffer = state.placement.buffer
    with device.open() as stream:
        for write in (buffer.upload_2d, lambda *a: stream.upload_2d(buffer, *a)):
            for offset, pitch, rows, error in (
                (0, 4, np.zeros((2, 6), np.uint8), ow.LayoutError),
                (0, 24, np.zeros(6, np.uint8), ow.LayoutError),
                (0, 24, np.zeros((4, 12), np.uint8)[:, ::2], ow.LayoutError),
                (60, 24, np.zeros((3, 6), np.uint8), ow.BoundsError),
                (-1, 24, np.zeros((2, 6), np.uint8), ow.BoundsError),
            ):
                with pytest.raises(error):
                    write(offset, pitch, rows)
        with pytest.raises(ow.LayoutError, match="writable"):
            stream.download_2d(buffer, 0, 24, np.frombuffer(bytes(12), np.uint8).reshape(2, 6))
        with pytest.raises(ow.SchedulerError, match="lies nowhere yet"):
            ow.write(ow.state("unplaced", 3), [1, 2, 3], stream=stream)


def test_a_part_does_not_make_a_half_written_state_whole():
    state = ow.state("cache", 4)
    state.leaf.damaged = "a run failed"
    with pytest.raises(ow.ExecutionError, match="does not make it whole"):
        ow.write(state[:2], [1, 2])
    ow.write(state, [1, 2, 3, 4])
    assert np.array_equal(ow.read(state[2:]), [3, 4])


def test_a_program_writes_ranges_of_its_states_between_runs(device):
    state = ow.state("cache", (4, 3), device=device)
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.neg(state))
        program.run()
        program.write(state[1:3], np.ones((2, 3)))
        assert np.array_equal(program.run(), [[0] * 3, [-1] * 3, [-1] * 3, [0] * 3])
        assert np.array_equal(program.read(state[2]), [1, 1, 1])
        with pytest.raises(ow.UnknownNameError):
            program.write(ow.state("other", 3)[:1], [1])


@pytest.mark.parametrize("far", ["cpu", "opencl", "torch"])
def test_any_device_copies_from_any_other_one(device, far):
    """In the order of both streams; by way of the host where the two know nothing of each other."""
    other = make(far)
    source, target = other.alloc(1 << 16), device.alloc(1 << 16)
    target.clear()
    with other.open() as writer, device.open() as reader:
        for seed in range(3):
            values = np.random.default_rng(seed).integers(0, 256, 1 << 16, np.uint8)
            writer.upload(source, 0, values)
            reader.copy_from(target, 64, source, 32, 60_000, source=writer)
            reader.synchronize()
            assert np.array_equal(target.read(64, 60_000), values[32:60_032])
            assert not target.read(0, 64).any()
            writer.synchronize()
