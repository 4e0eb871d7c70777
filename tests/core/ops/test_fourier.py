"""The Fourier transform against NumPy's, in f64."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow

RNG = np.random.default_rng(3)
LENGTHS = [1, 2, 3, 7, 97, 255, 256, 257, 361, 362, 400, 509, 510, 512, 1021, 1031, 2062, 4093, 4096]
"""On both sides of the lengths from which a transform is made of several: 257 pairs, 362 and 510 real numbers."""


def value(t, device="cpu"):
    with ow.Scheduler([device, "host"]) as scheduler:
        return scheduler.build({"y": t}).run({})["y"]


def pairs(*shape, dtype=np.float32):
    return RNG.standard_normal((*shape, 2)).astype(dtype)


def complex_of(x):
    x = np.asarray(x, np.float64)
    return x[..., 0] + 1j * x[..., 1]


def is_near(got, want, dtype=np.float32):
    """Within a few roundings, of each number in relation to the root of the mean square of all."""
    norm = np.sqrt(np.mean(np.abs(want) ** 2))
    np.testing.assert_allclose(got, want, rtol=0, atol=48 * np.finfo(dtype).eps * norm)


@pytest.mark.parametrize("n", LENGTHS)
def test_transforms_of_every_kind(n):
    for device in ("cpu", "opencl:0"):
        p = pairs(3, n)
        z, real = complex_of(p), p[..., 0].astype(np.float64)
        is_near(complex_of(value(ow.dft(p), device)), np.fft.fft(z))
        is_near(complex_of(value(ow.dft(p, inverse=True), device)), np.fft.ifft(z))
        is_near(complex_of(value(ow.dft(p[..., :1]), device)), np.fft.fft(real))
        is_near(complex_of(value(ow.dft(p[..., :1], onesided=True), device)), np.fft.rfft(real))
        for length in (2 * n - 1, 2 * n - 2):
            if length:
                got = value(ow.dft(p, length, inverse=True, onesided=True), device)
                assert got.shape == (3, length, 1)
                is_near(got[..., 0], np.fft.irfft(z, length))


@pytest.mark.parametrize("n", [5, 300, 521, 600])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_lengths_and_norms_along_an_axis_in_f64(n, norm):
    p = pairs(4, n, 3, dtype=np.float64)
    z = complex_of(p)
    for length in (n - 2, n, n + 3):
        is_near(complex_of(value(ow.dft(p, length, 1, norm=norm))), np.fft.fft(z, length, 1, norm), np.float64)
        got = value(ow.dft(p, length, -3, inverse=True, norm=norm))
        is_near(complex_of(got), np.fft.ifft(z, length, 1, norm), np.float64)
        got = value(ow.dft(p[..., :1], length, 1, onesided=True, norm=norm))
        is_near(complex_of(got), np.fft.rfft(z.real, length, 1, norm), np.float64)
        got = value(ow.dft(p, length, 1, inverse=True, onesided=True, norm=norm))
        is_near(got[..., 0], np.fft.irfft(z, length, 1, norm), np.float64)


def test_half_types_compute_in_f32():
    x = (300 * RNG.standard_normal((2, 700, 1))).astype(np.float16)
    want = np.fft.fft(x[..., 0].astype(np.float64), norm="forward")
    np.testing.assert_allclose(complex_of(value(ow.dft(x, norm="forward"))), want, rtol=2e-3, atol=0.02)
    assert value(ow.dft(np.arange(6, dtype=np.int32).reshape(6, 1))).dtype == np.float32


def test_no_rows_and_one_element():
    assert value(ow.dft(np.zeros((0, 600, 2), np.float32))).shape == (0, 600, 2)
    np.testing.assert_array_equal(value(ow.dft(np.array([[3.0, 4.0]]))), [[3.0, 4.0]])
    np.testing.assert_array_equal(value(ow.dft(np.zeros((2, 0, 1), np.float32), 4)), np.zeros((2, 4, 2)))


@pytest.mark.parametrize("n", [6, 300, 521])
def test_gradient_is_the_transform_back(n):
    weights = pairs(n, dtype=np.float64)
    x = ow.input("x", weights.shape, "f64")
    (found,) = ow.gradients(ow.sum(ow.dft(x) * ow.constant(weights)), [x])
    got = value(found)  # a linear function, of which the gradient does not depend on x
    is_near(complex_of(got), np.fft.ifft(complex_of(weights)) * n, np.float64)


@pytest.mark.parametrize(
    ("shape", "options", "error"),
    [((3,), {}, ow.BoundsError), ((2,), {"axis": 0}, ow.ShapeError), ((4, 3), {}, ow.ShapeError),
     ((4, 2), {"axis": -1}, ow.ShapeError),
     ((4, 2), {"axis": 2}, ow.BoundsError), ((0, 2), {}, ow.ShapeError), ((4, 2), {"length": 0}, ow.ShapeError),
     ((1, 2), {"inverse": True, "onesided": True}, ow.ShapeError), ((4, 2), {"norm": "none"}, ow.ShapeError),
     ((4, 2), {"length": 2.5}, ow.ShapeError), ((4, 2), {"axis": 0.5}, ow.ShapeError)],
)  # fmt: skip
def test_what_cannot_be_transformed(shape, options, error):
    with pytest.raises(error, match="dft"):
        ow.dft(np.zeros(shape, np.float32), **options)
