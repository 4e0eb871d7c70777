"""What a run is fed: arrays in every layout, which may change as soon as the run has ended."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import f32

SHAPE = (6, 8)


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


@pytest.fixture
def device():
    return ow.device("cpu")


@pytest.fixture
def scheduler(device):
    with ow.Scheduler(device) as made:
        yield made


X = ow.input("x", SHAPE)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, 0)[::2],
        lambda x: np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(SHAPE),
        lambda x: x.tolist(),
    ],
    ids=["Fortran order", "every second row", "not aligned", "a list"],
)
def test_other_layouts_between_arrays_that_are_dense(scheduler, device, other):
    program = scheduler.build(X * 2.0)
    first, second = values(1), other(values(2))
    assert np.array_equal(program.run(x=first), first * 2)
    assert np.array_equal(program.run(x=second), values(2) * 2)
    assert np.array_equal(program.run(x=first), first * 2)


def test_results_are_arrays_of_their_own(scheduler):
    program = scheduler.build((X, X.T, X * 2.0))
    x = values()
    want = [x.copy(), x.T.copy(), x * 2]
    got = program.run(x=x)
    x.fill(9)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_is_submitted_may_be_overwritten_at_once(device):
    for parallel in (False, True):
        with ow.Scheduler(device, parallel=parallel) as scheduler:
            program = scheduler.build(X * 2.0)
            x = values()
            want = x * 2
            future = program.submit(x=x)
            x.fill(9)
            assert np.array_equal(future.result(), want)


def test_a_value_that_was_written_stays_after_other_values_were_fed(scheduler):
    program = scheduler.build(X * 2.0)
    x = values()
    program.write("x", x)
    x.fill(9)
    for _ in range(2):
        assert np.array_equal(program.run(), values() * 2)
        assert np.array_equal(program.run(x=x), x * 2)


def test_readers_on_another_device_and_in_their_own_memory_get_the_values(device):
    with ow.Scheduler([device, ow.device("host")]) as scheduler:
        beside = ow.exp(X)
        program = scheduler.build((X * 2.0, beside), pins={beside: ow.device("host")})
        for seed in range(2):
            x = values(seed)
            double, e = program.run(x=x)
            assert np.array_equal(double, x * 2)
            np.testing.assert_allclose(e, np.exp(x), rtol=1e-6)


def test_an_array_over_memory_that_the_program_writes_is_read_before_it_is_written(scheduler, device):
    buffer = device.alloc(16)
    memory = buffer.view(0, f32, (2, 2), (8, 4))
    memory[:] = [[1, 2], [3, 4]]
    x = ow.input("x", (2, 2))
    sums = x + x.T * 2.0
    program = scheduler.build(sums * x, placements=[ow.place(sums, buffer)])
    assert program.run(x=memory).tolist() == [[3.0, 16.0], [21.0, 48.0]]


def test_after_a_failed_run_the_next_one_reads_what_it_is_fed(scheduler):
    failing = [True]

    def half(array):
        if failing.pop():
            raise ValueError("not this time")
        return array / 2

    program = scheduler.build(ow.custom(half, X * 2.0, like=X) + X)
    x = values(1)
    with pytest.raises(ow.ExecutionError):
        program.run(x=x)
    failing[:] = [False, False]
    for array in (np.asfortranarray(values(2)), values(3)):
        np.testing.assert_allclose(program.run(x=array), array * 2, rtol=1e-6)
