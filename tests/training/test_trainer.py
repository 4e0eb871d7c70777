"""The loop: data sets, schedules, loss curves against torch, accumulation, resuming from checkpoints, early stop."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import opweave as ow
import opweave_cost
import opweave_training as training
from opweave_training import SGD, Dataset, LossScale, Trainer
from tests.support.small_training import DATA, FIRST, X, Y, parameters, trainer

RNG = np.random.default_rng(7)
ROOT = Path(__file__).parents[2]


def values(made):
    return {name: ow.read(tensor) for name, tensor in made._states.items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# --- data sets ------------------------------------------------------------------------------------------------------


def test_batches_are_the_examples_in_the_order_of_seed_and_epoch():
    data = Dataset(DATA)
    order = data.order(5, 0)
    assert sorted(order) == list(range(96))
    assert np.array_equal(order, Dataset(DATA).order(5, 0))
    assert not np.array_equal(order, data.order(5, 1))
    assert not np.array_equal(order, data.order(6, 0))
    batches = list(data.batches(10, order))
    assert [len(b["x"]) for b in batches] == [10] * 9
    assert np.array_equal(np.concatenate([b["x"] for b in batches]), X[order[:90]])
    assert len(list(data.batches(10, keep_rest=True))[-1]["x"]) == 6
    assert np.array_equal(next(iter(data.batches(10, order, 3)))["labels"], Y[order[30:40]])


def test_shards_are_one_data_set():
    shards = [{"x": X[:50], "labels": Y[:50]}, {"x": X[50:51], "labels": Y[50:51]}, {"x": X[51:], "labels": Y[51:]}]
    ids = RNG.permutation(96)[:40]
    got = Dataset(shards).take(ids)
    assert np.array_equal(got["x"], X[ids])
    assert np.array_equal(got["labels"], Y[ids])


def test_mapped_files_stay_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = Dataset({"x": mapped})
    assert isinstance(data._shards[0]["x"], np.memmap)
    assert np.array_equal(next(iter(data.batches(4)))["x"], X[:4])


def test_a_mapped_file_that_became_shorter_is_an_error(tmp_path):
    """Reading behind its end would end the process."""
    path = tmp_path / "x.npy"
    np.save(path, X)
    data = Dataset({"x": np.load(path, mmap_mode="r")})
    os.truncate(path, 200)
    with pytest.raises(ow.FormatError, match=r"x\.npy had .* bytes"):
        data.take(np.arange(3))


def test_a_thread_that_takes_batches_ends_with_the_caller():
    for batch in islice(Dataset(DATA).batches(4), 2):
        assert len(batch["x"]) == 4


NO_DATA = [{}, [], {"x": X, "y": Y[:5]}, {"x": np.float32(1)}, {"x": X[:0]}, [{"x": X}, {"x": Y}], 5, [X]]


@pytest.mark.parametrize("arrays", NO_DATA, ids=range(8))
def test_arrays_that_are_no_data_set_are_refused(arrays):
    with pytest.raises(ow.ShapeError):
        Dataset(arrays)


# --- schedules ------------------------------------------------------------------------------------------------------


def test_schedules():
    cosine = training.cosine(1.0, 12, warmup=2, final=0.2)
    assert [round(cosine(i), 4) for i in (0, 1, 2, 7, 12, 99)] == [0.3333, 0.6667, 1.0, 0.6, 0.2, 0.2]
    linear = training.linear(1.0, 10)
    assert [linear(i) for i in (0, 5, 10, 11)] == [1.0, 0.5, 0.0, 0.0]
    steps = training.steps(1.0, 3, 0.5)
    assert [steps(i) for i in (0, 2, 3, 6)] == [1.0, 1.0, 0.5, 0.25]
    with pytest.raises(ow.DTypeError):
        training.cosine(1.0, 5, warmup=5)
    for wrong in (float("nan"), float("inf"), -0.1):
        for schedule in (training.cosine, training.linear, training.steps):
            with pytest.raises(ow.DTypeError, match="finite"):
                schedule(wrong, 5)
        with pytest.raises(ow.DTypeError, match="finite"):
            training.linear(0.1, 5, final=wrong)
    with pytest.raises(ow.DTypeError):
        training.cosine("0.1", 5)  # type: ignore[arg-type]
    with pytest.raises(ow.DTypeError):
        training.steps(0.1, 2.5)  # type: ignore[arg-type]


def test_rates_that_rise_from_0_are_0_while_they_warm_up():
    for schedule in (training.cosine, training.linear):
        assert [schedule(0.0, 20, 4, final=1.0)(i) for i in range(5)] == [0.0] * 5


# --- training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchs_losses():
    """Of 200 steps of 8 examples, by torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weights = [torch.tensor(a, requires_grad=True) for a in FIRST.values()]
    optimizer = torch.optim.AdamW(weights, lr=0.02)
    rate, data = training.cosine(0.02, 200), Dataset(DATA)
    losses: list[float] = []
    for epoch in range(17):
        for batch in data.batches(8, data.order(0, epoch)):
            w0, b0, w1, b1 = weights
            x, labels = torch.tensor(batch["x"]), torch.tensor(batch["labels"]).long()
            loss = functional.cross_entropy(functional.linear(torch.relu(functional.linear(x, w0, b0)), w1, b1), labels)
            optimizer.param_groups[0]["lr"] = rate(len(losses))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.set_num_threads(threads)
    return losses[:200]


