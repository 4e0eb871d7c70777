"""Compiled rope and argmax compute what NumPy does, in every type, however pairs and columns lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave_cpu import CpuDevice

pytest.importorskip("llvmlite")

pytestmark = pytest.mark.usefixtures("compiling")

TYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
EPS = {"f32": 2e-6, "f64": 1e-10, "f16": 4e-3, "bf16": 4e-2}
"""Relative to the largest element. In f64 an angle of 200,000 is rounded by 3e-11 itself."""


def result(tensor, feeds):
    """What a device computes, and the kinds of functions that it compiled for that."""
    device = CpuDevice()
    with ow.Scheduler([device]) as scheduler:
        return scheduler.build(tensor).run(feeds), {key[0] for *_, key in device.artefacts}


def turned(x, positions, pairing, dims):
    """The definition: pair i turns by position · 10000^(-2i / dims)."""
    x = x.astype(np.float64)
    angles = positions[..., None] * 10000.0 ** (np.arange(dims // 2) * -2.0 / dims)
    out, (a, b) = x.copy(), {
        "half": (slice(0, dims // 2), slice(dims // 2, dims)), "adjacent": (slice(0, dims, 2), slice(1, dims, 2)),
    }[pairing]  # fmt: skip
    out[..., a] = x[..., a] * np.cos(angles) - x[..., b] * np.sin(angles)
    out[..., b] = x[..., b] * np.cos(angles) + x[..., a] * np.sin(angles)
    return out


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize(
    ("shape", "dims"), [((1, 4, 9, 32), 32), ((2, 3, 5, 40), 24), ((1, 2, 1, 128), 128), ((1, 2, 1100, 64), 64)]
)
@pytest.mark.parametrize("name", TYPES)
def test_rope(name, shape, dims, pairing):
    rng = np.random.default_rng(dims)
    x = rng.standard_normal(shape).astype(TYPES[name])
    positions = rng.integers(0, 200_000, shape[2])
    given, places = ow.input("turned x", shape, name), ow.input("places", positions.shape, "i64")
    got, compiled = result(ow.rope(given, places, pairing=pairing, dims=dims), {given: x, places: positions})
    assert "rotation" in compiled
    assert ("cos and sin" in compiled) == (name != "f64")
    want = turned(x, positions, pairing, dims)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=EPS[name] * np.abs(want).max())


def test_cosines_and_sines_are_accurate_at_large_positions():
    positions = np.concatenate([np.arange(0, 3000), 2 ** np.arange(12, 30)])
    x = np.zeros((1, 1, len(positions), 32), np.float32)
    x[..., :16] = 1
    given, places = ow.input("units", x.shape), ow.input("far places", positions.shape, "i64")
    got, _ = result(ow.rope(given, places, pairing="half"), {given: x, places: positions})
    angles = positions[:, None] * 10000.0 ** (np.arange(16) / -16)
    np.testing.assert_allclose(got[0, 0, :, :16], np.cos(angles), rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(got[0, 0, :, 16:], np.sin(angles), rtol=0, atol=1.2e-7)


def test_rope_over_its_source_and_with_factors():
    x = np.random.default_rng(3).standard_normal((1, 2, 6, 16)).astype(np.float32)
    factors = np.linspace(1, 3, 8).astype(np.float32)
    given = ow.input("over x", x.shape)
    node = ow.rope(given * 2.0, ow.constant(np.arange(6)), pairing="half", factors=ow.constant(factors))
    got, _ = result(node, {given: x})
    angles = np.arange(6)[:, None] * (10000.0 ** (np.arange(8) / -8) / factors)
    a, b = 2 * x[..., :8], 2 * x[..., 8:]
    want = np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 100), (300, 1040), (33, 65), (4, 20000), (70, 16)])
@pytest.mark.parametrize("name", TYPES)
def test_argmax_of_columns(name, shape):
    x = np.random.default_rng(shape[1]).standard_normal((2, *shape)).astype(TYPES[name])
    x[0, shape[0] // 2, ::3] = x[0, -1, ::3] = 9  # of equal ones the first
    x[1, shape[0] // 3 :, ::5] = np.nan  # the first NaN
    x[1, :, 1::7] = -np.inf
    given = ow.input("columns", x.shape, name)
    got, compiled = result(ow.argmax(given, 1), {given: x})
    assert "argmax" in compiled
    np.testing.assert_array_equal(got, np.argmax(x.astype(np.float64), 1))


@pytest.mark.parametrize("axis", [-1, 0])
def test_argmax_that_numpy_does_in_vectors_or_that_has_gaps_is_left_to_it(axis):
    x = np.random.default_rng(0).standard_normal((8, 48)).astype(np.float32)
    given = ow.input("gaps", x.shape)
    part = given if axis == -1 else given[:, :32]
    got, compiled = result(ow.argmax(part, axis), {given: x})
    assert "argmax" not in compiled
    np.testing.assert_array_equal(got, np.argmax(x if axis == -1 else x[:, :32], axis))
