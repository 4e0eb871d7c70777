"""Level 6 of the suite: a device that is right passes it, and a wrong kernel fails the gradients that use it."""

from __future__ import annotations

import numpy as np
import pytest

from opweave.contract import Step
from opweave.graph.opdef import OPS
from opweave.registry import Registry
from opweave_conformance.levels import CHECKS
from opweave_conformance.levels.gradients import cases_with_gradients, gradient_nodes, some
from opweave_conformance.suite import Suite
from tests.support.sound_device import SoundBackend, SoundDevice


def failed(*only: str) -> dict[str, str]:
    registry = Registry(environ={}, search=[])
    name = registry.register(SoundBackend).name
    suite = Suite(name, levels=[6], only=only, using=registry)
    results = [suite.perform(item) for item in suite.items]
    assert results
    return {r.name: r.reason for r in results if r.status == "failed"}


def test_every_operation_with_a_gradient_has_a_check():
    ids = {check.id for check in CHECKS if check.level == 6}
    differentiable = {op for op in cases_with_gradients() if any(gradient_nodes(c) for c in some(op))}
    assert {f"gradient-{op}" for op in differentiable} <= ids
    discrete = {"argmax", "argsort", "top_k", "count_equal", "arange", "full", "custom", "uniform", "normal"}
    discrete |= {"equal", "not_equal", "less", "less_equal", "quantize", "dequantize"}
    ours = {name for name, op in OPS.items() if op.family != "third-party" and not op.is_view}
    assert ours - differentiable <= discrete | {"floor", "ceil", "round", "trunc", "sign", "step"}


def test_the_sound_device_passes():
    assert failed() == {}


@pytest.mark.parametrize("op", ["sign", "index_add", "tanh", "rsqrt"])
def test_a_wrong_kernel_fails_the_gradients_that_use_it(monkeypatch, op):
    """The kernel is wrong by 1/50."""
    right = SoundDevice.run_step

    def wrong(self: SoundDevice, step: Step) -> None:
        right(self, step)
        if step.op == op:
            view = self.view(step.out)
            view *= np.float32(1.02)

    monkeypatch.setattr(SoundDevice, "run_step", wrong)
    using = {
        each
        for each in cases_with_gradients()
        for case in some(each)
        if op in [node.op.name for node in gradient_nodes(case) if node.op is not None]
    }
    found = failed()
    assert found
    assert {name.removeprefix("gradient-") for name in found} <= using
    assert len(found) >= 0.5 * len(using)


FEW = ("gradient-linear", "gradient-conv2d", "gradient-attention", "gradient-softmax", "gradient-max_pool2d")


@pytest.mark.parametrize(("name", "only"), [("cpu", ()), ("torch:cpu", FEW), ("ort:cpu", FEW), ("opencl:0", FEW)])
def test_our_backends_pass(name, only):
    suite = Suite(name, levels=[6], only=only)
    results = [suite.perform(item) for item in suite.items]
    assert [(r.name, r.reason) for r in results if r.status == "failed"] == []
    assert sum(r.status == "passed" for r in results) >= (len(only) or 90)


def test_a_wrong_kernel_of_the_gradient_of_attention_is_found(monkeypatch):
    """It makes the last element of each group zero, which belongs to the gradient of the values."""
    right = SoundDevice.run_step

    def wrong(self: SoundDevice, step: Step) -> None:
        right(self, step)
        if step.op == "attention_backward":
            self.view(step.out)[..., -1] = 0

    monkeypatch.setattr(SoundDevice, "run_step", wrong)
    assert set(failed("gradient-attention", "gradient-attention_backward")) == {"gradient-attention"}
