"""Weights of ``cpu`` that are kept decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave_cpu.device import IsolatedCpuDevice

F = np.float32
DTYPES = ("q4_0", "q4_1", "q5_0", "q8_0", "mxfp4", "bf16", "f16")


def given(dtype: str, shape: tuple[int, int] = (96, 512)) -> tuple[Any, np.ndarray[Any, Any]]:
    values = np.random.default_rng(3).standard_normal(shape).astype(F)
    if dtype in ("f16", "bf16"):
        array = values.astype(ow.as_dtype(dtype).numpy)
        return array, array.astype(np.float64)
    pytest.importorskip("gguf")
    blocks = ow.quantize(values, dtype)
    return blocks, ow.dequantize(blocks).astype(np.float64)


@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_read_decoded_weights(dtype: str, rows: int) -> None:
    weight, values = given(dtype)
    x = ow.input("x", (rows, 512), dtype if dtype in ("f16", "bf16") else "f32")
    fed = np.random.default_rng(4).standard_normal(x.shape).astype(x.dtype.numpy)
    bias = np.arange(96).astype(x.dtype.numpy)
    group = ow.weights({"w": weight, "b": bias})
    want = fed.astype(np.float64) @ values.T + bias.astype(np.float64)
    results = []
    for repack in (True, False):
        with ow.Scheduler(["cpu", "host"], repack=repack) as scheduler:
            program = scheduler.build(ow.linear(x, group["w"], group["b"]))
            results.append(program.run(x=fed).astype(np.float64))
        assert [row.repacked for row in program.explain().nodes] == ["cpu.decoded" if repack else ""]
        limit = {"f16": 1e-6, "bf16": 2e-5}.get(x.dtype.name, 1e-12)
        assert ((results[-1] - want) ** 2).mean() / (want**2).mean() < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_weights_are_read_bit_for_bit_and_counted(dtype: str) -> None:
    weight, _ = given(dtype)
    want = np.asarray(weight.data if isinstance(weight, ow.Blocks) else weight)
    placed = ow.weights({"w": weight}, buffer_type="cpu.decoded")["w"]
    np.testing.assert_array_equal(ow.read(placed).view(np.uint8), want.view(np.uint8))
    with ow.Scheduler(["cpu", "host"]) as scheduler:
        program = scheduler.build(
            ow.linear(ow.input("x", (2, 512), "f32" if placed.dtype.is_quantized else dtype), placed)
        )
        assert program.memory["cpu"].weights >= placed.nbytes


def test_what_blas_reads_as_it_lies_is_not_kept_twice() -> None:
    weight = np.zeros((64, 64), F)
    with pytest.raises(ow.UnsupportedOpError, match="BLAS reads as it lies"):
        ow.weights({"w": weight}, buffer_type="cpu.decoded")
    with ow.Scheduler(["cpu", "host"]) as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (2, 64)), ow.weights({"w": weight})["w"]))
    assert [row.repacked for row in program.explain().nodes] == [""]


def test_devices_with_memory_of_their_own_have_them_there() -> None:
    device = IsolatedCpuDevice(0)
    device.name = "cpu:0"
    weight, values = given("bf16")
    fed = np.ones((2, 512), ow.as_dtype("bf16").numpy)
    with ow.Scheduler([device, "host"]) as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (2, 512), "bf16"), ow.weights({"w": weight})["w"]))
        got = program.run(x=fed).astype(np.float64)
    assert [row.repacked for row in program.explain().nodes] == ["cpu:0.decoded"]
    assert ((got - fed.astype(np.float64) @ values.T) ** 2).mean() < 2e-5 * (got**2).mean()