@pytest.mark.parametrize("device", ["cpu", "torch:cpu", "opencl"])
def test_the_losses_of_200_steps_are_torchs(device, torchs_losses):
    losses: list[float] = []
    with trainer(lr=training.cosine(0.02, 200), devices=[device, "host"], batch=8) as made:
        program = made._program
        made._program = lambda kind, *given: _Listening(program(kind, *given), losses)
        while made.steps < 200:
            made.run_epoch(DATA)
    np.testing.assert_allclose(losses[:200], torchs_losses, rtol=1e-3)
    assert torchs_losses[199] < 0.3 * torchs_losses[0]


class _Listening:
    """A program that notes the losses of its runs."""

    def __init__(self, program, losses):
        self._program, self._losses = program, losses
        self.inputs = program.inputs

    def run(self, feeds):
        found = self._program.run(feeds)
        self._losses.append(float(found["loss"]))
        return found


def test_metrics_are_those_of_all_examples():
    with trainer(batch=20) as made:
        got = made.evaluate(DATA)
        assert made.steps == 0
    w0, b0, w1, b1 = [torch.tensor(a) for a in FIRST.values()]
    scores = functional.linear(torch.relu(functional.linear(torch.tensor(X), w0, b0)), w1, b1)
    each = functional.cross_entropy(scores, torch.tensor(Y).long(), reduction="none").numpy()
    share = float((scores.argmax(1).numpy() == Y).mean())
    assert got.examples == 96
    assert got.loss == pytest.approx(each.mean(), rel=1e-6)
    assert got.accuracy == pytest.approx(share)
    assert got.accuracy_uncertainty == pytest.approx((share * (1 - share) / 95) ** 0.5)
    means = np.array([each[i : i + 20].mean() for i in range(0, 96, 20)])
    spread = np.average((means - each.mean()) ** 2, weights=[20, 20, 20, 20, 16])
    assert got.loss_uncertainty == pytest.approx((spread / 4) ** 0.5, rel=1e-4)


def test_predictions_are_those_of_all_examples_in_their_order():
    w0, b0, w1, b1 = [torch.tensor(a) for a in FIRST.values()]
    want = functional.linear(torch.relu(functional.linear(torch.tensor(X), w0, b0)), w1, b1).numpy()
    with trainer(batch=20) as made:
        np.testing.assert_allclose(made.predict(DATA), want, rtol=1e-5, atol=1e-6)
        # Kernels for few rows may add in another order than those for many.
        np.testing.assert_allclose(made.predict({"x": X[:7]}), made.predict(DATA)[:7], rtol=1e-5, atol=1e-6)


