"""Combinations and shards as users get them wrong or lose them: each gives a right result or an error that says why."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_combined
from opweave_combined.device import CombinedDevice
from opweave_training import AdamW, Trainer
from tests.core.scheduler.test_lost import Fragile
from tests.support.devices import Member, Separate
from tests.support.integer_mlp import UP, VALUE, WANT, mlp
from tests.support.interrupts import interrupted, needs_timer
from tests.support.small_training import DATA, FIRST, network

# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Member("one"), lambda: CombinedDevice([Member("a"), Member("b")])])
def test_a_device_is_itself_when_copied_and_is_not_pickled(make):
    device = make()
    assert copy.copy(device) is device
    assert copy.deepcopy({"d": device})["d"] is device
    assert copy.deepcopy(ow.Sharded([device, "host"])).devices == (device, "host")
    with pytest.raises(ow.LifetimeError, match=r"opweave\.device\(name\)"):
        pickle.dumps(device)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_state_in_shards_is_pickled_whole(pair, axis):
    state = ow.state(f"pickled{axis}", (6, 8), device=ow.Sharded(pair, axis, multiple=1))
    ow.write(state, VALUE[:, :8].repeat(2, 0)[:6])
    for back in (pickle.loads(pickle.dumps(state)), pickle.loads(pickle.dumps(ow.Graph(ow.neg(state)))).leaves[0]):
        assert back.leaf is not state.leaf
        assert np.array_equal(ow.read(back), VALUE[:, :8].repeat(2, 0)[:6])
    assert state.leaf is not None
    assert state.leaf.shards is not None
    part = state.leaf.shards.parts[0].leaf
    assert part is not None
    part.damaged = "half written"
    with pytest.raises(ow.ExecutionError, match="half written"):
        pickle.dumps(state)


def test_members_that_were_loaded_again_are_combined_again(monkeypatch):
    ow.devices()
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", "2")
    ow.unload("cpu")
    try:
        first = opweave_combined.combine(["cpu:0", "cpu:1"])
        other = opweave_combined.combine(["cpu:1", "host"])
        weights = ow.weights({"up": UP}, device=first)
        ow.unload("cpu")
        with pytest.raises(ow.LifetimeError, match=r"in use.*combined:cpu:0\+cpu:1"):
            opweave_combined.combine(["cpu:0", "cpu:1"])
        for buffer in weights.buffers:
            buffer.free()
        second = opweave_combined.combine(["cpu:0", "cpu:1"])
        assert second is not first
        assert second.members == (ow.device("cpu:0"), ow.device("cpu:1"))
        assert ow.device(second.name) is second
        assert ow.device(other.name) is other
        with ow.Scheduler(second) as scheduler:
            assert np.array_equal(scheduler.build(mlp("x_again", second)).run(x_again=VALUE), WANT)
    finally:
        ow.unload("combined")
        ow.unload("cpu")


# --- training --------------------------------------------------------------------------------------------------------


def trained(where: Any, devices: Any, path: Any, *, save: bool) -> dict[str, np.ndarray[Any, Any]]:
    """The parameters after two epochs, with a checkpoint after the first: written, or read in place of that epoch."""
    params = {}
    for name, value in FIRST.items():
        place = where(name)
        params[name] = ow.state(name, value.shape) if place is None else ow.state(name, value.shape, device=place)
        ow.write(params[name], value)
    mean = ow.state("mean", (16, 6), device=where("w0"))  # one that the model writes

    def model(x: ow.Tensor) -> ow.Tensor:
        written = ow.assign(mean, mean * 0.5 + params["w0"] * 0.5)
        return network(x, params) + ow.sum(written) * 0

    with Trainer(model, AdamW(params), 0.01, batch=8, devices=devices) as loop:
        if save:
            loop.run_epoch(DATA)
            loop.save(path, DATA)
        else:
            loop.load(path, DATA)
        loop.run_epoch(DATA)
        return {**{name: ow.read(param) for name, param in params.items()}, "mean": ow.read(mean)}


AXES = {"w0": 0, "b0": 0, "w1": 1}


def test_a_training_over_shards_goes_on_anywhere_from_its_checkpoint(pair, both, tmp_path):
    def sharded(name: str) -> Any:
        return ow.Sharded(pair, AXES[name], multiple=1) if name in AXES else pair[0]

    want = trained(sharded, pair, tmp_path / "c", save=True)
    plain = trained(lambda _: pair[0], pair[0], tmp_path / "other", save=True)
    across = trained(
        lambda n: ow.Sharded(pair, 0, multiple=1) if n != "b1" else pair[0], pair, tmp_path / "c", save=False
    )
    for found in (plain, across, trained(lambda _: both, both, tmp_path / "c", save=False)):
        for name, value in want.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


# --- losses and interrupts -------------------------------------------------------------------------------------------


def test_a_combination_that_lost_a_member_says_so_whatever_is_asked_of_it():
    class Gone(Fragile):
        @property
        def alive(self) -> bool:
            return not self.lost

    lost = Gone("gpu")
    both = CombinedDevice([Separate("stays"), lost])
    out = mlp("x_gone", both)
    scheduler = ow.Scheduler([both, Member("other")])
    assert np.array_equal(scheduler.build(out).run(x_gone=VALUE), WANT)
    lost.lost = True
    with pytest.raises(ow.ExecutionError, match="lost a member"):
        scheduler.build(out).run(x_gone=VALUE)
    assert not both.alive
    with pytest.raises(ow.DeviceLostError, match="lost a member: gpu"):
        both.alloc(100)
    with scheduler.without(both) as rest:
        assert np.array_equal(rest.build(out).run(x_gone=VALUE), WANT)


@needs_timer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer it ends there
def test_a_combination_goes_on_after_interrupts_at_any_moment(both):
    with ow.Scheduler(both) as scheduler:
        program = scheduler.build(mlp("x_storm_combined", both))

        def run() -> None:
            assert np.array_equal(program.run(x_storm_combined=VALUE), WANT)

        assert interrupted(300, run, run, every=5, longest=2e-3) >= 300


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_threads_use_one_combination_at_once(both, shared):
    name = f"x_threads_{shared}"
    out, failures = mlp(name, both), []

    def use(program: ow.Program[Any]) -> None:
        for k in range(8):
            got = program.run({name: VALUE * k})
            assert np.array_equal(got, WANT * k)

    def work(program: ow.Program[Any] | None) -> None:
        try:
            if program is not None:
                use(program)
                return
            for _ in range(3):  # schedulers that come and go
                with ow.Scheduler(both) as scheduler:
                    use(scheduler.build(out))
        except BaseException as error:
            failures.append(error)

    with ow.Scheduler(both) as scheduler:
        program = scheduler.build(out) if shared else None
        threads = [threading.Thread(target=work, args=(program,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert failures == []
    assert both._reserved == sum(b.size for b in both.live_buffers)
