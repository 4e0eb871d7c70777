"""Numbers and running sums of rows, and copies, that compiled functions do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave_cpu.device import CpuDevice
from opweave_cpu.kernels.reduction import reduction_of_rows
from opweave_cpu.kernels.sorting import running_sums
from opweave_cpu.tunables import COMPILED_WORK

pytest.importorskip("llvmlite")

from opweave_cpu.jit import copies, transpose
from tests.support.noting import noted_results

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


@pytest.mark.parametrize("op", ["max", "sum", "mean"])
@pytest.mark.parametrize(
    ("shape", "axes", "compiled"),
    [((5, 9), (1,), True), ((2, 3, 4), (1, 2), True), ((5, 9), (0,), False), ((5, 7), (1,), False)],
)
def test_which_reductions_are_compiled(op: str, shape: tuple[int, ...], axes: tuple[int, ...], compiled: bool) -> None:
    f32 = as_dtype("f32")
    kept = tuple([n for axis, n in enumerate(shape) if axis not in axes])
    x, out = [Arg(None, 0, f32, n, dense_strides(n, f32)) for n in (shape, kept)]
    kernel = CpuDevice().kernels.find(Step(op, out, (x,), {"axes": axes}))
    assert kernel is not None
    assert (kernel.factory is reduction_of_rows) == compiled


# Relative to the sum of the absolute values: a result is rounded once, and sums have few terms each.
UNITS = {"f32": 3e-7, "f64": 1e-15, "bf16": 4e-3, "f16": 5e-4}


@pytest.mark.parametrize("dtype", list(UNITS))
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_and_means_of_rows(dtype: str, op: str) -> None:
    for shape, axes in [*AXES, ((2, 1 << 16), -1), ((300, 17), -1)]:
        a = np.random.default_rng(0).standard_normal(shape).astype(as_dtype(dtype).numpy)
        x = ow.input("summed_x", a.shape, dtype)
        got = ow.Scheduler(CpuDevice()).build(getattr(ow, op)(x, axes)).run({x: a})
        wide = a.astype(np.float64)
        limit = UNITS[dtype] * getattr(np.abs(wide), op)(axes)
        assert (np.abs(np.asarray(got, np.float64) - getattr(wide, op)(axes)) <= limit).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("op", ["sum", "cumsum"])
def test_sums_with_what_is_not_finite(op: str, value: float) -> None:
    a = np.ones((3, 70), np.float32)
    a[0, 40], a[1, [20, 69]] = value, (value, -value)
    x = ow.input("special_x", a.shape)
    got = ow.Scheduler(CpuDevice()).build(getattr(ow, op)(x, -1)).run({x: a})
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, getattr(np, op)(a, -1))


@pytest.mark.parametrize("dtype", list(UNITS))
def test_running_sums(dtype: str) -> None:
    for shape in [(5, 1000), (3, 7, 41), (1, 1 << 16), (2, 8)]:
        a = np.random.default_rng(0).standard_normal(shape).astype(as_dtype(dtype).numpy)
        x = ow.input("running_x", a.shape, dtype)
        got = ow.Scheduler(CpuDevice()).build(ow.cumsum(x, -1)).run({x: a})
        wide = a.astype(np.float64)
        limit = UNITS[dtype] * np.abs(wide).cumsum(-1)
        assert (np.abs(got.astype(np.float64) - wide.cumsum(-1)) <= limit).all()


def test_running_sums_of_rows_with_gaps() -> None:
    a = np.random.default_rng(0).standard_normal((6, 2, 90)).astype(np.float32)
    x = ow.input("gaps_x", a.shape)
    got = ow.Scheduler(CpuDevice()).build(ow.cumsum(ow.transpose(x, (1, 0, 2))[:, :, 3:80], -1)).run({x: a})
    want = a.astype(np.float64).transpose(1, 0, 2)[:, :, 3:80].cumsum(-1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("axis", "compiled"), [(-1, True), (0, False)], ids=["last axis", "another one"])
def test_which_running_sums_are_compiled(axis: int, compiled: bool) -> None:
    x = Arg(None, 0, as_dtype("f32"), (20, 30), (120, 4))
    kernel = CpuDevice().kernels.find(Step("cumsum", x, (x,), {"axis": axis}))
    assert kernel is not None
    assert (kernel.factory is running_sums) == compiled


@pytest.fixture
def compiled_copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `join` and `pick` of streams return, in order; copies of any size are compiled."""
    monkeypatch.setattr(COMPILED_WORK, "value", 1000)
    return noted_results(monkeypatch, copies, "bind_joined", "bind_picked")


