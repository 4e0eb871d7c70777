"""What every device promises of equal elements, of integers to the ends of their range, and of masks at the default
scale, against NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import opweave as ow
from tests.support.real_devices import make

DEVICES = ("host", "cpu", "opencl", "torch", "ort")
FLOATS = ("f32", "f16", "bf16", "f64")
INTEGERS = ("i64", "i32", "i16", "i8", "u8")
SHAPES = ((1,), (70,), (2, 1025), (2, 4100))


@pytest.fixture(params=DEVICES)
def device(request):
    return make(request.param)


def run(device, outputs, **leaves):
    with ow.Scheduler([device, "host"]) as scheduler:
        return [np.array(result) for result in scheduler.build(outputs).run(**leaves)]


def first_wins(x, descending):
    """Indices in the promised order, NaN the largest, by sorting pairs in Python."""

    def key(i: int, row: np.ndarray) -> tuple[bool, float, int]:
        value = float(row[i]) if row.dtype.kind not in "iub" else int(row[i])
        is_nan = value != value
        size = 0.0 if is_nan else value
        return (not is_nan, -size, i) if descending else (is_nan, size, i)

    rows = [sorted(range(x.shape[-1]), key=partial(key, row=row)) for row in x.reshape(-1, x.shape[-1])]
    return np.array(rows, np.int64).reshape(x.shape)


def alike(dtype, shape, seed):
    """Few different numbers, the ends of the type among integers, NaN and both zeros among floats."""
    numpy = ow.input("x", shape, dtype).dtype.numpy
    if dtype in FLOATS:
        few = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0])
    elif dtype == "bool":
        few = np.array([False, True])
    else:
        info = np.iinfo(numpy)
        few = np.array([info.min, info.min + 1, 0, 1, info.max - 1, info.max], numpy)
    return np.random.default_rng(seed).choice(few, shape).astype(numpy)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_the_lower_index_comes_first_among_equals(device, dtype):
    for seed, shape in enumerate(SHAPES):
        x, count = ow.input("x", shape, dtype), shape[-1]
        for values in (alike(dtype, shape, seed), np.ones(shape, x.dtype.numpy)):
            up, down = first_wins(values, descending=False), first_wins(values, descending=True)
            outputs = [
                ow.argsort(x), ow.argsort(x, descending=True), ow.top_k(x, 1)[1], ow.top_k(x, (count + 1) // 2)[1],
                ow.argmax(x, -1),
            ]  # fmt: skip
            wanted = [up, down, down[..., :1], down[..., : (count + 1) // 2], down[..., 0]]
            for got, want in zip(run(device, outputs, x=values), wanted, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_to_the_ends_of_their_range(device, dtype):
    """Sums are i64 and wrap around as in NumPy; Python's own integers say what that is."""
    reduced: list[tuple[tuple[int, ...], Any]] = [
        ((1,), 0), ((33,), 0), ((4, 257), 1), ((257, 4), 0), ((3, 5, 7), (0, 2)),
    ]  # fmt: skip
    for seed, (shape, axis) in enumerate(reduced):
        x = ow.input("x", shape, dtype)
        values = alike(dtype, shape, seed)
        if dtype == "i64" and seed % 2:
            values = np.random.default_rng(seed).integers(1 << 54, 1 << 55, shape)
        wide = values.astype(object)
        outputs = [ow.sum(x, axis), ow.prod(x, axis), ow.max(x, axis), ow.min(x, axis), ow.square(x), x * x + x]
        wanted = [
            *[wrapped(np.asarray(of(wide, axis)), "int64") for of in (np.sum, total_product)],
            np.max(values, axis), np.min(values, axis), wrapped(wide * wide, values.dtype),
            wrapped(wide * wide + wide, values.dtype),
        ]  # fmt: skip
        for got, want in zip(run(device, outputs, x=values), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["i64", "i32"])
def test_products_and_running_sums_of_integers_wrap_around(device, dtype):
    a, b = ow.input("a", (3, 40), dtype), ow.input("b", (40, 5), dtype)
    left, right = alike(dtype, (3, 40), 1), alike(dtype, (40, 5), 2)
    got = run(device, [ow.matmul(a, b), ow.cumsum(a, 1)], a=left, b=right)
    np.testing.assert_array_equal(got[0], wrapped(left.astype(object) @ right.astype(object), left.dtype))
    np.testing.assert_array_equal(got[1], wrapped(np.cumsum(left.astype(object), 1), "int64"))


def total_product(x, axis):
    axes = sorted(np.atleast_1d(axis), reverse=True)
    for at in axes:
        x = np.multiply.reduce(x, at)
    return x


def wrapped(x, dtype):
    """Python's integers in a type, what does not fit wrapped around."""
    bits = np.iinfo(dtype).bits
    return np.array([int(v) % (1 << bits) for v in x.reshape(-1)], np.uint64).astype(dtype).reshape(x.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.5])
def test_softmax_with_a_mask_at_every_scale(device, dtype, scale):
    rng = np.random.default_rng(5)
    x, mask = ow.input("x", (3, 17), dtype), ow.input("mask", (3, 17), dtype)
    values = rng.standard_normal((3, 17)).astype(x.dtype.numpy)
    hidden = np.where(np.arange(17) > [[4], [9], [16]], -np.inf, 0.25).astype(x.dtype.numpy)
    given = {} if scale is None else {"scale": scale}
    (got,) = run(device, [ow.softmax(x, -1, mask=mask, **given)], x=values, mask=hidden)
    raised = np.exp(values.astype(np.float64) * (scale or 1.0) + hidden.astype(np.float64))
    tolerance = {"f64": 1e-12, "f32": 1e-5, "f16": 1e-3, "bf16": 1e-2}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), raised / raised.sum(-1, keepdims=True), tolerance, tolerance)
