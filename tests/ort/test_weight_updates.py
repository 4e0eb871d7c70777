"""Weights that ONNX Runtime has packed are packed again when they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.device import HostDevice
from opweave_ort import OrtBackend


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q4_0", "q8_0", "q5_1"])
def test_programs_go_on_with_the_new_values(dtype: str) -> None:
    """Two programs that share a session, and one with a part of the weight."""
    (device,) = [d for d in OrtBackend().devices() if d.id == "cpu"]

    def made(seed: int) -> Any:
        values = array(32, 256, seed=seed)
        return values if dtype == "f32" else values.astype("f2") if dtype == "f16" else ow.quantize(values, dtype)

    def plain(seed: int) -> np.ndarray:
        values = made(seed)
        return values.astype("f4") if isinstance(values, np.ndarray) else ow.dequantize(values)

    w = ow.weights({"a": made(0)})
    x, v = ow.input("x", (4, 256)), array(4, 256, seed=9)
    outputs = ow.linear(x, ow.cast(w["a"], "f32") if dtype == "f16" else w["a"])
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        programs = [scheduler.build(outputs), scheduler.build(ow.neg(outputs))]
        for seed in (0, 1, 2):
            if seed:
                w.write({"a": made(seed)})
            want = v @ plain(seed).T
            for program, sign in zip(programs, (1, -1), strict=True):
                np.testing.assert_allclose(program.run(x=v), sign * want, rtol=1e-3, atol=1e-3)
        assert scheduler.stats.built == 2