def test_each_label_of_an_example_counts():
    """A model that predicts a label for each of several places."""
    x = RNG.standard_normal((12, 5, 3)).astype(np.float32)
    labels = RNG.integers(0, 3, (12, 5)).astype(np.int32)
    scale = ow.state("scale", (3,), fill=1)
    with Trainer(lambda x: x * scale, SGD({"scale": scale}), 0.1, batch=4, devices="cpu") as made:
        found = made.evaluate({"x": x, "labels": labels})
        assert found.accuracy == pytest.approx((x.argmax(-1) == labels).mean())
        assert found.examples == 12
        made.run_epoch({"x": x, "labels": labels})


def test_several_physical_batches_are_one_logical_batch():
    ends = []
    for batch, parts in ((24, 1), (8, 3), (4, 6)):
        with trainer(batch=batch, accumulate=parts, clip_norm=0.5) as made:
            made.run_epoch(DATA)
            made.run_epoch(DATA)
            assert made.steps == 8
            ends.append({name: ow.read(p) for name, p in made._optimizer.params.items()})
    for other in ends[1:]:
        for name in FIRST:
            np.testing.assert_allclose(ends[0][name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_learn_with_a_scale_of_the_loss(dtype):
    with trainer(dtype=dtype, loss_scale=LossScale(2.0**24), lr=0.02, accumulate=2) as made:
        before = made.evaluate(DATA).loss
        rows = made.fit(DATA, 12)
        assert rows[-1].train.loss < 0.6 * before
        assert made._optimizer.params["w0"].dtype.name == dtype
        assert np.all(np.isfinite(ow.read(made._optimizer.states["w0.master"])))


def test_nothing_is_allocated_after_the_first_step():
    with trainer() as made:
        batches = Dataset(DATA).batches(8)
        made._train([next(batches)], 8, True, 0.0)()
        with opweave_cost.trace() as timeline:
            for batch in batches:
                made._train([batch], 8, True, 0.0)()
    kinds = {event.kind for event in timeline.events}
    assert "plan" in kinds
    assert not kinds & {"alloc", "build"}


def test_parameters_are_updated_from_the_last_layer_to_the_first():
    """Each gradient is used, and its memory free, before the next one is there."""
    with trainer() as made:
        program = made._program("step", [next(Dataset(DATA).batches(8))], 8)
        written = [node.memory.name for node in program.partition.graph.nodes if node.op.writes]
    first = [written.index(name) for name in ("w1", "w0")]
    assert first == sorted(first)
    assert written.index("w1") < written.index("w0.first_moment")


def test_a_training_is_split_over_two_devices():
    params = parameters()

    def model(x):
        return ow.linear(ow.relu(ow.linear(x, params["w0"], params["b0"])).named("hidden"), params["w1"], params["b1"])

    for name, device in (("w0", "cpu"), ("b0", "cpu"), ("w1", "opencl"), ("b1", "opencl")):
        params[name] = ow.state(name, FIRST[name].shape, device=device)
        ow.write(params[name], FIRST[name])
    with Trainer(model, SGD(params, 0.9), 0.05, batch=16, devices=["opencl", "cpu"]) as split:
        split.run_epoch(DATA)
        program = split._program("step", [next(iter(Dataset(DATA).batches(16)))], 16)
        assert {device.partition(":")[0] for device, _ in program.explain().splits} == {"cpu", "opencl"}
    with trainer(lambda p: SGD(p, 0.9), 0.05, batch=16) as alone:
        alone.run_epoch(DATA)
    for name, param in alone._optimizer.params.items():
        np.testing.assert_allclose(ow.read(params[name]), ow.read(param), rtol=1e-4, atol=1e-5)


# --- fit ------------------------------------------------------------------------------------------------------------


def test_fit_notes_epochs_and_ends_when_a_callback_says_so():
    seen = []
    with trainer() as made:
        rows = made.fit(DATA, 10, DATA, callbacks=[lambda t, row: seen.append(row), lambda t, row: row.epoch == 2])
    assert [row.epoch for row in rows] == [0, 1, 2]
    assert seen == rows
    assert rows[2].validation is not None
    assert rows[2].validation.loss < rows[0].train.loss
    page = training.curves(rows)
    assert page.count("<polyline") == 5
    assert "<script" not in page


def test_curves_have_gaps_where_there_is_no_number_and_dots_between_gaps():
    nan = float("nan")

    def found(loss):
        return training.Metrics(8, loss, nan, nan, nan, 0.1)

    def epoch(i, loss, held):
        return training.Epoch(i, found(loss), None if held is None else found(held), 0.01)

    page = training.curves([epoch(0, 2.0, None)])
    assert '<polyline points="0.0,200.0 0.0,200.0"' in page
    rows = [(4.0, None), (nan, 3.0), (2.0, 1.0), (0.0, None)]
    page = training.curves([epoch(i, *row) for i, row in enumerate(rows)])
    lines = [line.partition('points="')[2].partition('"')[0] for line in page.splitlines() if "<polyline" in line]
    assert lines[:3] == ["0.0,0.0 0.0,0.0", "480.0,100.0 720.0,200.0", "240.0,50.0 480.0,150.0"]
    assert len(lines) == 4  # that of the rate, none of accuracies
    assert "validation: 1<" in page


def test_a_model_need_not_use_what_it_is_called_with():
    params = {name: param for name, param in parameters().items() if name in ("w0", "w1")}

    def model(x, note, step):
        hidden = ow.relu(ow.linear(x, params["w0"]))
        return ow.linear(hidden * 0.5 if step is None else hidden, params["w1"])

    data = {**DATA, "note": np.zeros(len(X), np.int64)}
    with Trainer(model, SGD(params), 0.1, devices="cpu") as made:
        made.run_epoch(data)
        assert made.evaluate(data).examples == len(X)
        assert made.predict(data).shape == (len(X), 3)


def test_fit_ends_when_the_loss_no_longer_falls():
    with trainer(lr=lambda step: 0.01 if step < 24 else -0.01) as made:
        rows = made.fit(DATA, 50, patience=2)
    best = min(range(len(rows)), key=lambda i: rows[i].train.loss)
    assert len(rows) == best + 3 < 50


def test_losses_that_are_no_numbers_count_as_the_worst(monkeypatch):
    """Of the losses NaN, 3, 2, 2, 2 the third is the first best one."""
    losses = iter([float("nan"), 3.0, 2.0, 2.0, 2.0, 1.0])
    with trainer() as made:
        monkeypatch.setattr(made, "run_epoch", lambda *_: training.Metrics(1, next(losses), 0.0, 0.0, 0.0, 0.0))
        with pytest.warns(ow.OpweaveWarning, match="nan"):
            rows = made.fit(DATA, 6, patience=2)
        assert len(rows) == 5


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, "0.1"])
def test_a_learning_rate_is_checked_before_anything_is_built(rate):
    with pytest.raises(ow.DTypeError, match="learning rate"):
        trainer(lr=rate)


