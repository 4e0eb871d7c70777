"""Products in bf16 on ``cpu`` by the instruction that multiplies pairs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.contract.kernels import Kernel
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave_cpu.device import CpuDevice
from opweave_cpu.kernels.half_products import linear_of_pairs

pytest.importorskip("llvmlite")

from opweave_cpu.jit import compiler, half_products

pytestmark = pytest.mark.usefixtures("compiling")

needs_pairs = pytest.mark.skipif(not half_products.multiplies_pairs(), reason="no instruction for pairs of bf16")


@needs_pairs
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(4, 64, 16), (9, 1030, 37), (139, 34, 40), (150, 96, 37), (83, 32, 20), (16, 70, 33), (127, 34, 40)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_rounded_once(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    rng = np.random.default_rng(0)
    a, w, b = [rng.standard_normal(n).astype(ml_dtypes.bfloat16) for n in ((rows, inputs), (outputs, inputs), outputs)]
    a[-1, 5] = np.nan  # stays in its row
    x, leaves = ow.input("pairs_x", a.shape, "bf16"), ow.weights({"w": w, "b": b})
    program = ow.Scheduler(CpuDevice()).build(ow.linear(x, leaves["w"], leaves["b"] if biased else None))
    got = program.run({x: a}).astype(np.float64)
    assert np.isnan(got[-1]).all()
    wide, weights = a[:-1].astype(np.float64), w.astype(np.float64)
    want = wide @ weights.T + (b.astype(np.float64) if biased else 0)
    size = np.abs(wide) @ np.abs(weights.T) + 1
    assert (np.abs(got[:-1] - want) <= 2.0**-8 * np.abs(want) + 1e-6 * size).all()


def kernel_for(rows: int, inputs: int, outputs: int) -> Kernel:
    bf16 = as_dtype("bf16")
    shapes = (rows, outputs), (rows, inputs), (outputs, inputs)
    out, x, w = [Arg(None, 0, bf16, shape, dense_strides(shape, bf16)) for shape in shapes]
    kernel = CpuDevice().kernels.find(Step("linear", out, (x, w), {}))
    assert kernel is not None
    return kernel


@needs_pairs
def test_which_products_multiply_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_for(4, 32, 16).factory is linear_of_pairs
    others = [kernel_for(3, 32, 16), kernel_for(4, 33, 16), kernel_for(4, 32, 15)]
    monkeypatch.setattr(compiler.target(), "features", frozenset({"avx512f"}))
    others.append(kernel_for(4, 32, 16))
    assert all(kernel.factory is not linear_of_pairs for kernel in others)
