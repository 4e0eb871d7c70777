"""Optimizers step by step against torch's, clipping, f32 copies of half parameters, and the scale of the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import opweave as ow
from opweave_training import SGD, AdamW, LossScale, clip_by_norm

RNG = np.random.default_rng(21)
SHAPES = {"w": (4, 3), "b": (4,), "s": ()}
STEPS = 7

CASES = {
    "sgd": (lambda p: SGD(p), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (lambda p: SGD(p, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        lambda p: SGD(p, 0.9, True, 0.05),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    ),
    "adamw": (lambda p: AdamW(p), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "adamw with options": (
        lambda p: AdamW(p, (0.5, 0.9), 1e-3, 0.2),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.2),
    ),
    "adamw without decay": (
        lambda p: AdamW(p, (0.0, 0.9), weight_decay=0.0),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.0, 0.9), weight_decay=0.0),
    ),
}


def states(dtype="f32"):
    made = {name: ow.state(name, shape, dtype) for name, shape in SHAPES.items()}
    for tensor in made.values():
        ow.write(tensor, RNG.standard_normal(tensor.shape))
    return made


def feeds(dtype="f32"):
    return {
        f"g.{name}": np.asarray(RNG.standard_normal(shape)).astype(ow.as_dtype(dtype).numpy)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_torchs(name, device, dtype):
    params = states(dtype)
    twins = [torch.tensor(ow.read(p).astype(np.float64), requires_grad=True) for p in params.values()]
    ours, theirs = CASES[name][0](params), CASES[name][1](twins)
    grads = {n: ow.input(f"g.{n}", s, dtype) for n, s in SHAPES.items()}
    with ow.Scheduler([device, "host"]) as scheduler:
        program = scheduler.build(ours.step(grads, ow.input("lr", (), "f64")))
        for _ in range(STEPS):
            given = feeds(dtype)
            program.run({**given, "lr": 0.1})
            for twin, grad in zip(twins, given.values(), strict=True):
                twin.grad = torch.tensor(np.asarray(grad, np.float64))
            theirs.step()
    limit = 1e-5 if dtype == "f32" else 1e-11
    for param, twin in zip(params.values(), twins, strict=True):
        np.testing.assert_allclose(ow.read(param), twin.detach().numpy(), rtol=limit, atol=limit)


def test_a_step_without_leave_changes_nothing():
    params = states()
    optimizer = AdamW(params)
    grads = {n: ow.input(f"g.{n}", s) for n, s in SHAPES.items()}
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(optimizer.step(grads, 0.1, ow.input("when", (), "bool")))
        everything = {**params, **optimizer.states}
        program.run({**feeds(), "when": True})
        before = {n: ow.read(s) for n, s in everything.items()}
        program.run({**feeds(), "when": False})
        assert all(np.array_equal(ow.read(s), before[n]) for n, s in everything.items())
        program.run({**feeds(), "when": True})
        assert not any(np.array_equal(ow.read(s), before[n]) for n, s in everything.items())


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_parameters_follow_a_copy_in_f32(dtype):
    """Steps that each are less than the distance of neighbours at 1 add up."""
    param = ow.state("w", (2,), dtype, fill=1)
    optimizer = SGD({"w": param})
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(optimizer.step({"w": ow.input("g", (2,), dtype)}, 2.0**-14))
        for _ in range(256):
            program.run(g=[1.0, 1.0])
    assert ow.read(optimizer.states["w.master"]).tolist() == [1 - 2.0**-6] * 2
    assert ow.read(param).astype(np.float64).tolist() == [1 - 2.0**-6] * 2


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_torchs(limit):
    grads = {n: ow.input(n, s) for n, s in SHAPES.items()}
    arrays = {n: RNG.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    clipped, norm = clip_by_norm(grads, limit)
    with ow.Scheduler("cpu") as scheduler:
        got = scheduler.build({**clipped, "norm": norm}).run(arrays)
    twins = []
    for array in arrays.values():
        twins.append(torch.zeros(array.shape, requires_grad=True))
        twins[-1].grad = torch.tensor(np.asarray(array))
    want = torch.nn.utils.clip_grad_norm_(twins, limit)
    assert got["norm"] == pytest.approx(want.item(), rel=1e-6)
    for name, twin in zip(SHAPES, twins, strict=True):
        assert twin.grad is not None
        np.testing.assert_allclose(got[name], twin.grad.numpy(), rtol=1e-5)


def test_the_scale_of_the_loss_saves_small_gradients_and_leaves_out_steps_that_overflow():
    w = ow.state("w", (1,), "f16", fill=1)
    x = ow.input("x", (1,), "f16")
    scaling = LossScale(1024.0, interval=3)
    optimizer = SGD({"w": w})
    loss = ow.sum(w * x).astype("f32")
    grads, finite = scaling.unscaled(ow.gradients(loss, {"w": w}, scaling.scale))
    outputs = {**optimizer.step(grads, 1.0, finite), **scaling.update(finite), "finite": finite}
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(outputs)
        seen = []
        for value in (2.0**-14, 2.0**-14, 1e4, 2.0**-14, 2.0**-14, 2.0**-14, 2.0**-14):
            got = program.run(x=np.array([value], np.float16))
            seen.append((bool(got["finite"]), float(ow.read(scaling.scale))))
    assert seen == [(True, 1024), (True, 1024), (False, 512), (True, 512), (True, 512), (True, 1024), (True, 1024)]
    assert ow.read(optimizer.states["w.master"]).tolist() == [1 - 6 * 2.0**-14]


def test_what_does_not_fit_is_refused():
    w = ow.state("w", (2,))
    for wrong in (ow.input("w", (2,)), np.zeros(2)):
        with pytest.raises(ow.SchedulerError, match="states"):
            SGD({"w": wrong})  # type: ignore[dict-item]
    with pytest.raises(ow.DTypeError, match="float type"):
        SGD({"w": ow.state("n", (2,), "i32")})
    with pytest.raises(ow.DTypeError, match="nesterov"):
        SGD({"w": w}, nesterov=True)
    with pytest.raises(ow.DTypeError, match="momentum"):
        SGD({"w": w}, momentum=1.0)
    with pytest.raises(ow.DTypeError, match="beta"):
        AdamW({"w": w}, betas=(0.9, -1.0))
    with pytest.raises(ow.SchedulerError, match="gradients for"):
        SGD({"w": w}).step({"v": ow.input("v", (2,))}, 0.1)
    with pytest.raises(ow.DTypeError, match="positive"):
        clip_by_norm({"w": ow.input("g", (2,))}, 0.0)
    with pytest.raises(ow.DTypeError, match="positive"):
        LossScale(0.0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_decays_and_scales_are_finite_numbers_of_at_least_0(wrong):
    for make in (
        lambda: AdamW(states(), weight_decay=wrong), lambda: AdamW(states(), eps=wrong),
        lambda: SGD(states(), weight_decay=wrong), lambda: LossScale(wrong),
    ):  # fmt: skip
        with pytest.raises(ow.DTypeError, match="finite"):
            make()


def test_parameters_are_not_named_like_states_of_the_optimizer():
    """Checkpoints would hold only one of them."""
    made = states()
    for name in ("w.first_moment", "optimizer.steps"):
        with pytest.raises(ow.SchedulerError, match=name):
            AdamW({"w": made["w"], name: made["b"]})


def test_a_loss_scale_stays_finite():
    scaling = LossScale(2.0**118, interval=1)
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(scaling.update(ow.input("finite", (), "bool")))
        for _ in range(12):
            program.run(finite=np.array(True))
        assert np.isfinite(ow.read(scaling.scale))


# --- options that are functions of the step -------------------------------------------------------------------------


def falling(first, last):
    return lambda step: last + (first - last) * 0.5**step


SCHEDULED = {
    "adamw": (
        lambda p: AdamW(p, (falling(0.5, 0.95), falling(0.9, 0.9995)), falling(1e-3, 1e-8), falling(0.1, 0.0)),
        lambda p: torch.optim.AdamW(p, 1.0),
        lambda i: {"betas": (falling(0.5, 0.95)(i), falling(0.9, 0.9995)(i)), "eps": falling(1e-3, 1e-8)(i),
                   "weight_decay": falling(0.1, 0.0)(i)},
    ),
    "adamw from 0": (
        lambda p: AdamW(p, (lambda i: 0.0 if i < 2 else 0.9, 0.999), 1e-8, 0.01),
        lambda p: torch.optim.AdamW(p, 1.0, weight_decay=0.01),
        lambda i: {"betas": (0.0 if i < 2 else 0.9, 0.999)},
    ),
    "sgd": (
        lambda p: SGD(p, falling(0.5, 0.9), True, falling(0.1, 0.0)),
        lambda p: torch.optim.SGD(p, 1.0, momentum=0.5, nesterov=True),
        lambda i: {"momentum": falling(0.5, 0.9)(i), "weight_decay": falling(0.1, 0.0)(i)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "torch:cpu", "opencl", "host"])
@pytest.mark.parametrize("kind", SCHEDULED)
def test_scheduled_options_are_torchs(kind, device, dtype):
    """With a learning rate that f32 does not hold: f64 training takes it in f64."""
    if device == "opencl":
        from tests.support.opencl import DEVICES

        if not DEVICES:
            pytest.skip("no OpenCL driver works here")
        device = DEVICES[0]
    ours, theirs, at = SCHEDULED[kind]
    rng = np.random.default_rng(5)
    first, grads = rng.standard_normal((3, 5)), rng.standard_normal((6, 3, 5))
    w = ow.state("w", (3, 5), dtype)
    ow.write(w, first)
    optimizer = ours({"w": w})
    first = ow.read(w).astype(np.float64)
    grad, rate = ow.input("grad", (3, 5), dtype), ow.input("rate", (), optimizer.rate_dtype)
    assert optimizer.rate_dtype.name == ("f64" if dtype == "f64" else "f32")
    want = torch.tensor(first, requires_grad=True)
    reference = theirs([want])
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(list(optimizer.step({"w": grad}, rate).values()))
        for i, g in enumerate(grads):
            g = g.astype(grad.dtype.numpy)
            program.run({"grad": g, "rate": np.asarray(0.1, rate.dtype.numpy), **optimizer.feeds(i)})
            want.grad = torch.tensor(g.astype(np.float64))
            reference.param_groups[0].update(lr=0.1, **at(i))
            reference.step()
    got = ow.read(w).astype(np.float64)
    atol = {"f64": 1e-14, "f32": 2e-6, "f16": 2e-3, "bf16": 2e-2}[dtype]
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=0, atol=atol)


def test_scheduled_options_are_fed_by_the_trainer_and_known_to_checkpoints(tmp_path):
    from opweave_training import Trainer
    from tests.support.small_training import DATA, network, parameters

    def made(decay):
        params = parameters("f64")
        optimizer = AdamW(params, weight_decay=decay)
        return Trainer(lambda x: network(x.astype("f64"), params), optimizer, 0.1, batch=24)

    def end(decay):
        with made(decay) as trainer:
            trainer.run_epoch(DATA)
            trainer.save(tmp_path / "c.safetensors", DATA)
            return ow.read(trainer._optimizer.params["w0"])

    assert np.array_equal(end(0.25), end(lambda step: 0.25))
    assert not np.array_equal(end(0.25), end(lambda step: 0.25 * (step + 1)))
    with made(lambda step: 0.25 * (step + 1)) as same, made(lambda step: 0.5 * (step + 1)) as other:
        same.load(tmp_path / "c.safetensors", DATA)
        with pytest.raises(ow.CheckpointError):
            other.load(tmp_path / "c.safetensors", DATA)


def test_scheduled_options_are_checked():
    w = ow.state("w", (2,), "f32")
    for options in ({"betas": (lambda i: 1.0, 0.9)}, {"eps": lambda i: -1.0}, {"weight_decay": lambda i: "much"}):
        with pytest.raises(ow.DTypeError):
            AdamW({"w": w}, **options)
    late = AdamW({"w": w}, (lambda i: 0.9 if i < 50_000 else 1.0, 0.9))
    with pytest.raises(ow.DTypeError, match="beta"):
        late.feeds(60_000)