def test_a_schedule_that_gives_no_number_ends_before_the_step():
    with trainer(lr=lambda step: 0.01 if step < 2 else float("nan")) as made:
        with pytest.raises(ow.DTypeError, match="step 2 "):
            made.run_epoch(DATA)
        assert made.steps == 2
        assert all(np.isfinite(ow.read(param)).all() for param in made._optimizer.params.values())


@pytest.mark.parametrize("options", [
    {"seed": -1}, {"seed": 1.5}, {"batch": 2.5}, {"batch": True}, {"accumulate": 1.5}, {"snapshot_every": 2.5},
])  # fmt: skip
def test_options_that_are_no_numbers_of_their_kind_are_refused(options):
    (name,) = options
    with pytest.raises(ow.SchedulerError, match=name):
        trainer(**options)


@pytest.mark.parametrize("options", [
    {"epochs": 1.5}, {"epochs": "3"}, {"epochs": -1}, {"epochs": True}, {"patience": 0}, {"patience": "2"},
    {"checkpoint": "c", "every": 0}, {"every": 2}, {"callbacks": [3]}, {"callbacks": print},
], ids=str)  # fmt: skip
def test_fit_refuses_what_is_no_number_or_function_before_the_first_step(options):
    with trainer() as made:
        with pytest.raises(ow.SchedulerError, match=list(options)[-1]):
            made.fit(DATA, **{"epochs": 1, **options})
        assert made.steps == 0
        assert len(made.fit(DATA, np.int64(1))) == 1


