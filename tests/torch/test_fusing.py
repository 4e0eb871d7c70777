"""Runs of pointwise operations as one kernel each."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.opdef import OPS
from opweave_conformance import CASES
from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.device import TorchCpuDevice
from opweave_torch.fusing import FUNCTIONS, FusingStream
from opweave_torch.kernels.table import FLOATS
from tests.support.kernels import assert_right_where_accepted, by_operation

Array = np.ndarray[Any, Any]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fused functions as they are, so that no compiler takes its seconds."""
    made: list[Any] = []

    def note(function: Any, **params: Any) -> Any:
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr("opweave_torch.fusing._COMPILED", {})
    return made


def results(program: ow.Program, **feeds: Array) -> list[Array]:
    return [np.array(value) for value in program.run(feeds)]


def test_only_pointwise_operations_are_fused():
    assert {name for name in FUNCTIONS if not OPS[name].pointwise} == set()


FLOATING = [c for c in CASES if c.op in FUNCTIONS and all(x.dtype in FLOATS.split() for x in c.operands)]


@pytest.mark.parametrize("cases", by_operation(c for i, c in enumerate(FLOATING) if i % 9 == 0 or "special" in c.id))
def test_each_function_is_the_operation(uncompiled, cases, monkeypatch):
    """Even a single step goes through the fused form here."""
    from opweave_torch import fusing

    class Always(TorchCpuDevice):
        stream_class = fusing.FusingStream

        def _open(self, **params: Any) -> Any:
            return super()._open(compile=True)

    monkeypatch.setattr(
        FusingStream, "_bind", lambda self, group: fusing._bind_fused(group) if fusing._takes(group.steps[0])
        else super(FusingStream, self)._bind(group),
    )  # fmt: skip
    assert_right_where_accepted(Always(), cases)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_groups_agree_with_single_steps(uncompiled, device, dtype):
    """Values inside of a group, results that others need, repeated rows, and results in place of sources."""
    x, row = ow.input("x", (4, 6), dtype), ow.input("row", (6,), dtype)
    a = ow.tanh(x * row)
    b = ow.exp(a) - x
    c = ow.sum(b, axis=1, keepdims=True)
    d = ow.maximum(b / c, a) + ow.sigmoid(row)
    feeds = {
        n: np.random.default_rng(0).normal(size=t.shape).astype(t.dtype.numpy) for n, t in (("x", x), ("row", row))
    }
    with ow.Scheduler(device) as scheduler:
        expected = results(scheduler.build([a, d]), **feeds)
    for opened in (device, SeparateCpuDevice()):
        with opened.open(compile=True) as stream, ow.Scheduler(stream) as scheduler:
            program = scheduler.build([a, d])
            assert max(len(group) for group in program.memory_map().groups[0]) > 1
            for got, want in zip(results(program, **feeds), expected, strict=True):
                np.testing.assert_allclose(
                    got.astype(np.float64), want.astype(np.float64), rtol=2e-2 if dtype == "bf16" else 1e-6
                )
    assert uncompiled


def test_values_inside_of_a_group_take_no_memory(uncompiled, device):
    x = ow.input("x", (64, 64))
    y = ow.exp(ow.tanh(x) * x + x)
    with ow.Scheduler(device) as plain, device.open(compile=True) as stream, ow.Scheduler(stream) as fused:
        names = [next(iter(p.memory)) for p in (plain.build(y), fused.build(y))]
        uses = [s.build(y).memory[n].temporaries for s, n in zip((plain, fused), names, strict=True)]
    assert uses[1] <= uses[0]
    assert uses[1] == 2 * x.nbytes  # the input and the result


def test_equal_groups_are_compiled_once_and_each_form_has_a_code_of_its_own(uncompiled, device):
    with device.open(compile=True) as stream, ow.Scheduler(stream) as scheduler:
        for shape in ((3,), (5,)):
            x = ow.input("x", shape)
            scheduler.build(ow.exp(x) + x).run(x=np.ones(shape, np.float32))
        assert len(uncompiled) == 1
        y = ow.input("y", 3)
        scheduler.build(ow.tanh(y) + y).run(y=np.ones(3, np.float32))
    assert len({function.__code__ for function in uncompiled}) == len(uncompiled) == 2


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_a_compiled_group(device):
    x = ow.input("x", (8, 5))
    y = ow.gelu(x * 3 + x) - ow.exp(x)
    fed = np.linspace(-2, 2, 40, dtype=np.float32).reshape(8, 5)
    with ow.Scheduler("host") as scheduler:
        expected = scheduler.build(y).run(x=fed)
    with device.open(compile=True) as stream, ow.Scheduler(stream) as scheduler:
        program = scheduler.build(y)
        for _ in range(2):
            np.testing.assert_allclose(program.run(x=fed), expected, rtol=1e-5, atol=1e-5)
