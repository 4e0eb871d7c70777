"""Training over several devices: replicas, batches brought ahead of time, half types, and devices that are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.opdef import OPS
from opweave_opencl import OpenCLBackend
from opweave_training import SGD, AdamW, LossScale, Trainer
from tests.support.devices import Separate
from tests.support.small_training import DATA, FIRST, network, parameters, trainer


@pytest.fixture
def cpus(monkeypatch):
    """CPU devices with separate memories."""
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", "3")
    registry = ow.Registry()
    return [registry.device(f"cpu:{i}") for i in range(3)]


def ends(made):
    return {name: ow.read(tensor) for name, tensor in made._states.items() if "accumulated" not in name}


def same(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


# --- replicas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"accumulate": 2}, {"dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_replicas_equal_accumulated_batches_on_one_device(cpus, count, options):
    options = dict(options)
    parts = options.pop("accumulate", 1)
    if "dtype" in options:
        options["loss_scale"] = LossScale(1024.0)
    with trainer(devices=cpus[0], batch=8, accumulate=count * parts, **options) as alone:
        alone.fit(DATA, 3)
        want, rows = ends(alone), alone.history
    if "dtype" in options:
        options["loss_scale"] = LossScale(1024.0)
    with trainer(devices=cpus[:count], replicas=cpus[:count], batch=8, accumulate=parts, **options) as spread:
        spread.fit(DATA, 3)
        program = next(iter(spread._programs.values()))
        assert {device for device, _ in program.explain().splits} == {d.name for d in cpus[:count]}
        assert same(ends(spread), want)
        assert spread.steps == alone.steps
        assert [row.train.loss for row in spread.history] == [row.train.loss for row in rows]
        assert [row.train.accuracy for row in spread.history] == [row.train.accuracy for row in rows]


@pytest.mark.parametrize("device", ["opencl", "torch:cpu", "ort:cpu"])
def test_replicas_on_other_backends_equal_accumulated_batches(device):
    found = []
    for options in ({"accumulate": 2}, {"replicas": [device, device]}):
        with trainer(lambda p: SGD(p, 0.9), 0.05, devices=[device, "host"], batch=8, **options) as made:
            made.fit(DATA, 2)
            found.append(ends(made))
    for name in FIRST:
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_replicas_on_two_parts_of_an_opencl_device_equal_accumulated_batches(monkeypatch):
    monkeypatch.setenv("OPWEAVE_OPENCL_SUBDEVICES", "2")
    monkeypatch.setenv("OPWEAVE_OPENCL_DEVICES", "intel")
    registry = ow.Registry()
    try:
        registry.register(OpenCLBackend)
    except ow.Unavailable as error:
        pytest.skip(str(error))
    halves = [d for d in registry.devices() if d.name.count(".")][:2]
    if len(halves) < 2:
        pytest.skip("a device of one compute unit has no parts")
    found = []
    for devices, options in ((halves[:1], {"accumulate": 4}), (halves, {"replicas": halves, "accumulate": 2})):
        with trainer(devices=[*devices, "host"], batch=8, clip_norm=0.5, **options) as made:
            made.fit(DATA, 2)
            program = next(iter(made._programs.values()))
            assert {d.name for d in devices} <= {name for name, _ in program.explain().splits}
            found.append((ends(made), [row.train.loss for row in made.history]))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_replica_on_no_device_of_the_scheduler_is_refused():
    with pytest.raises(ow.SchedulerError, match="opencl:7"):
        trainer(devices="cpu", replicas=["opencl:7"])


@pytest.mark.parametrize("device", ["cpu", "opencl", "torch:cpu"])
def test_batches_come_ahead_of_time_with_the_same_results(device):
    """A parallel scheduler takes the next batch while a step runs."""
    with trainer(devices=[device]) as made:
        made.fit(DATA, 3)
        want = ends(made)
    with ow.Scheduler([device, "host"], parallel=True) as scheduler, trainer(devices=scheduler) as made:
        noted: list[int] = []
        submit = ow.Program.submit

        def counted(self, *args, **kwargs):
            future = submit(self, *args, **kwargs)
            noted.append(sum(not f.done() for f in futures))
            futures.append(future)
            return future

        futures: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ow.Program, "submit", counted)
            made.fit(DATA, 3)
        assert len(futures) == made.steps
        assert same(ends(made), want)


# --- half types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("torch:cpu", "bf16"), ("torch:cpu", "f16"), ("opencl", "f16"), ("cpu", "f16"), ("cpu", "bf16")],
)
def test_half_parameters_with_f32_masters_learn_as_f32_does(device, dtype):
    losses = {}
    for kind in ("f32", dtype):
        scale = None if kind == "f32" else LossScale(2.0**20)
        with trainer(dtype=kind, loss_scale=scale, lr=0.02, devices=[device, "host"]) as made:
            made.fit(DATA, 4)
            losses[kind] = made.evaluate(DATA).loss
            assert made._optimizer.params["w0"].dtype.name == kind
            if kind != "f32":
                masters = ow.read(made._optimizer.states["w0.master"])
                rounded = masters.astype(made._optimizer.params["w0"].dtype.numpy)
                np.testing.assert_array_equal(ow.read(made._optimizer.params["w0"]), rounded)
    assert losses[dtype] == pytest.approx(losses["f32"], rel=0.15, abs=0.02)


# --- random numbers -------------------------------------------------------------------------------------------------


def dropping(cpus, **options):
    """A network with dropout, whose random numbers are counted by physical batches."""
    params = parameters()

    def model(x, step):
        if step is not None:
            x = x * ow.cast(ow.bernoulli(x.shape, 5, step, 0.8), "f32") / 0.8
        return network(x, params)

    return Trainer(model, AdamW(params), 0.01, batch=8, devices=cpus[0], **options)


def test_random_numbers_follow_from_the_number_of_the_batch(cpus, tmp_path):
    with dropping(cpus, accumulate=2) as whole:
        whole.fit(DATA, 2)
        want = ends(whole)
        assert whole.evaluate(DATA)[:5] == whole.evaluate(DATA)[:5]
    with dropping(cpus, accumulate=2) as first:
        first.run_epoch(DATA, lambda t: t.save(tmp_path / "run", DATA) if t.steps == 4 else None)
    with dropping(cpus, accumulate=2) as second:
        second.load(tmp_path / "run", DATA)
        second.run_epoch(DATA)
        second.run_epoch(DATA)
        assert same(ends(second), want)


def test_states_that_the_model_writes_are_kept_in_checkpoints(tmp_path):
    def counting():
        params, seen = parameters(), ow.state("seen", (6,))

        def model(x):
            total = ow.assign(seen, seen * 0.9 + ow.mean(x, 0) * 0.1)
            return network(x - total, params)

        return Trainer(model, AdamW(params), 0.01, batch=8, devices="cpu"), seen

    made, seen = counting()
    with made:
        made.run_epoch(DATA)
        made.save(tmp_path / "run", DATA)
        kept = ow.read(seen)
    made, seen = counting()
    with made:
        made.load(tmp_path / "run", DATA)
        np.testing.assert_array_equal(ow.read(seen), kept)
        assert np.any(kept)


def test_a_snapshot_has_the_states_that_the_model_writes():
    """Also the first one, which is taken before the first step; and evaluation adds none."""
    params, seen, looked = parameters(), ow.state("seen", (6,)), ow.state("looked", (6,))

    def model(x, step):
        if step is None:
            return network(x - ow.assign(looked, ow.mean(x, 0)), params)
        return network(x - ow.assign(seen, seen * 0.9 + ow.mean(x, 0) * 0.1), params)

    def interrupt(_):
        raise KeyboardInterrupt

    with Trainer(model, AdamW(params), 0.01, batch=8, devices="cpu", snapshot_every=100) as made:
        with pytest.raises(KeyboardInterrupt):
            made.run_epoch(DATA, interrupt)
        assert np.any(ow.read(seen))
        made.evaluate(DATA)
        made.go_back()
        assert made.steps == 0
        assert not np.any(ow.read(seen))
        assert np.any(ow.read(looked))


# --- lost devices ---------------------------------------------------------------------------------------------------

KERNELS = [name for name, op in OPS.items() if not op.is_view and name not in ("custom", "linear")]


class Fragile(Separate):
    """A device that is lost after some products: from then on nothing works on it any more."""

    def __init__(self, name: str) -> None:
        super().__init__(name, KERNELS)
        self.left = 10**9
        self.kernels("linear", dtypes="f32")(self._linear)

    def _linear(self, stream: Any, op: str, out: Any, *srcs: Any, **attrs: Any) -> Any:
        def run() -> None:
            self.left -= 1
            self._check()
            np.copyto(out.view, OPS["linear"].reference(*[s.view for s in srcs], **attrs))

        return run

    def _check(self) -> None:
        if self.left < 0:
            raise ow.DeviceLostError(f"{self.name}: it fell off the bus")

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        self._check()
        super()._download(mem, offset, out)

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        self._check()
        super()._upload(mem, offset, data)


@pytest.mark.parametrize("source", ["snapshot", "checkpoint"])
@pytest.mark.parametrize("spread", [False, True], ids=["alone", "replicas"])
def test_training_goes_on_without_a_lost_device(cpus, tmp_path, source, spread):
    """The result is that of a training which was never interrupted."""
    with trainer(devices=cpus[1], batch=8, accumulate=2 if spread else 1) as whole:
        whole.fit(DATA, 3)
        want = ends(whole)
    device = Fragile("gpu")
    options = {"snapshot_every": 3} if source == "snapshot" else {}
    replicas = [device, cpus[1]] if spread else []
    with trainer(devices=[device, cpus[1]], replicas=replicas, batch=8, **options) as made:
        saved = {"checkpoint": tmp_path / "run", "every": 3} if source == "checkpoint" else {}
        made.run_epoch(DATA)
        if saved:
            made.save(tmp_path / "run", DATA)
        device.left = 10
        with pytest.raises(ow.ExecutionError, match="fell off the bus") as caught:
            made.fit(DATA, 3, **saved)
        assert caught.value.device == "gpu"
        made.without(caught.value.device, *([tmp_path / "run", DATA] if saved else []))
        while made.epoch < 3:
            made.run_epoch(DATA)
        assert [d.name for d in made.scheduler.devices] == [cpus[1].name]
        assert made.steps == whole.steps
        for name, value in ends(made).items():
            np.testing.assert_allclose(value, want[name], rtol=2e-4, atol=2e-5)


def test_without_anything_to_go_on_from_there_is_an_error(cpus):
    with trainer(devices=cpus[:2]) as made, pytest.raises(ow.CheckpointError, match="snapshot_every"):
        made.without(cpus[0])
    with pytest.raises(ow.SchedulerError, match="snapshot_every"):
        trainer(snapshot_every=0)
