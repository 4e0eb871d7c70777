"""Drivers that come as Python packages: found by the records of their installation, and made visible to the loader."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from opweave_opencl import drivers
from opweave_opencl.drivers import VENDORS, not_loaded, packaged, visible
from tests.support.opencl import DEVICES, SKIPPED

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no folders of drivers")


def test_some_driver_works():
    """A machine without any is no fault, but the CI's has two installed where they are published."""
    published = sys.platform.startswith("linux") and platform.machine() == "x86_64"
    if published and os.environ.get("CI", "").lower() == "true":
        assert DEVICES, SKIPPED


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Intel's runtime as pip installs it, with nothing in the files."""
    site = tmp_path / "env" / "lib" / "python3" / "site-packages"
    info = site / "intel_opencl_rt-1.0.dist-info"
    vendors = tmp_path / "env" / "etc" / "OpenCL" / "vendors"
    for folder in (info, vendors):
        folder.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intel-opencl-rt\nVersion: 1.0\n")
    (vendors / "intel-cpu.icd").write_text("/opt/placeholder/lib/libacmeocl.so\n")
    (vendors / "intel-emu.icd").write_text("/opt/placeholder/lib/libacmeocl_emu.so\n")
    library = tmp_path / "env" / "lib" / "libacmeocl.so"
    library.write_bytes(b"")
    record = ["../../../etc/OpenCL/vendors/intel-cpu.icd", "../../../etc/OpenCL/vendors/intel-emu.icd"]
    record += ["../../libacmeocl.so", "intel_opencl_rt-1.0.dist-info/METADATA"]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in record))
    monkeypatch.syspath_prepend(str(site))
    return library


def test_the_library_is_found_where_its_package_put_it(package):
    assert packaged() == [package]


def test_a_package_that_is_not_there_or_lost_its_files(package, monkeypatch):
    package.unlink()
    assert packaged() == []
    monkeypatch.setattr(drivers, "PACKAGES", ("nobody-has-this",))
    assert packaged() == []


@pytest.fixture
def system(tmp_path, monkeypatch):
    """The folder in which the system lists its drivers."""
    folder = tmp_path / "vendors"
    folder.mkdir()
    (folder / "acme.icd").write_text("/usr/lib/libacme-gpu.so\n")
    monkeypatch.delenv(VENDORS, raising=False)
    monkeypatch.setenv("OPENCL_VENDOR_PATH", str(folder))
    return folder


def listed():
    return sorted(icd.read_text().strip() for icd in Path(os.environ[VENDORS]).iterdir())


@linux
def test_it_is_visible_beside_the_drivers_of_the_system_and_nothing_is_left(package, system):
    before = sorted(system.iterdir())
    with visible(packaged()):
        folder = os.environ[VENDORS]
        assert listed() == sorted([str(package), "/usr/lib/libacme-gpu.so"])
    assert VENDORS not in os.environ
    assert not os.path.exists(folder)
    assert sorted(system.iterdir()) == before


@linux
def test_a_driver_that_the_system_lists_is_not_there_twice(package, system):
    (system / "intel.icd").write_text("/opt/intel/libacmeocl.so\n")
    with visible(packaged()):
        assert listed() == ["/opt/intel/libacmeocl.so", "/usr/lib/libacme-gpu.so"]


def test_whoever_sets_the_variable_chooses_the_drivers(package, monkeypatch):
    monkeypatch.setenv(VENDORS, "/somewhere")
    with visible(packaged()):
        assert os.environ[VENDORS] == "/somewhere"
    assert os.environ[VENDORS] == "/somewhere"
    assert not_loaded(packaged()) == {}


@linux
def test_a_library_that_does_not_load_is_listed_with_the_reason(package, monkeypatch):
    monkeypatch.delenv(VENDORS, raising=False)
    assert "cannot be loaded" in not_loaded(packaged())[package]
    assert "too short" in not_loaded(packaged())[package]


# --- the driver that is installed here --------------------------------------------------------------------------------

DEVICES_SEEN = """if True:
    import os
    from opweave_opencl.discovery import find_devices
    from opweave.errors import Unavailable
    try:
        print([found.device.platform.name.strip() for found in find_devices()])
    except Unavailable as error:
        print(error.message)
    assert os.environ.get("OCL_ICD_VENDORS") == {given!r}
"""


def seen(given: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != VENDORS}
    environment |= {} if given is None else {VENDORS: given}
    code = DEVICES_SEEN.format(given=given)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


@linux
@pytest.mark.skipif(not packaged(), reason="intel-opencl-rt is not installed")
class TestInstalled:
    def test_intels_runtime_is_found_without_any_variable(self):
        assert "Intel" in seen(None)

    def test_a_folder_that_somebody_named_is_all_that_is_looked_at(self, tmp_path):
        assert "Intel" not in seen(str(tmp_path))
        (tmp_path / "own.icd").write_text(f"{packaged()[0]}\n")
        assert "Intel" in seen(str(tmp_path))
