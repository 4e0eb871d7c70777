"""The cache of profiles: whatever files are in the folder, a device gets only valid figures."""

from __future__ import annotations

import json
import os

import pytest

import opweave_cost
from opweave_cost.cost_model import Curve, OpCost, Profile
from opweave_cost.store import cache_folder
from tests.support.devices import Separate


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Names of the devices that were measured."""
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))
    found: list[str] = []

    def measure(device, progress=None):
        found.append(device.name)
        line = Curve.line(1e-6, 1e9)
        return Profile(device.name, 1e-6, line, line, {"add": {"f32": OpCost(line)}})

    monkeypatch.setattr("opweave_cost.measure.measure", measure)
    return found


def file():
    folder = cache_folder()
    assert folder is not None
    (path,) = folder.iterdir()
    return path


def is_measured_anew(measured) -> bool:
    opweave_cost.profile(Separate("one"))
    return measured == ["one", "one"]


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"key":' * 100_000], ids=["lists", "dicts"])
def test_lists_within_lists_without_end(measured, deep):
    opweave_cost.profile(Separate("one"))
    file().write_text(deep)
    assert is_measured_anew(measured)


@pytest.mark.parametrize(
    "figure", ["NaN", "-1.0", "Infinity", "-Infinity", "1e999", '"1"', "null", "[]", "true", "1" + "0" * 400]
)
@pytest.mark.parametrize("where", ["switch", "upload", "costs"])
def test_figures_that_no_device_has(measured, figure, where):
    opweave_cost.profile(Separate("one"))
    document = json.loads(file().read_text())
    profile = document["profile"]
    if where == "switch":
        profile["switch"] = "@"
    elif where == "upload":
        profile["upload"][0][0][1] = "@"
    else:
        profile["costs"]["add"]["f32"][0][0][0][1] = "@"
    file().write_text(json.dumps(document).replace('"@"', figure))
    assert is_measured_anew(measured)


@pytest.mark.parametrize("value", [None, 1, ["one"], {}, True])
@pytest.mark.parametrize("where", ["device", "group"])
def test_names_that_are_no_text(measured, where, value):
    opweave_cost.profile(Separate("one"))
    document = json.loads(file().read_text())
    document["profile"][where] = value
    file().write_text(json.dumps(document))
    assert is_measured_anew(measured)


@pytest.mark.skipif(os.name != "posix", reason="named pipes and devices as files")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_is_no_regular_file(measured, kind):
    opweave_cost.profile(Separate("one"))
    path = file()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert is_measured_anew(measured)
    assert json.loads(file().read_text())["profile"]["device"] == "one", "it is a file now"


def test_a_sound_file_is_read(measured):
    opweave_cost.profile(Separate("one"))
    assert not is_measured_anew(measured)


def test_switched_off(measured, monkeypatch):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", "0")
    opweave_cost.profile(Separate("one"))
    assert cache_folder() is None
    assert is_measured_anew(measured)


def test_a_device_that_says_more_of_itself_once_it_has_run_is_measured_once(measured, monkeypatch):
    """A library may tell its threads only then. The next process asks before anything ran there."""

    class Warming(Separate):
        def features(self):
            return {"runs": len(measured)}

    opweave_cost.profile(Warming("one"))
    measured.clear()
    opweave_cost.profile(Warming("one"))
    assert measured == []
