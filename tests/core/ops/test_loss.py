"""Losses and their gradients, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import opweave as ow
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(9)


def loss_and_gradient(build, x, dtype="f64"):
    leaf = ow.input("x", x.shape, dtype)
    loss = build(leaf)
    known: dict = {}
    values = {leaf: x.astype(leaf.dtype.numpy)}
    return evaluate(loss, values, known), evaluate(ow.gradients(ow.sum(loss), leaf), values, known)


def agree(ours, theirs, x):
    tensor = torch.tensor(x, requires_grad=True)
    want = theirs(tensor)
    want.sum().backward()
    got, gradient = loss_and_gradient(ours, x)
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-12, atol=1e-14)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-9, atol=1e-14)


LOGITS = RNG.standard_normal((4, 6, 5)) * 3
LABELS = RNG.integers(0, 5, (4, 6))
LABELS[1, 2] = LABELS[3, 0] = -100


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_cross_entropy_of_labels(reduction, smoothing, dtype):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    target = torch.tensor(LABELS)
    agree(
        lambda x: ow.cross_entropy(x, ow.constant(LABELS, dtype), **options),
        lambda x: functional.cross_entropy(x.movedim(-1, 1), target, **options),
        LOGITS,
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_distributions(reduction, smoothing):
    shares = RNG.dirichlet(np.ones(5), (4, 6))
    options = {"reduction": reduction, "label_smoothing": smoothing}
    agree(
        lambda x: ow.cross_entropy(x, ow.constant(shares), **options),
        lambda x: functional.cross_entropy(x.movedim(-1, 1), torch.tensor(shares).movedim(-1, 1), **options),
        LOGITS,
    )


def test_classes_may_lie_along_any_axis_and_another_label_be_ignored():
    labels = RNG.integers(0, 6, (4, 5))
    agree(
        lambda x: ow.cross_entropy(x, ow.constant(labels), axis=1, ignore_index=2),
        lambda x: functional.cross_entropy(x, torch.tensor(labels), ignore_index=2),
        LOGITS,
    )


def test_large_logits_neither_overflow_nor_vanish():
    x = np.array([[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]])
    labels = np.array([0, 0])
    agree(
        lambda x: ow.cross_entropy(x, ow.constant(labels), reduction="none"),
        lambda x: functional.cross_entropy(x, torch.tensor(labels), reduction="none"),
        x,
    )


def test_the_mean_of_no_labels_is_nan():
    got, _ = loss_and_gradient(lambda x: ow.cross_entropy(x, ow.constant([-100, -100])), np.zeros((2, 3)))
    assert np.isnan(got)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_are_computed_in_f32(dtype):
    x = RNG.standard_normal((64, 1000)).astype(ow.as_dtype(dtype).numpy)
    labels = RNG.integers(0, 1000, 64)
    leaf = ow.input("x", x.shape, dtype)
    loss = ow.cross_entropy(leaf, ow.constant(labels))
    assert loss.dtype.name == "f32"
    want = functional.cross_entropy(torch.tensor(x.astype(np.float64)), torch.tensor(labels)).item()
    assert evaluate(loss, {leaf: x}) == pytest.approx(want, rel=1e-6)
    assert ow.gradients(loss, leaf).dtype.name == dtype


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_mean_squared_error(reduction):
    target = RNG.standard_normal((4, 6, 5))
    agree(
        lambda x: ow.mse_loss(x, ow.constant(target), reduction),
        lambda x: functional.mse_loss(x, torch.tensor(target), reduction=reduction),
        LOGITS,
    )


@pytest.mark.parametrize("device", ["cpu", "opencl", "torch:cpu"])
def test_devices_agree(device):
    x, labels = ow.input("x", (4, 6, 5)), ow.input("labels", (4, 6), "i32")
    loss = ow.cross_entropy(x, labels, label_smoothing=0.1)
    with ow.Scheduler([device, "host"]) as scheduler:
        program = scheduler.build([loss, ow.gradients(loss, x)])
        got, gradient = program.run(x=LOGITS.astype(np.float32), labels=LABELS.astype(np.int32))
    tensor = torch.tensor(LOGITS, requires_grad=True)
    want = functional.cross_entropy(tensor.movedim(-1, 1), torch.tensor(LABELS), label_smoothing=0.1)
    want.backward()
    assert got == pytest.approx(want.item(), rel=1e-5)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-6)


def test_what_does_not_fit_is_refused():
    x = ow.input("x", (4, 5))
    for target in (ow.input("t", (4, 4)), ow.input("t", (5,), "i32"), ow.input("t", (4, 5), "i32")):
        with pytest.raises(ow.ShapeError, match="labels of shape"):
            ow.cross_entropy(x, target)
    with pytest.raises(ow.DTypeError, match="i32 or i64"):
        ow.cross_entropy(x, ow.input("t", (4,), "u8"))
    with pytest.raises(ow.DTypeError, match="between 0 and 1"):
        ow.cross_entropy(x, ow.input("t", (4,), "i32"), label_smoothing=2)
    with pytest.raises(ow.UnknownNameError, match="average"):
        ow.mse_loss(x, x, "average")  # type: ignore[arg-type]
    with pytest.raises(ow.ShapeError):
        ow.mse_loss(x, ow.input("t", (3, 5)))