def _any_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """All bits are kept, those of a signalling NaN too."""
    bits = np.dtype(f"i{as_dtype(dtype).itemsize}")
    made = np.random.default_rng(seed).integers(np.iinfo(bits).min, np.iinfo(bits).max, shape, bits)
    return made.view(as_dtype(dtype).numpy)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i32"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_arrays_side_by_side(dtype: str, axis: int, compiled_copies: list[Any]) -> None:
    shapes = [tuple([n if k == axis else m for k, m in enumerate((9, 11, 70))]) for n in (30, 5, 66)]
    parts = [_any_bits(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    inputs = [ow.input(f"joined_{i}", shape, dtype) for i, shape in enumerate(shapes)]
    got = ow.Scheduler(CpuDevice()).build(ow.concat(inputs, axis)).run(dict(zip(inputs, parts, strict=True)))
    bits = np.dtype(f"i{as_dtype(dtype).itemsize}")
    np.testing.assert_array_equal(got.view(bits), np.concatenate([part.view(bits) for part in parts], axis))
    assert [len(calls) for calls in compiled_copies] == [3]


def test_arrays_side_by_side_whose_elements_lie_apart(compiled_copies: list[Any]) -> None:
    a = np.random.default_rng(0).standard_normal((70, 90)).astype(np.float32)
    x = ow.input("apart_x", a.shape)
    got = ow.Scheduler(CpuDevice()).build(ow.concat([ow.transpose(x, (1, 0)), ow.transpose(x, (1, 0))], 0)).run({x: a})
    np.testing.assert_array_equal(got, np.concatenate([a.T, a.T], 0))


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i32"])
def test_rows_of_a_table(dtype: str, index: str, compiled_copies: list[Any]) -> None:
    table = _any_bits((50, 3, 37), dtype)
    ids = np.random.default_rng(1).integers(0, 50, (4, 9), as_dtype(index).numpy)
    x, picks = ow.input("table_x", table.shape, dtype), ow.input("table_ids", ids.shape, index)
    program = ow.Scheduler(CpuDevice()).build(ow.embedding(x, picks))
    got = program.run({x: table, picks: ids})
    bits = np.dtype(f"i{as_dtype(dtype).itemsize}")
    np.testing.assert_array_equal(got.view(bits), table[ids].view(bits))
    assert len(compiled_copies) == 1
    assert compiled_copies[0] is not None
    for outside in (50, -1):
        ids[2, 3] = outside
        with pytest.raises(ow.errors.ExecutionError, match=f"BoundsError: embedding: index {outside} at"):
            program.run({x: table, picks: ids})


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i32", "i8"])
@pytest.mark.parametrize("width", [1, 37, 4000])
def test_rows_put_by_index(dtype: str, index: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put = noted_results(monkeypatch, copies, "bind_put")
    before, rows = _any_bits((50, 3, width), dtype), _any_bits((20, 3, width), dtype, 1)
    ids = np.random.default_rng(1).integers(0, 50, 20, as_dtype(index).numpy)  # some of them twice
    bits, want = np.dtype(f"i{before.itemsize}"), before.copy()
    for i, row in zip(ids, rows, strict=True):
        want[i] = row
    table = ow.state("table_put", before.shape, dtype)
    ow.write(table, before)
    x, picks = ow.input("rows_put", rows.shape, dtype), ow.input("ids_put", ids.shape, index)
    with COMPILED_WORK.at(1 << 16):
        program = ow.Scheduler(CpuDevice()).build(ow.index_copy(table, picks, x))
    np.testing.assert_array_equal(program.run({x: rows, picks: ids}).view(bits), want.view(bits))
    assert [call is not None for call in put] == [width < 4000 and dtype != "i8"]
    for outside in (50, -1):
        ids[3] = outside
        with pytest.raises(ow.errors.ExecutionError, match=f"BoundsError: index_copy: index {outside} at"):
            program.run({x: rows, picks: ids})
        ow.write(table, before)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i32"])
def test_transposing_copies(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = noted_results(monkeypatch, transpose, "bind_transpose")
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
