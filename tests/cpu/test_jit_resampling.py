"""Linear and cubic resampling on ``cpu`` that is compiled, beside torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave_cpu.device import CpuDevice

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite")

from opweave_cpu.jit import resampling  # noqa: E402
from tests.support.noting import noted_results  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiling")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `bind_resampling` returned, in order."""
    return noted_results(monkeypatch, resampling, "bind_resampling")


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 3, 40), {"size": 101, "mode": "linear"}),
        ((2, 3, 40), {"size": 7, "mode": "linear", "align_corners": True}),
        ((1, 64, 56, 56), {"scale_factor": 2, "mode": "bilinear"}),
        ((2, 3, 9, 13), {"size": (20, 7), "mode": "bilinear", "align_corners": True}),
        ((2, 3, 9, 50), {"size": (9, 70), "mode": "bilinear"}),  # the rows stay
        ((2, 3, 9, 50), {"size": (1, 1), "mode": "bilinear"}),
        ((2, 3, 1, 1), {"size": (5, 20), "mode": "bicubic"}),
        ((2, 3, 9, 13), {"scale_factor": (1.7, 2.5), "mode": "bicubic"}),
        ((1, 2, 5, 6, 7), {"size": (9, 6, 20), "mode": "trilinear"}),
    ],
)
def test_resampling(dtype: str, shape: tuple[int, ...], options: dict[str, Any], bound: list[Any]) -> None:
    a = np.random.default_rng(0).standard_normal(shape).astype(as_dtype(dtype).numpy)
    x = ow.input("resampled_x", shape, dtype)
    got = ow.Scheduler(CpuDevice()).build(ow.interpolate(x, **options)).run({x: a})
    want = torch.nn.functional.interpolate(torch.from_numpy(a.astype(np.float64)), **options).numpy()
    limit = {"f32": 1e-6, "f64": 1e-14, "bf16": 4e-3}[dtype] * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=limit)
    assert len(bound) == 1


def test_resampling_of_a_window_of_an_image(bound: list[Any]) -> None:
    a = np.random.default_rng(0).standard_normal((3, 2, 30, 40)).astype(np.float32)
    x = ow.input("window_x", a.shape)
    part = ow.transpose(x, (1, 0, 2, 3))[:, :, 2:9, 3:33]
    got = ow.Scheduler(CpuDevice()).build(ow.interpolate(part, scale_factor=2, mode="bilinear")).run({x: a})
    want = torch.nn.functional.interpolate(
        torch.from_numpy(a.transpose(1, 0, 2, 3)[:, :, 2:9, 3:33].astype(np.float64)), scale_factor=2, mode="bilinear"
    )
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-6)
    assert len(bound) == 1


def test_what_is_not_finite_stays_where_it_is() -> None:
    a = np.ones((1, 1, 8, 30), np.float32)
    a[0, 0, 3, 17] = np.inf
    x = ow.input("infinite_x", a.shape)
    got = ow.Scheduler(CpuDevice()).build(ow.interpolate(x, scale_factor=2, mode="bilinear")).run({x: a})
    want = torch.nn.functional.interpolate(torch.from_numpy(a), scale_factor=2, mode="bilinear").numpy()
    np.testing.assert_array_equal(got, want)


def test_rows_that_are_too_long_for_the_cache_are_resampled_by_numpy(bound: list[Any]) -> None:
    a = np.random.default_rng(0).standard_normal((1, 1, 2, 5000)).astype(np.float32)
    x = ow.input("long_x", a.shape)
    got = ow.Scheduler(CpuDevice()).build(ow.interpolate(x, size=(3, 6000), mode="bilinear")).run({x: a})
    want = torch.nn.functional.interpolate(torch.from_numpy(a).double(), size=(3, 6000), mode="bilinear").numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert not bound
