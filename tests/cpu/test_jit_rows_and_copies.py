"""``max`` and ``min`` of rows, and transposing copies, that compiled functions do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave_cpu.device import CpuDevice
from opweave_cpu.kernels.reduction import extremum_of_rows

pytest.importorskip("llvmlite")

from opweave_cpu.jit import transpose

pytestmark = pytest.mark.usefixtures("compiling")

AXES = [((5, 1000), -1), ((3, 7, 40), (1, 2)), ((2, 3, 8), None)]
VIEWS = [((100, 70), (1, 0)), ((2, 33, 40), (0, 2, 1)), ((129, 3, 16), (2, 1, 0)), ((4, 20, 3, 90), (3, 0, 2, 1))]


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("special", [0.0, np.nan, np.inf, -np.inf])
def test_the_extreme_element_of_rows(dtype: str, op: str, special: float) -> None:
    for shape, axes in AXES:
        a = np.random.default_rng(0).standard_normal(shape).astype(as_dtype(dtype).numpy)
        a.reshape(-1)[[3, a.size - 1]] = special
        x = ow.input("extreme_x", a.shape, dtype)
        got = ow.Scheduler(CpuDevice()).build(getattr(ow, op)(x, axes)).run({x: a})
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(np.asarray(got, np.float64), getattr(a.astype(np.float64), op)(axes))


@pytest.mark.parametrize(
    ("shape", "axes", "compiled"),
    [((5, 9), (1,), True), ((2, 3, 4), (1, 2), True), ((5, 9), (0,), False), ((5, 7), (1,), False)],
)
def test_which_extremes_are_compiled(shape: tuple[int, ...], axes: tuple[int, ...], compiled: bool) -> None:
    f32 = as_dtype("f32")
    kept = tuple([n for axis, n in enumerate(shape) if axis not in axes])
    x, out = [Arg(None, 0, f32, n, dense_strides(n, f32)) for n in (shape, kept)]
    kernel = CpuDevice().kernels.find(Step("max", out, (x,), {"axes": axes}))
    assert kernel is not None
    assert (kernel.factory is extremum_of_rows) == compiled


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i32"])
def test_transposing_copies(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    bind = transpose.bind_transpose

    def noted(*args: Any) -> Any:
        bound.append(bind(*args))
        return bound[-1]

    monkeypatch.setattr(transpose, "bind_transpose", noted)
    bits = np.dtype(f"i{as_dtype(dtype).itemsize}")
    for shape, axes in VIEWS:
        # All bits are kept, those of a signalling NaN too.
        a = np.random.default_rng(0).integers(np.iinfo(bits).min, np.iinfo(bits).max, shape, bits)
        x = ow.input("transposed_x", shape, dtype)
        program = ow.Scheduler(CpuDevice()).build(ow.contiguous(ow.transpose(x, axes)))
        got = program.run({x: a.view(as_dtype(dtype).numpy)})
        np.testing.assert_array_equal(got.view(bits), a.transpose(axes))
    assert len(bound) == len(VIEWS)
    assert all(call is not None for call in bound)
