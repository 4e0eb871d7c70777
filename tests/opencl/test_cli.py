"""``opweave opencl``: drivers, and the cache of built programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from opweave_opencl.caching import BinaryCache
from opweave_opencl.cli import commands


@pytest.fixture
def cache(monkeypatch, tmp_path) -> BinaryCache:
    monkeypatch.setenv("OPWEAVE_OPENCL_CACHE", str(tmp_path / "programs"))
    return BinaryCache()


def call(*arguments: str) -> str:
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_drivers_and_devices_are_those_of_pyopencl(cache, device):
    import pyopencl as cl

    cache.store(cache.key(["a"]), bytes(100))
    document = json.loads(call("info", "--json"))
    platforms = {p.name.strip(): p for p in cl.get_platforms()}
    assert document["drivers"]
    for driver in document["drivers"]:
        theirs = [device.name.strip() for device in platforms[driver["name"]].get_devices()]
        assert {found["name"] for found in driver["devices"]} <= set(theirs)
    names = {found["name"] for driver in document["drivers"] for found in driver["devices"]}
    assert device.cl_device.name.strip() in names
    assert document["cache"] == {"folder": str(cache.folder), "programs": 1, "bytes": 132, "limit": 256 << 20}
    text = call("info")
    assert all(driver["name"] in text for driver in document["drivers"])
    assert f"1 built programs and answers, 132 B of 256 MiB, in {cache.folder}" in text


def test_without_a_driver_the_reason_is_printed(cache):
    done = subprocess.run(
        [sys.executable, "-m", "opweave", "opencl", "info", "--json"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "OCL_ICD_VENDORS": "/nowhere"},
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert document["drivers"] or "OCL_ICD_VENDORS=/nowhere" in document["error"]
    assert bool(document["error"]) == bool(document["remedy"]) == (not document["drivers"])


def test_clearing_deletes_programs_and_nothing_else(cache):
    assert call("clear-cache") == "there was nothing to delete\n"
    kept = cache.key(["a"])
    for key in (kept, cache.key(["b"]), "letter.txt"):
        assert cache.store(key, b"data")
    (cache.folder / ("f" * 64)).mkdir()
    assert call("clear-cache").startswith("deleted 2 files, 72 B, in ")
    assert sorted(path.name for path in cache.folder.iterdir()) == ["f" * 64, "letter.txt"]
    assert cache.load(kept) is None


def test_a_cache_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("OPWEAVE_OPENCL_CACHE", "0")
    assert call("clear-cache") == "there was nothing to delete\n"
    assert "programs are not kept (OPWEAVE_OPENCL_CACHE=0)" in call("info")


def test_the_command_is_a_part_of_opweave():
    done = subprocess.run([sys.executable, "-m", "opweave", "--help"], capture_output=True, text=True, timeout=60)
    assert "opencl" in done.stdout
    assert "Drivers of OpenCL" in done.stdout
