"""Checkpoints: resuming from them, what does not fit, and what interrupts and killed processes leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave_training import AdamW, LossScale, Trainer
from tests.support.small_training import DATA, X, Y, network, parameters, trainer

ROOT = Path(__file__).parents[2]


def values(made):
    return {name: ow.read(tensor) for name, tensor in made._states.items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# --- checkpoints ----------------------------------------------------------------------------------------------------


RESUMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "half": {"dtype": "bf16", "scaled": True},
}


def resumable(kind, seed):
    options = dict(RESUMED[kind])
    if options.pop("scaled", False):
        options["loss_scale"] = LossScale(1024.0, interval=5)
    return trainer(seed=seed, **options)


@pytest.mark.parametrize("place", [11, 12, 13, 21])
@pytest.mark.parametrize("kind", RESUMED)
def test_resuming_equals_going_on(tmp_path, kind, place):
    """Wherever the training stopped, at the end of an epoch or within one: bit for bit."""
    path = tmp_path / "run.safetensors"

    def keep(made):
        if made.steps == place:
            made.save(path, DATA)

    with resumable(kind, 4) as whole:
        while whole.epoch < 4:
            found = whole.run_epoch(DATA, keep)
        with resumable(kind, 9) as resumed:
            resumed.load(path, DATA)
            assert resumed.steps == place
            while resumed.epoch < 4:
                again = resumed.run_epoch(DATA)
            assert same(values(resumed), values(whole))
            assert resumed.steps == whole.steps
    assert again._replace(seconds=0) == found._replace(seconds=0)


def test_a_checkpoint_keeps_history_and_sums(tmp_path):
    path = tmp_path / "run"
    with trainer() as made:
        made.fit(DATA, 2, DATA)
        found = made.run_epoch(DATA, lambda t: t.save(path, DATA) if t.steps == 30 else None)
        rows = made.history
    with trainer() as made:
        made.load(path, DATA)
        assert made.history == rows
        again = made.run_epoch(DATA)
    assert again._replace(seconds=0) == found._replace(seconds=0)


def test_checkpoints_are_read_by_safetensors(tmp_path):
    from safetensors.numpy import load_file

    with trainer() as made:
        made.save(tmp_path / "run", DATA)
        found = load_file(tmp_path / "run")
        assert same(found, values(made))


@pytest.mark.parametrize(
    "damage", ["missing", "cut", "header", "flipped", "other data", "other options", "other shape"]
)
def test_checkpoints_that_do_not_fit_change_nothing(tmp_path, damage):
    path = tmp_path / "run"
    with trainer() as made:
        made.run_epoch(DATA)
        if damage != "missing":
            made.save(path, DATA)
    data = {"x": X[:80], "labels": Y[:80]} if damage == "other data" else DATA
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    if damage == "flipped":
        whole = bytearray(path.read_bytes())
        whole[-5] ^= 16
        path.write_bytes(whole)
    if damage == "header":
        path.write_bytes(b"\xff" * 64)
    make = (lambda p: AdamW(p, eps=1e-3)) if damage == "other options" else AdamW
    if damage == "other shape":
        params = {**parameters(), "w1": ow.state("w1", (4, 16)), "b1": ow.state("b1", (4,))}
        other = Trainer(lambda x: network(x, params), AdamW(params), 0.1, devices="cpu", batch=8)
    else:
        other = trainer(make)
    with other:
        before = values(other)
        with pytest.raises(ow.CheckpointError, match="run"):
            other.load(path, data)
        assert same(values(other), before)
        assert other.steps == 0


KILLED = """
import sys
from tests.support.small_training import DATA, trainer
with trainer() as made:
    print("started", flush=True)
    made.fit(DATA, 10**6, checkpoint=sys.argv[1], every=1)
