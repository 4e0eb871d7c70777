"""Weights of ``torch:cpu`` in special memory: packed by oneDNN, or as integers of 4 bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave_torch.device import TorchCpuDevice
from opweave_torch.native import multiplies_bf16
from opweave_torch.packed import packed_types

F = np.float32
BF16 = ml_dtypes.bfloat16

pytestmark = pytest.mark.skipif(len(packed_types()) < 2, reason="this torch lacks the operators")


@pytest.fixture
def device() -> TorchCpuDevice:
    made = TorchCpuDevice()
    made.name = "torch:cpu"
    return made


def given(dtype: str, shape: tuple[int, int] = (512, 1024)) -> tuple[Any, np.ndarray[Any, Any]]:
    """Weights as `ow.weights` takes them, and their values in f64."""
    values = np.random.default_rng(3).standard_normal(shape).astype(F)
    if dtype in ("f32", "bf16"):
        array = values.astype(ow.as_dtype(dtype).numpy)
        return array, array.astype(np.float64)
    pytest.importorskip("gguf")
    blocks = ow.quantize(values, dtype)
    return blocks, ow.dequantize(blocks).astype(np.float64)


def nmse(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(((got.astype(np.float64) - want) ** 2).mean() / (want**2).mean())


CASES = [
    ("f32", "f32", "exact", "torch:cpu.packed", 1e-12),
    ("f32", "f32", "bf16", "torch:cpu.packed", 3e-5),
    ("bf16", "bf16", "exact", "torch:cpu.packed", 2e-5),
    ("q8_0", "f32", "exact", "torch:cpu.packed", 1e-12),
    ("q4_0", "f32", "exact", "torch:cpu.packed", 1e-12),
    ("q4_0", "bf16", "exact", "torch:cpu.packed", 2e-5),
    ("q4_0", "f32", "bf16", "torch:cpu.int4", 3e-5),
    ("q4_1", "f32", "bf16", "torch:cpu.int4", 3e-5),
    ("q8_0", "f32", "bf16", "torch:cpu.packed_bf16", 3e-5),
    ("q8_0", "bf16", "bf16", "torch:cpu.packed_bf16", 3e-5),
    ("q8_0", "f16", "int8", "torch:cpu.packed_bf16", 3e-5),
]


@pytest.mark.parametrize(("dtype", "rows", "precision", "memory", "limit"), CASES)
@pytest.mark.parametrize("shape", [(3, 1024), (2, 2, 1024)])
def test_products_read_packed_weights(
    device: TorchCpuDevice, dtype: str, rows: str, precision: Any, memory: str, limit: float, shape: tuple[int, ...]
) -> None:
    if ("bf16" in (dtype, precision) or "bf16" in memory) and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    weight, values = given(dtype)
    x = ow.input("x", shape, rows)
    fed = np.random.default_rng(4).standard_normal(shape).astype(x.dtype.numpy)
    bias = np.random.default_rng(5).standard_normal(512).astype(x.dtype.numpy)
    group = ow.weights({"w": weight, "b": bias})
    with ow.Scheduler([device, "host"], precision=precision) as scheduler:
        program = scheduler.build(ow.linear(x, group["w"], group["b"]))
        got = program.run(x=fed)
    assert [row.repacked for row in program.explain().nodes] == [memory]
    assert nmse(got, fed.astype(np.float64) @ values.T + bias.astype(np.float64)) < limit


@pytest.mark.parametrize(("dtype", "memory"), [("f32", "packed"), ("bf16", "packed"), ("q8_0", "packed"),
                                               ("q4_0", "packed"), ("q4_0", "packed_bf16"),
                                               ("q4_0", "int4"), ("q4_1", "int4")])  # fmt: skip
def test_packed_weights_are_read_bit_for_bit(device: TorchCpuDevice, dtype: str, memory: str) -> None:
    if "bf16" in dtype + memory and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    weight, _ = given(dtype, (48, 96))
    want = np.asarray(weight.data if isinstance(weight, ow.Blocks) else weight)
    placed = ow.weights({"w": weight}, device=device, buffer_type=memory)["w"]
    np.testing.assert_array_equal(ow.read(placed).view(np.uint8), want.view(np.uint8))


def test_results_with_gaps_and_rows_with_gaps(device: TorchCpuDevice) -> None:
    weight, values = given("f32")
    x = ow.input("x", (8, 2048))
    fed = np.random.default_rng(6).standard_normal((8, 2048)).astype(F)
    w = ow.weights({"w": weight}, buffer_type=device.buffer_type("packed"))["w"]
    with ow.Scheduler([device, "host"]) as scheduler:
        got = scheduler.build(ow.linear(x[::2, 1024:], w)).run(x=fed)
    assert nmse(got, fed[::2, 1024:].astype(np.float64) @ values.T) < 1e-12


def test_small_products_and_a_declining_caller_get_no_copies(device: TorchCpuDevice) -> None:
    small, large = given("f32", (16, 32))[0], given("f32")[0]
    weights = ow.weights({"small": small, "large": large})
    for name, repack in (("small", True), ("large", False)):
        x = ow.input("x", (4, weights[name].shape[1]))
        with ow.Scheduler([device, "host"], repack=repack) as scheduler:
            program = scheduler.build(ow.linear(x, weights[name]))
        assert [row.repacked for row in program.explain().nodes] == [""]


def test_more_rows_of_4_bits_are_multiplied_in_bf16(device: TorchCpuDevice) -> None:
    if not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    weight, values = given("q4_0")
    x = ow.input("x", (16, 1024))
    fed = np.random.default_rng(7).standard_normal(x.shape).astype(F)
    with ow.Scheduler([device, "host"], precision="int8") as scheduler:
        program = scheduler.build(ow.linear(x, ow.weights({"w": weight})["w"]))
        assert nmse(np.array(program.run(x=fed)), fed.astype(np.float64) @ values.T) < 3e-5
    assert [row.repacked for row in program.explain().nodes] == ["torch:cpu.packed_bf16"]


@pytest.mark.parametrize(
    ("array", "memory", "why"),
    [
        (np.zeros(64, F), "packed", "matrices only"),
        (np.zeros((64, 64), np.float16), "packed", "f32, bf16 and quantized"),
        (np.zeros((64, 64), F), "int4", "q4_0 and q4_1"),
        (np.zeros((64, 64), F), "packed_bf16", "quantized types"),
        (ow.Blocks(np.zeros(20 * 18, np.uint8), (20, 32), "q4_0"), "int4", "multiple of 16"),
    ],
)
def test_what_it_does_not_keep_is_refused(device: TorchCpuDevice, array: Any, memory: str, why: str) -> None:
    if "bf16" in memory and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    with pytest.raises(ow.UnsupportedOpError, match=why):
        ow.weights({"w": array}, device=device, buffer_type=memory)
