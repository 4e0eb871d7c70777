"""Antialiased interpolation against torch's."""

import numpy as np
import pytest
import torch

import opweave as ow
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(41)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (5, 20), (1, 1), (13, 9), (9, 13)])
def test_smoothing_is_torchs(mode, align_corners, size):
    x = RNG.standard_normal((2, 3, 9, 13))
    got = evaluate(ow.interpolate(ow.constant(x), size, None, mode, align_corners, antialias=True), {})
    want = torch.nn.functional.interpolate(
        torch.from_numpy(x), size, mode=mode, align_corners=align_corners, antialias=True
    )
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("factor", [0.5, 0.3, 1.7])
def test_smoothing_by_a_factor_is_torchs(factor):
    x = RNG.standard_normal((1, 2, 10, 11))
    got = evaluate(ow.interpolate(ow.constant(x), None, factor, "bilinear", antialias=True), {})
    want = torch.nn.functional.interpolate(torch.from_numpy(x), scale_factor=factor, mode="bilinear", antialias=True)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-10)


def test_other_modes_do_not_smooth():
    with pytest.raises(ow.ShapeError, match="antialias is an option of the modes bilinear and bicubic"):
        ow.interpolate(ow.input("x", (1, 1, 4, 4)), 2, antialias=True)
