"""Depthwise convolutions on ``cpu`` that are compiled, beside torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave_cpu.device import CpuDevice

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite")

from opweave_cpu.jit import depthwise  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiling")


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 5, 9, 40), (10, 1, 3, 3), {"padding": 1}),
        ((1, 3, 20, 35), (3, 1, 5, 2), {"stride": (2, 3), "dilation": (1, 2), "padding": (4, 3)}),
        ((2, 4, 50), (4, 1, 4), {"stride": 2, "padding": 3}),
    ],
)
def test_a_depthwise_convolution(
    dtype: str, x: tuple[int, ...], w: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Any] = []
    bind = depthwise.bind_depthwise

    def noted(*args: Any, **given: Any) -> Any:
        bound.append(bind(*args, **given))
        return bound[-1]

    monkeypatch.setattr(depthwise, "bind_depthwise", noted)
    rng, op = np.random.default_rng(0), f"conv{len(x) - 2}d"
    a, filters, bias = [rng.standard_normal(n).astype(as_dtype(dtype).numpy) for n in (x, w, w[0])]
    a[..., 0, :3] = 1e30 if dtype != "bf16" else 1  # a wrong element would be seen
    source, leaves = ow.input("depthwise_x", x, dtype), ow.weights({"w": filters, "b": bias})
    program = ow.Scheduler(CpuDevice()).build(getattr(ow, op)(source, leaves["w"], leaves["b"], groups=x[1], **options))
    wide = [torch.from_numpy(v.astype(np.float64)) for v in (a, filters, bias)]
    want = getattr(torch, op)(*wide, groups=x[1], **options).numpy()
    unit = {"f32": 1e-6, "f64": 1e-14, "bf16": 8e-3}[dtype]
    got = program.run({source: a}).astype(np.float64)
    sizes = getattr(torch, op)(*[v.abs() for v in wide], groups=x[1], **options).numpy()
    assert (np.abs(got - want) <= unit * sizes).all()
    assert len(bound) == 1
