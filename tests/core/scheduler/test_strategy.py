"""Strategies of placement that plugins offer, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import opweave as ow
from opweave import registry
from opweave.packages import pip_install
from tests.support.devices import Separate
from tests.support.plugins_for_tests import PluginFolder

LAST = """
from opweave import hookimpl

asked = []

def last(problem):
    asked.append(problem)
    at = len(problem.targets) - 1
    return problem.assigned({node: at for node in problem.graph.nodes if node.op is not None}, "last"), None

@hookimpl
def opweave_placements():
    return {"last": last}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of plugins, the only ones of the process."""
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        monkeypatch.setattr(registry, "REGISTRY", folder.registry())
        yield folder


@pytest.fixture
def y():
    x = ow.input("x", (4,))
    return ow.exp(ow.neg(x).named("first")).named("second")


def test_a_third_party_offers_one(folder, y):
    folder.add("acme", LAST, value="opweave_acme")
    a, b = Separate("a"), Separate("b")
    with ow.Scheduler([a, b]) as scheduler:
        assert scheduler.build(y).device_of(y) is a
    assert "opweave_acme" not in sys.modules, "nobody asked for it"
    with ow.Scheduler([a, b], placement="last") as scheduler:
        program = scheduler.build(y)
        assert [program.device_of(node) for node in (y, *y.srcs)] == [b, b]
        assert {row.cause for row in program.explain().nodes} == {"last"}
        np.testing.assert_array_equal(program.run(x=np.zeros(4, np.float32)), np.ones(4, np.float32))
        assert scheduler.build(y, pins={y.srcs[0]: a}).device_of(y.srcs[0]) is a, "pins are fixed"


def test_a_strategy_whose_package_is_missing(folder, y):
    with pytest.raises(ow.SchedulerError, match="opweave-cost, which is not installed") as caught:
        ow.Scheduler(Separate("a"), placement="cost")
    assert pip_install("opweave-cost") in str(caught.value)
    with ow.Scheduler(Separate("a")) as scheduler:
        program = scheduler.build(y)
        with pytest.raises(ow.SchedulerError, match="opweave-cost, which is not installed"):
            _ = program.predicted


def test_a_strategy_that_there_is_not(folder):
    folder.add("acme", LAST, value="opweave_acme")
    with pytest.raises(ow.SchedulerError, match="placement is 'priority' or 'last', not 'lasd'"):
        ow.Scheduler(Separate("a"), placement="lasd")
    with pytest.raises(ow.SchedulerError, match="not 3"):
        ow.Scheduler(Separate("a"), placement=3)  # type: ignore[arg-type]


def test_a_plugin_that_offers_nothing_usable_is_named(folder):
    folder.add("acme", LAST.replace('{"last": last}', "3"), value="opweave_acme")
    with (
        pytest.warns(RuntimeWarning, match="opweave_placements of plugin 'acme' failed"),
        pytest.raises(ow.SchedulerError),
    ):
        ow.Scheduler(Separate("a"), placement="last")


@pytest.mark.parametrize("name", ["profile", "tune", "simulate", "measure_steps"])
def test_names_that_moved_say_where(name):
    with pytest.raises(AttributeError, match=rf"opweave\.{name} is opweave_cost\.{name} now: pip install"):
        getattr(ow, name)


@pytest.mark.parametrize("command", ["profile", "what-if"])
def test_commands_that_moved_name_the_package(command):
    done = subprocess.run(
        [sys.executable, "-m", "opweave", command], capture_output=True, text=True, timeout=100,
        env={"OPWEAVE_DISABLE": "cost,cpu,opencl,ort,remote,torch,onnx,ray", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert f"the command {command!r} is one of opweave-cost" in done.stderr
    assert pip_install("opweave-cost") in done.stderr
