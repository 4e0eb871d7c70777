"""`opweave.linear` with batches of quantized matrices, on every device that is here."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow

SHAPES = [
    ((64,), (3, 5, 64)), ((2, 64), (3, 5, 64)), ((4, 3, 2, 64), (3, 5, 64)), ((4, 1, 2, 64), (1, 3, 5, 64)),
    ((1, 64), (4, 3, 50, 64)), ((2, 64), (0, 5, 64)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["host", "cpu", "opencl", "torch"])
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "mxfp4"])
def test_it_is_numpys_matmul(name, dtype):
    try:
        device = ow.device(name)
    except (ow.UnknownNameError, ow.PluginError) as missing:
        pytest.skip(str(missing))
    rng = np.random.default_rng(0)
    for shape, matrices in SHAPES:
        x, bias = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(matrices[-2]).astype(np.float32)
        blocks = ow.quantize(rng.standard_normal(matrices), dtype)
        y = ow.linear(ow.input("x", shape), ow.weights({"w": blocks}, device)["w"], bias)
        with ow.Scheduler([device]) as scheduler:
            got = scheduler.build(y).run(x=x)
        want = np.matmul(x.astype(np.float64), np.swapaxes(ow.dequantize(blocks), -1, -2)) + bias
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
