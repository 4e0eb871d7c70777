"""Rows in groups by their experts on ``cpu``: of an expert with none, with one, and with all, beside NumPy in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave_cpu import CpuDevice

EXPERTS = 4

Array = np.ndarray[Any, Any]


def rounded(x: Array) -> Array:
    """Activations as bytes and a factor for each 32, and back."""
    groups = x.reshape(-1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    return (np.rint(groups * (np.float32(127) / largest)).astype(np.float64) * largest / 127).reshape(x.shape)


def ids_of(tokens: int) -> dict[str, Array]:
    """By name: for each token two experts."""
    uneven = np.resize(np.array([0, 2], np.int32), (tokens, 2))
    uneven[tokens // 2, 1] = 3
    return {"none of 1, one of 3": uneven, "all of 2": np.full((tokens, 2), 2, np.int32)}


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs", "precision", "jit", "counts"),
    [
        ("f16", 272, 37, "exact", True, (8, 9, 66)),  # 16 rows, and 128 at a time
        ("bf16", 256, 16, "exact", True, (9,)),
        ("f32", 272, 37, "exact", True, (1, 8, 9, 66)),
        ("f32", 512, 15, "exact", True, (9,)),  # fewer rows of weights than lanes
        ("f32", 264, 37, "exact", True, (9,)),  # half a vector
        ("q8_0", 288, 37, "exact", True, (9, 66)),
        ("q8_0", 288, 37, "int8", True, (8, 9, 66)),  # 4 rows for each expert, and 128 at a time
        ("q4_k", 512, 20, "int8", True, (65,)),
        ("f16", 272, 37, "exact", False, (9,)),
        ("f32", 272, 37, "exact", False, (9,)),
        ("q8_0", 288, 37, "int8", False, (9,)),
    ],
)
def test_each_row_is_multiplied_by_its_expert(monkeypatch, dtype, inputs, outputs, precision, jit, counts):
    if jit:
        pytest.importorskip("llvmlite")
        monkeypatch.delenv("OPWEAVE_CPU_JIT")
    rng = np.random.default_rng(0)
    for tokens in counts:
        own = tokens % 2 == 0
        w: Any = rng.standard_normal((EXPERTS, outputs, inputs)).astype(np.float32)
        floats = not ow.as_dtype(dtype).is_quantized
        w = w.astype(ow.as_dtype(dtype).numpy) if floats else ow.quantize(w, dtype)
        x = rng.standard_normal((tokens, 2 if own else 1, inputs)).astype(np.float32)
        node = ow.expert_linear(ow.input("x", x.shape), ow.weights({"w": w})["w"], ow.input("ids", (tokens, 2), "i32"))
        near = rounded(x) if precision == "int8" and jit else x.astype(np.float64)
        every = np.asarray(w if floats else ow.dequantize(w)).astype(np.float64)
        with ow.Scheduler([CpuDevice()], precision=precision) as scheduler:
            program = scheduler.build(node)
            for ids in ids_of(tokens).values():
                want = np.einsum("tui,tuoi->tuo", np.broadcast_to(near, (tokens, 2, inputs)), every[ids])
                got = program.run(x=x, ids=ids)
                np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max(), rtol=0)
