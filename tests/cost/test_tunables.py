"""Tunables: the fastest value is found, kept in a file, and set when the device is loaded."""

from __future__ import annotations

import json
from time import sleep

import pytest

import opweave as ow
from opweave.contract import Tunable
from opweave.contract.kernels import KernelTable
from opweave.errors import PluginError
from opweave.registry.measured import load_tunables
from opweave_cost import store
from opweave_cost.tunables import best
from tests.support.devices import Separate


def chosen(default, *samples):
    return best(default, [dict(zip((1, 2, 4), seconds, strict=True)) for seconds in samples])


def test_the_value_that_takes_the_least_time_is_chosen():
    assert chosen(1, (3.0, 2.0, 4.0)) == 2
    assert chosen(1, (3.0, 2.0, 4.0), (30.0, 30.0, 20.0), (3.0, 3.0, 2.0)) == 4  # each counts by its own least


def test_the_default_stays_without_a_gain_and_without_samples():
    assert chosen(1, (1.01, 1.0, 1.0)) == 1
    assert best(4, []) == 4


def test_one_measurement_that_waited_for_another_program_does_not_decide():
    quick = (1.0, 1.3, 1.4)
    assert chosen(2, (100.0, 1.0, 1.0), quick, quick, quick, quick) == 1


@pytest.mark.parametrize(
    ("default", "choices", "why"),
    [(3, (1, 2), "none of its choices"), (1, (1, 0), "not all positive"), (1, (1, 2.0), "not all positive")],
)
def test_a_declaration_that_makes_no_sense(default, choices, why):
    with pytest.raises(PluginError, match=f"tunable tile_bytes: .*{why}"):
        Tunable("tile_bytes", default, choices, list)


class Tuned(Separate):
    """A device whose additions sleep for as many milliseconds as its tunable is away from 20."""

    description = "made for tests"

    def __init__(self, driver: str = "1") -> None:
        super().__init__("tuned")
        self.driver = driver
        self.limit = Tunable("limit", 8, (8, 20, 32), lambda: [ow.input("tx", (4,)) + ow.input("ty", (4,))])
        self.kernels = KernelTable("f32", "strided")
        self.kernels("add")(self._add)

    def _add(self, stream, op, out, *srcs):
        seconds = abs(self.limit.value - 20) / 4000
        return lambda: sleep(seconds)

    @property
    def tunables(self):
        return (self.limit,)

    def features(self):
        return {"driver": self.driver}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path))
    return tmp_path


def loaded(driver="1", version=""):
    """A device as a new process has it."""
    device = Tuned(driver)
    load_tunables(device, version)
    return device.limit.value, device.tuned


def test_measured_once_and_set_when_the_device_is_loaded(folder):
    device, seen = Tuned(), []
    assert loaded() == (8, False)
    assert store.tune(device, progress=lambda *report: seen.append(report))
    assert (device.limit.value, device.tuned) == (20, True)
    assert seen == [("limit", 0, 1)]
    assert not store.tune(device)
    assert loaded() == (20, True)
    assert store.tune(device, refresh=True)


def test_other_libraries_or_another_version_make_figures_void(folder):
    store.tune(Tuned())
    assert loaded(driver="2") == (8, False)
    assert loaded(version="9.9") == (8, False)


@pytest.mark.parametrize("value", ["7", "-8", "true", "20.0", '"20"', "null", "[]"])
def test_a_file_with_values_that_are_no_choices(folder, value):
    store.tune(Tuned())
    (file,) = folder.iterdir()
    file.write_text(file.read_text().replace('"limit": 20', f'"limit": {value}'))
    assert loaded() == (8, False)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": 1}', "[" * 100_000])
def test_a_damaged_file(folder, text):
    store.tune(Tuned())
    (file,) = folder.iterdir()
    file.write_text(text)
    assert loaded() == (8, False)


def test_a_tunable_that_was_not_measured_leaves_all_at_their_defaults(folder):
    store.tune(Tuned())
    (file,) = folder.iterdir()
    document = json.loads(file.read_text())
    document["tunables"] = {"other": 20}
    file.write_text(json.dumps(document))
    assert loaded() == (8, False)


def test_a_switched_off_cache(monkeypatch):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", "0")
    store.tune(Tuned())
    assert loaded() == (8, False)


def test_a_failing_sample_leaves_the_value_that_was_there(folder):
    device = Tuned()

    def fails(stream, op, out, *srcs):
        if device.limit.value == 32:
            raise ow.AllocationError(device.name, 1, None)
        return lambda: None

    device.kernels = KernelTable("f32", "strided")
    device.kernels("add")(fails)
    with pytest.raises(ow.AllocationError):
        store.tune(device)
    assert (device.limit.value, device.tuned) == (8, False)
    assert list(folder.iterdir()) == []


def test_operations_that_the_device_does_not_run_do_not_count(folder):
    device = Tuned()
    device.limit = Tunable("limit", 8, (8, 20), lambda: [ow.exp(ow.input("tunables x", (4,)))])
    store.tune(device)
    assert device.limit.value == 8