"""


POINTS = int(os.environ.get("OPWEAVE_TEST_KILLS", "2"))
"""At how many random moments a process is killed; 100 take some minutes."""


def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path):
    """And resuming from it equals a training that was never stopped."""
    path = tmp_path / "run"
    for delay in np.random.default_rng().uniform(0.01, 0.5, POINTS):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while not path.exists():
                pass
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        with trainer() as resumed, trainer() as whole:
            resumed.load(path, DATA)
            while whole.epoch < resumed.epoch + 1:
                whole.run_epoch(DATA)
            resumed.run_epoch(DATA)
            assert resumed.steps == whole.steps
            assert same(values(resumed), values(whole))
        path.unlink()


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")
def test_a_process_killed_while_it_writes_leaves_no_other_file(tmp_path, monkeypatch):
    """What a kill leaves is what is there when the file is synced: the old checkpoint alone."""
    seen = []
    sync = os.fsync

    def noted(handle):
        seen.append(sorted(os.listdir(tmp_path)))
        sync(handle)

    with trainer() as made:
        made.save(tmp_path / "run", DATA)
        monkeypatch.setattr(os, "fsync", noted)
        made.save(tmp_path / "run", DATA)
    assert seen == [["run"], ["run"]]  # of the file and of its folder


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_checkpoint_that_fails_leaves_the_old_one_alone(tmp_path, monkeypatch, unnamed):
    """Also on file systems where every file has a name."""

    def full(fd):
        raise OSError(28, "No space left on device")

    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    with trainer() as made:
        made.save(tmp_path / "run", DATA)
        before = (tmp_path / "run").read_bytes()
        made.run_epoch(DATA)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ow.CheckpointError, match="No space left"):
            made.save(tmp_path / "run", DATA)
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
        assert (tmp_path / "run").read_bytes() == before


def test_replicas_become_accumulated_batches(tmp_path):
    """A checkpoint of two replicas is one of two accumulated batches, and the other way round."""
    with ow.Scheduler(["cpu", "host"]) as devices:
        two: dict[str, Any] = {"devices": devices, "replicas": ["cpu", "cpu"]}
        one: dict[str, Any] = {"accumulate": 2}
        for first, then in ((two, one), (one, two)):
            with trainer(**first) as made, trainer(**then) as resumed:
                made.run_epoch(DATA)
                made.save(tmp_path / "run", DATA)
                resumed.load(tmp_path / "run", DATA)
                made.run_epoch(DATA)
                resumed.run_epoch(DATA)
                assert same(values(made), values(resumed))


# --- interrupts -----------------------------------------------------------------------------------------------------


def test_an_interrupt_between_steps_loses_nothing():
    """Also one from a callback, and one that comes while a batch is taken."""
    with trainer() as whole, trainer() as made:
        whole.run_epoch(DATA)

        def interrupt(at):
            if at.steps in (3, 4):
                raise KeyboardInterrupt

        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                made.run_epoch(DATA, interrupt)
        made.run_epoch(DATA)
        assert same(values(made), values(whole))


@pytest.mark.parametrize("late", [False, True], ids=["in the run", "behind the run"])
def test_an_interrupt_within_a_step_is_noted(monkeypatch, tmp_path, late):
    """The trainer neither goes on nor writes a checkpoint, until it went back to a snapshot: then nothing is lost."""
    run = ow.Program.run

    def interrupted(self, feeds):
        if late:
            run(self, feeds)
        raise KeyboardInterrupt

    with trainer() as whole, trainer(snapshot_every=2) as made:
        whole.fit(DATA, 2)
        made.run_epoch(DATA)
        with monkeypatch.context() as patch:
            patch.setattr(ow.Program, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.run_epoch(DATA)
        for use in (lambda: made.run_epoch(DATA), lambda: made.save(tmp_path / "run", DATA)):
            with pytest.raises(ow.SchedulerError, match="interrupted"):
                use()
        made.go_back()
        while made.epoch < 2:
            made.run_epoch(DATA)
        assert same(values(made), values(whole))