def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    with trainer() as made:
        for path in (tmp_path / "missing" / "run", tmp_path):
            with pytest.raises(ow.CheckpointError, match="cannot be written"):
                made.fit(DATA, 1, checkpoint=path)
        assert made.steps == 0


def test_a_loss_that_is_no_number_is_named_once():
    with trainer() as made:
        made.fit(DATA, 1)
        with pytest.warns(ow.OpweaveWarning, match="the loss of epoch 1 is nan") as told:
            made.fit({"x": X * np.float32(np.nan), "labels": Y}, 3)
    assert len(told) == 1


def test_a_progress_bar_goes_to_standard_error(capfd):
    with trainer() as made:
        made.fit(DATA, 2, progress=True)
    out, err = capfd.readouterr()
    assert "loss" in err
    assert not out


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    with trainer() as made:
        with pytest.raises(ow.SchedulerError, match="no 'labels', but x"):
            made.run_epoch({"x": X})
        with pytest.raises(ow.SchedulerError, match="8 examples"):
            made.run_epoch({"x": X[:5], "labels": Y[:5]})
    with pytest.raises(ow.SchedulerError, match="batch is an integer"):
        trainer(batch=0)
    several = trainer(loss=lambda p, t: ow.cross_entropy(p, t, reduction="none"))
    with several, pytest.raises(ow.ShapeError, match="mean over the examples"):
        several.run_epoch(DATA)


# --- logical batches ------------------------------------------------------------------------------------------------


def torchs(logical, epochs=1, seed=0, reduction="mean", drop_last=False, rate=0.1, skip=(), shuffle=True):
    """The parameters after plain steps of torch, in f64, over the same examples."""
    params = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in FIRST.items()}
    x, y = torch.tensor(X, dtype=torch.float64), torch.tensor(Y, dtype=torch.long)
    for epoch in range(epochs):
        order = Dataset(DATA).order(seed, epoch, shuffle)
        for number, at in enumerate(range(0, len(order), logical)):
            ids = order[at : at + logical]
            if number in skip or (drop_last and len(ids) < logical):
                continue
            h = torch.relu(x[ids] @ params["w0"].T + params["b0"])
            logits = h @ params["w1"].T + params["b1"]
            loss = functional.cross_entropy(logits, y[ids], reduction=reduction)
            for p, g in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
                p.data -= rate * g
    return {n: p.detach().numpy() for n, p in params.items()}


def near_torch(made, want, dtype="f32"):
    for name, tensor in made._optimizer.params.items():
        np.testing.assert_allclose(ow.read(tensor), want[name], rtol=0, atol={"f64": 1e-13}.get(dtype, 2e-6))


SPLITS = [{"batch": 40}, {"batch": 20, "accumulate": 2}, {"batch": 7, "accumulate": 5}, {"batch": 96}, {"batch": 100}]


