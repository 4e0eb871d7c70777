"""States are written where they lie, from within the session of a split."""

from __future__ import annotations

import time

import numpy as np
import pytest

import opweave as ow
from opweave.errors import chain_of
from tests.support import small_decoder as decoder

DTYPES = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool")


@pytest.fixture
def scheduler(device):
    with ow.Scheduler(device) as made:
        yield made


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_written_and_read_in_one_session(scheduler, dtype):
    kind = ow.input("x", (1,), dtype).dtype.numpy
    cache = ow.state("cache", (8, 3), dtype)
    new = ow.index_copy(cache, ow.input("ids", (2,), "i64"), ow.input("rows", (2, 3), dtype))
    program = scheduler.build({"part": ow.copy(new[2:7]), "rows": ow.embedding(new, ow.input("read", (3,), "i64"))})
    assert [len(plan.calls) for plan in program.run_lists[0].plans] == [1]
    rows = np.array([[1, 0, 1], [0, 1, 1]]).astype(kind)
    want = np.zeros((8, 3), kind)
    for ids in ([3, 5], [0, 7]):
        want[ids] = rows
        got = program.run(ids=np.array(ids), rows=rows, read=np.array([0, 3, 7]))
        assert np.array_equal(got["part"], want[2:7])
        assert np.array_equal(got["rows"], want[[0, 3, 7]])
        assert np.array_equal(program.read("cache"), want)


def test_numbers_without_axes_are_read_anew_in_each_run(scheduler):
    steps = ow.state("steps", ())
    after, share = ow.accumulate(steps, 1.0), ow.expm1((steps + 1.0) * -0.5) * ow.input("rate", ())
    program = scheduler.build([share, after])
    for n in range(1, 4):
        got = program.run(rate=np.array(n, np.float32))
        np.testing.assert_allclose(got[0], np.expm1(n * -0.5) * n, rtol=1e-6)
        assert got[1] == n


def test_a_large_state_is_not_copied(scheduler):
    """A copy of 256 MB would take more than 10 ms."""
    cache = ow.state("cache", (1 << 16, 1024))
    new = ow.index_copy(cache, ow.input("ids", (1,), "i64"), ow.input("rows", (1, 1024)))
    program = scheduler.build(ow.copy(new[5]))
    feeds = {"ids": np.array([5]), "rows": np.ones((1, 1024), np.float32)}
    program.run(feeds)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        program.run(feeds)
        times.append(time.perf_counter() - begin)
    assert min(times) < 5e-3


def test_of_rows_with_one_index_one_stays_whole(scheduler):
    cache = ow.state("cache", (4, 1 << 14))
    new = ow.index_copy(cache, ow.input("ids", (64,), "i32"), ow.input("rows", (64, 1 << 14)))
    program = scheduler.build(new[:2] + 0.0)
    rows = np.repeat(np.arange(1, 65, dtype=np.float32)[:, None], 1 << 14, 1)
    ids = np.tile(np.array([0, 1], np.int32), 32)
    for _ in range(20):
        got = program.run(ids=ids, rows=rows)
        assert all((row == row[0]).all() and row[0] % 2 == 1 - i for i, row in enumerate(got))


def test_readers_of_the_version_before_a_write_see_it(scheduler):
    x = ow.input("x", (4,))
    total = ow.state("total", (4,))
    before = total * 2.0
    after = ow.accumulate(total, x) + 0.0
    turned = ow.state("turned", (2, 2))
    next_ = ow.assign(turned, ow.copy(turned.T) + ow.reshape(x, (2, 2)))
    program = scheduler.build([before, after, next_ + 0.0])
    sums, square = np.zeros(4, np.float32), np.zeros((2, 2), np.float32)
    for i in range(3):
        values = np.arange(4, dtype=np.float32) + i
        got = program.run(x=values)
        assert np.array_equal(got[0], 2 * sums)
        sums, square = sums + values, square.T + values.reshape(2, 2)
        assert np.array_equal(got[1], sums)
        assert np.array_equal(got[2], square)


def test_a_part_of_a_state_is_written_and_all_of_it_read(scheduler):
    whole = ow.state("whole", (6, 2))
    new = ow.assign(whole[2:4], ow.input("x", (2, 2)))
    later = ow.accumulate(new[3:5], 1.0)
    program = scheduler.build([ow.sum(new[:3], axis=0), ow.copy(later)])
    want = np.zeros((6, 2), np.float32)
    for i in range(2):
        x = np.full((2, 2), i + 1, np.float32)
        want[2:4] = x
        top = want[:3].sum(0)
        want[3:5] += 1
        got = program.run(x=x)
        assert np.array_equal(got[0], top)
        assert np.array_equal(got[1], want)


def test_an_index_out_of_range_is_a_bounds_error_that_names_the_state(scheduler):
    cache = ow.state("cache", (4, 2))
    new = ow.index_copy(cache, ow.input("ids", (2,), "i64"), ow.input("rows", (2, 2)))
    program = scheduler.build(ow.copy(new))
    rows = np.ones((2, 2), np.float32)
    for wrong in (4, -1):
        with pytest.raises(ow.ExecutionError) as caught:
            program.run(ids=np.array([0, wrong]), rows=rows)
        assert caught.value.states == ("cache",)
        assert any(isinstance(error, ow.BoundsError) for error in chain_of(caught.value))
        program.write("cache", np.zeros((4, 2), np.float32))
    assert np.array_equal(program.run(ids=np.array([0, 3]), rows=rows)[[0, 3]], rows)


def test_the_decoder_of_the_examples_is_one_session():
    pytest.importorskip("opweave_cpu")
    rng = np.random.default_rng(0)
    arrays = {n: (rng.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for n, s in decoder.SHAPES.items()}
    results = []
    for name in ("ort:cpu", "cpu"):
        step, cache = decoder.decoder(arrays, [name])
        batch = cache.feed({cache.join(): [1, 2, 3], cache.join(): [4, 5]})
        results.append(step(*batch))
        program = step.program(*batch)
        if name == "ort:cpu":
            assert [(split.target.name, plan.size) for split, plan in zip(program.splits, program.run_lists[0].plans,
                    strict=True)] == [("ort:cpu", 1)]  # fmt: skip
        step.close()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-3, atol=1e-4)
