"""Random numbers: the words of the paper, the distributions, and what key and counter mean."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS
from opweave.ops.random import philox
from tests.support.evaluate import evaluate
from tests.support.philox import philox_block, philox_words

FLOATS = ("f32", "f16", "bf16", "f64")
DIGITS = {"f32": 24, "f16": 11, "bf16": 8, "f64": 53}
ONES, PI = (0xFFFFFFFF,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN = [  # the authors' known answers for Philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def joined(words):
    return sum(word << 32 * i for i, word in enumerate(words))


def values(node):
    return evaluate(node, {})


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_words_are_those_of_the_paper(counter, key, answer):
    assert philox_block(counter, key) == answer
    words = np.empty((4, 1), np.uint64)
    philox(joined(key), joined(counter[2:]), joined(counter[:2]), words, np.empty((2, 1), np.uint64))
    assert tuple(words[:, 0].tolist()) == answer


@pytest.mark.parametrize(("key", "counter"), [(0, 0), (7, 2**40 + 3), (2**64 - 1, 5), (-1, 5), (-(2**63), -2)])
def test_uniform_numbers_are_the_upper_bits_of_the_words(key, counter):
    words = philox_words(key, counter, 26)
    for dtype in ("f32", "f16", "bf16"):
        bits = DIGITS[dtype]
        expected = [(word >> 32 - bits) / 2**bits for word in words[:13]]
        assert values(ow.uniform(13, key, counter, dtype)).astype(np.float64).tolist() == expected
    expected = [(a * 2**32 + b >> 11) / 2**53 for a, b in zip(words[::2], words[1::2], strict=True)]
    assert values(ow.uniform(13, key, counter, "f64")).tolist() == expected


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [ow.uniform, ow.normal])
def test_shapes_and_prefixes(make, dtype):
    whole = values(make((5, 7), 1, 2, dtype))
    assert whole.dtype == as_dtype(dtype).numpy
    for count in (0, 1, 2, 3, 4, 5, 34):
        np.testing.assert_array_equal(values(make(count, 1, 2, dtype)), whole.reshape(-1)[:count])
    assert values(make((), 1, 2, dtype)) == whole[0, 0]
    assert ow.compile(lambda: make((3, 0), 1, 2, dtype), devices="host")().shape == (3, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_are_evenly_distributed(dtype):
    x = values(ow.uniform(100_000, 11, 0, dtype)).astype(np.float64)
    step = 2.0 ** -DIGITS[dtype]
    assert x.min() >= 0
    assert x.max() < 1
    assert (x / step % 1 == 0).all()
    # Within a step the place is open: each number stands for the interval above it.
    spread = x + step * np.random.default_rng(0).random(x.size)
    assert stats.kstest(spread, "uniform").pvalue > 0.01
    assert stats.chisquare(np.histogram(x, 64, (0, 1))[0]).pvalue > 0.01


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_normal_numbers_have_their_distribution(dtype):
    z = values(ow.normal(200_000, 5, 9, dtype)).astype(np.float64)
    assert stats.kstest(z, "norm").pvalue > 0.01
    assert stats.kstest(z[::2] ** 2 + z[1::2] ** 2, stats.chi2(2).cdf).pvalue > 0.01  # pairs are independent
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 3.5 * np.sqrt(variance / z.size), power


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_normal_numbers_of_half_types_are_those_of_f32_rounded(dtype):
    wide = values(ow.normal(4096, 3, 4))
    np.testing.assert_array_equal(values(ow.normal(4096, 3, 4, dtype)), wide.astype(as_dtype(dtype).numpy))


@pytest.mark.parametrize(
    "other", [(4, 0), (3, 1), (3 | 1 << 32, 0), (3, 1 << 32), (0, 3), (3 ^ 1 << 63, 0), (-4, 0), (3, -1)]
)
def test_streams_of_other_keys_and_counters_are_independent(other):
    n = 40_000
    a, b = (values(ow.uniform(n, key, counter, "f64")) for key, counter in ((3, 0), other))
    assert not np.isin(a[:64], b).any()
    for lag in range(-4, 5):
        assert abs(np.corrcoef(a, np.roll(b, lag))[0, 1]) < 4.5 / np.sqrt(n)
    table = np.histogram2d(a, b, 16, ((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_equal_nodes_are_one_and_others_are_not():
    assert ow.uniform((2, 3), 1, 2) is ow.uniform([2, 3], np.int64(1), 2, "f32")
    assert ow.uniform(3, 2**64 - 1, 0) is ow.uniform(3, -1, 0)
    assert ow.uniform(3, 1, 2) is not ow.uniform(3, 2, 2)
    assert ow.uniform(3, 1, 2) is not ow.uniform(3, 1, 3)
    assert ow.uniform(3, 1, 2) is not ow.uniform(3, 1, 2, "f64")


def test_a_fed_counter_gives_other_numbers_without_another_program():
    draw = ow.compile(lambda counter: ow.normal((4,), 7, counter), devices="host")
    first, second = draw(np.int64(0)), draw(np.int64(1))
    assert not np.isin(first, second).any()
    np.testing.assert_array_equal(draw(np.int64(0)), first)
    np.testing.assert_array_equal(second, values(ow.normal(4, 7, 1)))
    assert draw.scheduler.stats.built == 1


def test_a_state_counts_the_runs():
    count = ow.state("draws", (1,), "i64")
    drawn = ow.uniform((5,), 3, count)
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build([drawn, ow.assign(count, count + 1)])
        for i in range(3):
            np.testing.assert_array_equal(program.run()[0], values(ow.uniform(5, 3, i)))


@pytest.mark.parametrize("dtype", ["i32", "i64", "u8", "i16"])
def test_keys_of_every_integer_type(dtype):
    key = ow.input("key", (1, 1), dtype)
    got = ow.compile(ow.uniform(4, key, 1), devices="host")(np.full((1, 1), 77, as_dtype(dtype).numpy))
    np.testing.assert_array_equal(got, values(ow.uniform(4, 77, 1)))


# --- bernoulli ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0, 0.0, 0.1, 0.5, 1 - 2**-24, 1, True])
def test_bernoulli_is_uniform_below_p(p):
    got = values(ow.bernoulli((50, 100), 1, 2, p))
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, values(ow.uniform((50, 100), 1, 2)) < np.float32(p))
    if p in (0, 1):
        assert (got == bool(p)).all()


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_probabilities_of_elements(dtype):
    p = np.linspace(0, 1, 11).astype(as_dtype(dtype).numpy)
    got = values(ow.bernoulli((20_000, 11), 4, 5, ow.constant(p)))
    drawn = values(ow.uniform((20_000, 11), 4, 5, "f64" if dtype == "f64" else "f32"))
    np.testing.assert_array_equal(got, drawn < p.astype(drawn.dtype))
    share = p.astype(np.float64)
    assert (np.abs(got.mean(0) - share) <= 4 * np.sqrt(share * (1 - share) / 20_000)).all()


def test_bernoulli_in_number_types():
    want = values(ow.bernoulli(100, 1, 2, 0.3))
    for dtype in ("f32", "f16", "i64", "u8"):
        got = values(ow.bernoulli(100, 1, 2, 0.3, dtype))
        assert got.dtype == as_dtype(dtype).numpy
        np.testing.assert_array_equal(got.astype(bool), want)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ow.uniform((2,), 1.5, 0), ow.DTypeError, "uniform: the key is an integer or a tensor of one, not 1.5"),
        (lambda: ow.normal((2,), 1, True), ow.DTypeError, "normal: the counter is an integer of 64 bits, not True"),
        (
            lambda: ow.normal((2,), 1 << 64, 0),
            ow.DTypeError,
            "the key is an integer of 64 bits, not 18446744073709551616",
        ),
        (lambda: ow.uniform((2,), 0, -(1 << 63) - 1), ow.DTypeError, "the counter is an integer of 64 bits"),
        (lambda: ow.uniform((2,), ow.input("k", ()), 0), ow.DTypeError, "the key is an integer, not .*f32"),
        (lambda: ow.uniform((2,), ow.input("k", (), "bool"), 0), ow.DTypeError, "the key is an integer, not .*bool"),
        (lambda: ow.uniform((2,), ow.input("k", (2,), "i64"), 0), ow.ShapeError, "the key is one integer, not .*k"),
        (lambda: ow.uniform((-2,), 0, 0), ow.ShapeError, "uniform: "),
        (lambda: ow.uniform((2,), 0, 0, "i32"), ow.DTypeError, "uniform: makes f32, f16, bf16 or f64, not i32"),
        (lambda: ow.uniform((2,), 0, 0, "f8_e4m3"), ow.DTypeError, "uniform: makes f32, f16, bf16 or f64, not f8_e4m3"),
        (lambda: ow.normal((32,), 0, 0, "q8_0"), ow.DTypeError, "normal: makes f32, f16, bf16 or f64, not q8_0"),
        (lambda: ow.bernoulli((2,), 0, 0, 1.5), ow.DTypeError, "p is a probability, from 0 to 1, not 1.5"),
        (lambda: ow.bernoulli((2,), 0, 0, float("nan")), ow.DTypeError, "p is a probability, from 0 to 1, not nan"),
        (lambda: ow.bernoulli((2,), 0, 0, ow.input("p", (3,))), ow.ShapeError, "p does not broadcast to the shape"),
        (lambda: ow.bernoulli((2,), 0, 0, ow.input("p", (4, 2))), ow.ShapeError, "p does not broadcast to the shape"),
        (lambda: ow.bernoulli((32,), 0, 0, dtype="q8_0"), ow.DTypeError, "bernoulli: a node cannot produce q8_0"),
    ],
)
def test_what_is_wrong_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- devices --------------------------------------------------------------------------------------------------------


def devices(dtype):
    """The first device of each backend that is here and has random numbers, if it takes the type: some OpenCL devices
    have no f64."""
    first = {d.name.split(":")[0]: d.name for d in reversed(ow.devices()) if d.kind is not ow.Kind.HOST}.values()
    found = [name for name in first if "uniform" in ow.device(name).kernels.ops()]
    return [name for name in found if dtype != "f64" or runs(name, ow.uniform((4,), 0, 0, dtype))]


def runs(name, node):
    with ow.Scheduler(name) as scheduler:
        try:
            scheduler.partition(node)
        except ow.UnsupportedOpError:
            return False
        return True


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_equal_on_all_devices(dtype):
    shape, key, counter = (70_001,), 2**63 + 12345, -3
    want = values(ow.uniform(shape, key, counter, dtype)).tobytes()
    choice = values(ow.bernoulli(shape, key, counter, 0.3))
    for name in devices(dtype):
        with ow.Scheduler(name) as scheduler:
            drawn = ow.uniform(shape, key, counter, dtype), ow.bernoulli(shape, key, counter, 0.3)
            got, chosen = scheduler.build(drawn).run()
            assert got.tobytes() == want, name
            np.testing.assert_array_equal(chosen, choice)


@pytest.mark.parametrize(("dtype", "digits"), [("f32", 23), ("f64", 52)])
def test_normal_numbers_are_within_units_in_the_last_place(dtype, digits):
    node = ow.normal((300_000,), 99, 7, dtype)
    exact = OPS["normal"].reference(np.int64(99), np.int64(7), **node.attrs)
    unit = np.exp2(np.floor(np.log2(np.abs(exact))) - digits)
    for name in devices(dtype):
        with ow.Scheduler(name) as scheduler:
            units = (np.abs(scheduler.build(node).run().astype(np.float64) - exact) / unit).max()
            assert units <= (12 if name.startswith("opencl") else 6), name