@pytest.mark.parametrize("options", SPLITS, ids=range(5))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_examples_are_a_step_of_their_own_mean_or_sum(options, reduction, drop_last):
    logical = options["batch"] * options.get("accumulate", 1)
    rate = 0.1 if reduction == "mean" else 0.002
    loss = lambda p, t: ow.cross_entropy(p, t, reduction=reduction)  # noqa: E731
    options = {"reduction": reduction, "loss": loss, "drop_last": drop_last, **options}
    with trainer(SGD, rate, "f64", **options) as made:
        if drop_last and logical > 96:
            with pytest.raises(ow.SchedulerError, match="a step takes 100 examples"):
                made.run_epoch(DATA)
            return
        for _ in range(2):
            found = made.run_epoch(DATA)
        want = torchs(logical, 2, 0, reduction, drop_last, rate)
        near_torch(made, want, "f64")
        assert made.steps == 2 * (96 // logical if drop_last else -(-96 // logical))
        assert found.examples == (96 // logical * logical if drop_last else 96)
        evaluated = made.evaluate(DATA)  # a mean over the examples, whatever the loss is
    with trainer(SGD, 0.1, "f64", batch=96) as other:
        for name, param in other._optimizer.params.items():
            ow.write(param, want[name])
        assert evaluated.loss == pytest.approx(other.evaluate(DATA).loss, rel=1e-12)


def test_replicas_share_what_is_left():
    def end(**where):
        with trainer(drop_last=False, batch=10, **where) as made:
            for _ in range(2):
                made.run_epoch(DATA)
            return values(made), made.steps

    want = end(devices="cpu", accumulate=4)
    assert want[1] == 6  # of 40, 40 and 16 examples
    for replicas, accumulate in ((4, 1), (2, 2)):
        got = end(devices=["cpu", "host"], replicas=["cpu"] * replicas, accumulate=accumulate)
        assert got[1] == want[1]
        params = FIRST.keys()
        assert same({n: got[0][n] for n in params}, {n: want[0][n] for n in params})


def test_a_training_goes_on_within_its_last_step(tmp_path):
    def run(stop):
        made = trainer(drop_last=False, batch=10, accumulate=4)
        with made:
            if stop is None:
                made.fit(DATA, 2)
            else:

                def save(t):
                    if t.steps == stop:
                        t.save(tmp_path / "c.safetensors", DATA)
                        raise KeyboardInterrupt

                with pytest.raises(KeyboardInterrupt):
                    made.run_epoch(DATA, save)
            return values(made)

    want = run(None)
    for stop in (2, 3):
        run(stop)
        with trainer(drop_last=False, batch=10, accumulate=4) as made:
            made.load(tmp_path / "c.safetensors", DATA)
            made.fit(DATA, 2)
            assert made.steps == 6
            assert same(values(made), want)
    with trainer(drop_last=True, batch=10, accumulate=4) as other, pytest.raises(ow.CheckpointError):
        other.load(tmp_path / "c.safetensors", DATA)


@pytest.mark.parametrize("device", ["cpu", "torch:cpu", "opencl"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_that_is_not_finite_is_left_out_where_asked_for(device, accumulate):
    names = available(device)
    broken = X.copy()
    order = Dataset(DATA).order(0, 0)
    broken[order[30]] = np.nan
    broken[order[60]] = np.inf
    data = {"x": broken, "labels": Y}
    options = {"batch": 24 // accumulate, "accumulate": accumulate, "devices": names}
    with trainer(SGD, 0.1, skip_nonfinite=True, **options) as made:
        made.run_epoch(data)
        near_torch(made, torchs(24, skip=(1, 2)))
        assert made.steps == 4
    with trainer(SGD, 0.1, **options) as made:
        made.run_epoch(data)
        assert np.isnan(ow.read(made._optimizer.params["w0"])).any()


def available(device):
    if device == "opencl":
        from tests.support.opencl import DEVICES

        if not DEVICES:
            pytest.skip("no OpenCL driver works here")
        return [DEVICES[0]]
    return [device]


@pytest.mark.parametrize("shuffle", [True, False, 50, 0, 500])
def test_the_first_examples_are_shuffled(shuffle):
    """ggml's ``ggml_opt_dataset_shuffle`` of the first n: a part for training in front, others behind it."""
    order = Dataset(DATA).order(0, 0, shuffle)
    n = {True: 96, False: 0}.get(shuffle, min(int(shuffle), 96)) if isinstance(shuffle, bool) else min(shuffle, 96)
    assert sorted(order[:n]) == list(range(n))
    assert list(order[n:]) == list(range(n, 96))
    assert n < 2 or list(order[:n]) != list(range(n))
    assert np.array_equal(Dataset(DATA).order(0, 0, 96), Dataset(DATA).order(0, 0))
    with trainer(SGD, 0.1, "f64", batch=32, shuffle=shuffle) as made:
        made.run_epoch(DATA)
        near_torch(made, torchs(32, shuffle=shuffle), "f64")


def test_other_reductions_and_orders_are_refused():
    for options in ({"reduction": "none"}, {"shuffle": -1}, {"shuffle": "yes"}):
        with pytest.raises(ow.SchedulerError):
            trainer(**options)
