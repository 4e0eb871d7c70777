"""PoCL of PyPI gets the library of built-in functions that matches its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path

import pytest

from opweave_opencl import pocl
from opweave_opencl.drivers import VENDORS
from opweave_opencl.pocl import PACKAGE, chooses_wrongly

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the package is for Linux")
WIDE = "kernel-x86_64-unknown-linux-gnu-avx512.bc"
NARROW = "kernel-x86_64-unknown-linux-gnu-avx2.bc"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """PoCL as pip installs it, with nothing in the files."""
    site = tmp_path / "site"
    files = ["pyopencl/.libs/libpocl-1.so", "pyopencl/.libs/pocl.icd", "pocl_binary_distribution/__init__.py"]
    files += [f"pocl_binary_distribution/.libs/share/pocl/{name}" for name in (WIDE, NARROW, "include/pocl.h")]
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(file)
    info = site / "pocl_binary_distribution-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 3.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.setattr(pocl, "distribution", lambda name: next(iter(distributions(name=name, path=[str(site)]))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return site


def fields(monkeypatch, vendor: str, flags: str) -> None:
    monkeypatch.setattr(pocl, "cpu_fields", lambda: {"vendor_id": vendor, "flags": flags})


@linux
@pytest.mark.parametrize(
    ("vendor", "flags", "wrong"),
    [
        ("AuthenticAMD", "fma avx2 avx512f avx512bw", True),  # Zen 4 and later
        ("AuthenticAMD", "fma avx2", False),
        ("GenuineIntel", "fma avx2 avx512f", False),
    ],
)
def test_processors_for_which_it_chooses_wrongly(monkeypatch, vendor, flags, wrong):
    fields(monkeypatch, vendor, flags)
    assert chooses_wrongly() == wrong


def test_the_folder_of_links_has_all_files_and_the_narrow_library_twice(package):
    folder = pocl._links(pocl._installed())
    links = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_symlink()}
    share = "pocl_binary_distribution/.libs/share/pocl"
    assert links.pop(f"{share}/{WIDE}").readlink() == package / share / NARROW
    assert {name: path.readlink() for name, path in links.items()} == {
        name: package / name
        for name in (
            "pyopencl/.libs/libpocl-1.so", "pyopencl/.libs/pocl.icd", f"{share}/{NARROW}", f"{share}/include/pocl.h",
        )
    }  # fmt: skip
    assert pocl._links(pocl._installed()) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("change", ["version", "missing file", "no package"])
def test_other_packages_are_left_as_they_are(package, monkeypatch, change):
    info = package / "pocl_binary_distribution-3.0.dist-info"
    if change == "version":
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 3.1\n")
    elif change == "missing file":
        (package / "pyopencl" / ".libs" / "libpocl-1.so").unlink()
    else:

        def none(name: str) -> None:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(pocl, "distribution", none)
    assert pocl._installed() == {}


@linux
def test_nothing_is_done_for_other_processors_and_in_vain(package, monkeypatch, tmp_path):
    fields(monkeypatch, "GenuineIntel", "avx512f")
    assert pocl._load() is None
    assert not (tmp_path / "cache").exists()
    fields(monkeypatch, "AuthenticAMD", "avx512f")
    assert pocl._load() is None  # the driver is a file of text
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(pocl, "user_cache", lambda: Path("/proc/nowhere"))
    assert pocl._load() is None


@linux
def test_it_is_too_late_where_the_package_was_loaded_as_it_is(package, monkeypatch):
    fields(monkeypatch, "AuthenticAMD", "avx512f")
    monkeypatch.setattr(pocl, "_folder", None)
    assert pocl.too_late()
    monkeypatch.setattr(pocl, "_folder", package)
    assert not pocl.too_late()
    monkeypatch.setattr(pocl, "_folder", None)
    monkeypatch.setattr(pocl, "_installed", dict)  # another PoCL, of the system
    assert not pocl.too_late()


@pytest.mark.parametrize("given", [None, "/given"])
def test_its_cache_is_another_one_while_it_starts(monkeypatch, tmp_path, given):
    monkeypatch.setattr(pocl, "_asked", False)
    monkeypatch.setattr(pocl, "_folder", None)
    monkeypatch.setattr(pocl, "_load", lambda: tmp_path)
    monkeypatch.delenv("POCL_CACHE_DIR", raising=False)
    if given:
        monkeypatch.setenv("POCL_CACHE_DIR", given)
    with pocl.matching_library():
        assert os.environ["POCL_CACHE_DIR"] == f"{given or tmp_path}/kernels-avx2"
        assert pocl.matched()
    assert os.environ.get("POCL_CACHE_DIR") == given


# --- the driver that is installed here --------------------------------------------------------------------------------

TRIED = """
import sys
if sys.argv[1] == "pyopencl first":
    import pyopencl
    pyopencl.get_platforms()
import numpy as np
import opweave as ow
from opweave.errors import Unavailable
from opweave_opencl import OpenCLBackend
device = next(device for device in OpenCLBackend().devices() if "Portable" in device.description)
try:
    device.probe()
except Unavailable as error:
    print("refused:", error.message, "|", error.remedy)
else:
    x = ow.input("x", (4096,))
    values = np.linspace(-200, 200, 4096, dtype=np.float32)
    outputs = [ow.sum(x * x), ow.cast(ow.cast(x, "i32"), "i8"), ow.cast(ow.step(x), "bool")]
    found = ow.Scheduler([device]).build(outputs).run({x: values})
    np.testing.assert_allclose(found[0], (values.astype(np.float64) ** 2).sum(), rtol=1e-5)
    np.testing.assert_array_equal(found[1], values.astype(np.int32).astype(np.int8))
    np.testing.assert_array_equal(found[2], values > 0)
    print("right")
"""


def tried(who: str, cache: Path, **more: str) -> str:
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), **more}
    done = subprocess.run(
        [sys.executable, "-c", TRIED, who], env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@linux
@pytest.mark.skipif(not pocl._installed(), reason=f"{PACKAGE} 3.0 is not installed")
@pytest.mark.skipif(not chooses_wrongly(), reason="PoCL chooses the right library for this processor")
class TestInstalled:
    def test_it_computes_right_or_is_refused(self, tmp_path):
        driver = next(path for path in pocl._installed().values() if path.name.startswith("libpocl"))
        (tmp_path / "vendors").mkdir()
        (tmp_path / "vendors" / "pocl.icd").write_text(f"{driver}\n")
        found = tried("opweave first", tmp_path, **{VENDORS: str(tmp_path / "vendors")})
        # Of Zen 5 its compiler knows nothing at all.
        assert found == "right" or found.startswith("refused: it builds no kernel: error: unknown target CPU 'generic'")
        assert not (tmp_path / "pocl").exists()

    def test_where_pyopencl_was_first_it_is_refused(self, tmp_path):
        found = tried("pyopencl first", tmp_path)
        assert found.startswith("refused: ")
        assert "ask opweave for devices before pyopencl" in found
