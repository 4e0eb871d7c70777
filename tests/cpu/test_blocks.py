"""Quantized weights: many tiles of them, computed with in every float type, and no memory besides what is planned."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from opweave.contract import Arg, Group, Plan, Step
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave.graph.layout import dense_strides, nbytes
from opweave.ops.blocks import dequantize
from opweave_cpu import CpuDevice
from opweave_cpu.tunables import BLOCK_TILE

Array = np.ndarray[Any, Any]
QUANTIZED = [t for t in DTYPES.values() if t.is_quantized]
SHAPE = (1037, 768)
"""Weights of more than six tiles, the last of which is smaller."""


def random_blocks(shape: tuple[int, ...], dtype: Any) -> Array:
    """Bytes whose scales are moderate: f16 of small exponents wherever they lie."""
    return np.random.default_rng(0).integers(0, 48, (*shape[:-1], dtype.row_bytes(shape[-1])), np.uint8)


@pytest.fixture
def compiled(device: CpuDevice) -> Callable[..., tuple[Plan, Array]]:
    """``compiled(op, out, *srcs)``: the plan of one step, and where its result lies. Sources are arrays, or pairs of
    bytes and their quantized type."""
    kept: list[Any] = []

    def place(value: Any) -> Arg:
        data, dtype = value if isinstance(value, tuple) else (value, as_dtype(value.dtype))
        shape = (*data.shape[:-1], data.shape[-1] // dtype.itemsize * dtype.block) if dtype.is_quantized else data.shape
        buffer = device.alloc(nbytes(shape, dtype))
        buffer.upload(0, data)
        return Arg(buffer, 0, dtype, shape, dense_strides(shape, dtype))

    def compile(op: str, out: Array, *srcs: Any) -> tuple[Plan, Array]:
        (blocks,) = [s[1] for s in srcs if isinstance(s, tuple)]
        step = Step(op, place(out), tuple([place(s) for s in srcs]), {"blocks": blocks})
        size = device._workspace(step)
        scratch = Arg(device.alloc(size), 0, as_dtype("u8"), (size,), (1,))
        kept.extend([step, scratch, device.open()])
        return kept[-1].compile([Group((step,), size, scratch)]), step.out.view

    return compile


def allocated_by(plan: Plan) -> int:
    """The most bytes that a run holds besides what there was."""
    plan.run()
    tracemalloc.start()
    try:
        plan.run()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        plan.run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_linear_in_many_tiles_allocates_nothing(compiled: Any, dtype: Any, rows: int) -> None:
    x, w = np.random.default_rng(1).standard_normal((rows, SHAPE[1])).astype(np.float32), random_blocks(SHAPE, dtype)
    plan, out = compiled("linear", np.zeros((rows, SHAPE[0]), np.float32), x, (w, dtype))
    # Casts and unaligned operands pass through NumPy's own buffers of 8192 elements.
    assert allocated_by(plan) < BLOCK_TILE.value * 4 // 8
    want = x.astype(np.float64) @ dequantize(w, dtype).astype(np.float64).T
    np.testing.assert_allclose(out, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_embedding_in_many_tiles_allocates_nothing(compiled: Any, dtype: Any) -> None:
    table, ids = random_blocks((40, 1024), dtype), np.random.default_rng(1).integers(0, 40, 300)
    plan, out = compiled("embedding", np.zeros((300, 1024), np.float32), (table, dtype), ids)
    assert allocated_by(plan) < BLOCK_TILE.value * 4 // 8
    np.testing.assert_array_equal(out, dequantize(table[ids], dtype))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_experts_in_many_tiles_allocate_nothing(compiled: Any, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((9, 1, 512)).astype(np.float32), random_blocks((3, 600, 512), dtype)
    ids = rng.integers(0, 3, (9, 2))
    plan, out = compiled("expert_linear", np.zeros((9, 2, 600), np.float32), x, (w, dtype), ids)
    assert allocated_by(plan) < BLOCK_TILE.value * 4 // 8
    want = np.einsum("ti,tuoi->tuo", x[:, 0].astype(np.float64), dequantize(w, dtype).astype(np.float64)[ids])
    np.testing.assert_allclose(out, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("kind", "error"), [(np.float64, 1e-14), (np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_other_types_are_computed_in_f32_or_their_own_and_rounded_once(compiled: Any, kind: Any, error: float) -> None:
    dtype = as_dtype("q4_k")
    x, w = np.random.default_rng(1).integers(-9, 10, (2, 3, SHAPE[1])).astype(kind), random_blocks(SHAPE, dtype)
    bias = np.random.default_rng(2).integers(-9, 10, SHAPE[0]).astype(kind)
    plan, out = compiled("linear", np.zeros((2, 3, SHAPE[0]), kind), x, (w, dtype), bias)
    assert allocated_by(plan) < BLOCK_TILE.value * 4 // 8
    want = x.astype(np.float64) @ dequantize(w, dtype).astype(np.float64).T + bias.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=error, atol=error * np.abs(want).max())
