"""Products that a program allows to be computed in bf16, against torch's own in bf16 and NumPy's in f64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import opweave as ow
from opweave_conformance.case import Case
from opweave_conformance.cases import cases_for
from opweave_conformance.check import run_case
from opweave_conformance.tolerances import limits
from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.device import TorchCpuDevice
from opweave_torch.kernels import WITH_BF16, half_products
from opweave_torch.native import multiplies_bf16, multiplies_tiles_of_bf16

F = np.float32
Build = Callable[[list[Any]], ow.Tensor]


def values(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TorchCpuDevice:
    """A device with the kernels in bf16, whatever the processor has."""
    monkeypatch.setattr(TorchCpuDevice, "kernels", WITH_BF16)
    return TorchCpuDevice()


GRAPHS: dict[str, tuple[list[tuple[int, ...]], Build]] = {
    "linear": ([(4, 48), (40, 48), (40,)], lambda xs: ow.linear(*xs)),
    "matmul": ([(3, 8, 24), (3, 24, 16)], lambda xs: ow.matmul(*xs)),
    "matmul of a transpose": ([(16, 24), (16, 8)], lambda xs: ow.matmul(xs[0].T, xs[1])),
    "attention": ([(1, 2, 6, 16), (1, 2, 9, 16), (1, 2, 9, 16)], lambda xs: ow.attention(*xs, causal=True)),
    "conv1d": ([(2, 8, 30), (6, 8, 3)], lambda xs: ow.conv1d(*xs)),
    "conv2d": ([(1, 8, 9, 9), (6, 8, 3, 3), (6,)], lambda xs: ow.conv2d(*xs)),
    "conv2d of points": ([(1, 8, 9, 9), (6, 8, 1, 1)], lambda xs: ow.conv2d(*xs)),
    "conv3d": ([(1, 4, 5, 5, 5), (6, 4, 3, 3, 3)], lambda xs: ow.conv3d(*xs)),
    "conv_transpose1d": ([(1, 8, 9), (8, 6, 3)], lambda xs: ow.conv_transpose1d(*xs)),
    "conv_transpose2d": ([(1, 8, 5, 5), (8, 6, 3, 3)], lambda xs: ow.conv_transpose2d(*xs)),
    "expert_linear": (
        [(6, 24), (3, 16, 24)],
        lambda xs: ow.expert_linear(
            xs[0], xs[1], ow.constant(np.array([[0, 1], [2, 1], [0, 0], [1, 2], [2, 0], [1, 1]], "i4"))
        ),
    ),
}


@pytest.mark.parametrize("fixed", [False, True], ids=["fed", "weights"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_error_is_that_of_rounding_to_bf16(device: TorchCpuDevice, name: str, fixed: bool) -> None:
    shapes, build = GRAPHS[name]
    arrays = {f"x{i}": values(*shape, seed=i) for i, shape in enumerate(shapes)}
    weights = ow.weights({k: v for k, v in arrays.items() if fixed and k != "x0"})
    output = build([weights[k] if k in weights else ow.input(k, v.shape) for k, v in arrays.items()])
    feeds = {k: v for k, v in arrays.items() if k not in weights}
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(output, precision="bf16")
        got, exact = program.run(feeds), scheduler.build(output).run(feeds)
        assert {row.precision for row in program.explain().nodes if row.op == name.split()[0]} == {"bf16"}
    error = np.mean((got.astype(np.float64) - exact) ** 2) / np.mean(exact.astype(np.float64) ** 2)
    assert 1e-6 < error < limits(output.root, "bf16").nmse
    if name == "linear":
        x, w, b = [torch.from_numpy(a).bfloat16() for a in arrays.values()]
        np.testing.assert_array_equal(got, torch.nn.functional.linear(x, w, b).float().numpy())
    if fixed:
        assert all(leaf.dtype.name != "f32" for leaf in program.partition.leaves if leaf.dtype.is_float and
                   leaf.leaf is not None and leaf.leaf.kind == "weight" and leaf not in weights.values())  # fmt: skip


def _cases() -> list[Case]:
    """Of every product some cases, those in f32 among them."""
    found = []
    for op in half_products.PRODUCTS:
        floats = [case for case in cases_for(op) if all(o.dtype in ("f32", "i32") for o in case.operands)]
        found += floats[:: max(1, len(floats) // 12)]
    return found


@pytest.mark.parametrize("op", half_products.PRODUCTS)
@pytest.mark.parametrize("make", [TorchCpuDevice, SeparateCpuDevice])
def test_they_conform(op: str, make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "kernels", WITH_BF16)
    device = make()
    failed = [result for case in _cases() if case.op == op if not (result := run_case(device, case))]
    assert failed == []


def test_a_processor_takes_them_where_it_has_instructions_for_bf16() -> None:
    x, w = ow.input("x", (8, 64)), ow.input("w", (32, 64))
    with ow.Scheduler("torch:cpu") as scheduler:
        many = scheduler.partition(ow.linear(x, w), precision="bf16").explain().nodes
        one = scheduler.partition(ow.linear(x[:1], w), precision="bf16").explain().nodes
        q, k, v = (ow.input(name, (1, 2, 8, 16)) for name in "qkv")
        mixed = scheduler.partition(ow.attention(q, k, v), precision="bf16").explain().nodes
    assert [row.precision for row in many] == ["bf16" if multiplies_bf16() else "exact"]
    assert [row.precision for row in one] == ["exact"], "products of one row are no faster"
    assert [row.precision for row in mixed] == ["bf16" if multiplies_tiles_of_bf16() else "exact"]


# --- quantized weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_quantized_weights_are_decoded_to_bf16_for_many_rows(device: TorchCpuDevice, dtype: str) -> None:
    blocks = ow.quantize(values(40, 64, seed=1), dtype)
    weight, bias = ow.weights({"w": blocks, "b": values(40, seed=2)}).values()
    x = values(48, 64)
    with ow.Scheduler([device], precision="bf16") as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (48, 64)), weight, bias))
        assert [row.precision for row in program.explain().nodes] == ["bf16"]
        few = scheduler.partition(ow.linear(ow.input("x", (8, 64)), weight))
        assert [row.precision for row in few.explain().nodes] == ["exact"]
        got = program.run(x=x)
    want = x.astype(np.float64) @ ow.dequantize(blocks).astype(np.float64).T + values(40, seed=2)
    assert 1e-7 < np.mean((got - want) ** 2) / np.mean(want**2) < 3e-5


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k"])
def test_products_with_quantized_weights_conform(
    device: TorchCpuDevice, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_products, "FEW_ROWS", 0)
    cases = [case for case in cases_for("linear") if dtype in [operand.dtype for operand in case.operands]]
    results = [run_case(device, case) for case in cases]
    assert [result for result in results if not result] == []
    assert any(result.status == "passed" for result in results)
