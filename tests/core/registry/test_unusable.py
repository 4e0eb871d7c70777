"""Devices that are here but do not work: listed with cause and remedy, left out, and the others go on."""

from __future__ import annotations

import pytest

from opweave.contract import Device
from opweave.contract.kernels import KernelTable
from opweave.errors import Unavailable, UnknownNameError
from opweave.registry import Registry, State, UnusableDevice
from tests.support.plugins_for_tests import OLD, PluginFolder, by_name, probed

ODD = "Unit(kind=Kind.IGPU)"


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


def test_a_device_that_does_not_work_is_listed_with_cause_and_remedy_and_left_out(folder):
    folder.add("acme", probed("Unit()", OLD, "Unit()"))
    registry = folder.registry()
    assert [d.name for d in registry.devices()] == ["acme:0", "acme:2", "host"]
    record = by_name(registry.plugins())["acme"]
    assert record.state is State.READY
    assert record.devices == ("acme:0", "acme:2")
    assert record.unusable == (
        UnusableDevice("acme:1", "Old card", "no kernel image for sm_30", "install the build for it"),
    )
    assert not record.error


def test_asking_for_it_raises_the_reason(folder):
    folder.add("acme", probed("Unit()", OLD))
    registry = folder.registry()
    with pytest.raises(Unavailable, match=r"acme:1 does not work: no kernel image for sm_30") as caught:
        registry.device("Acme:1")
    assert caught.value.remedy == "install the build for it (usable: acme:0)"
    with pytest.raises(UnknownNameError):
        registry.device("acme:2")
    assert registry.device("acme").name == "acme:0"


def test_a_bare_name_is_the_first_device_that_works(folder):
    folder.add("acme", probed(OLD, "Unit()"))
    assert folder.registry().device("acme").name == "acme:1"


def test_where_none_works_the_plugin_is_unavailable_with_the_causes(folder):
    folder.add("acme", probed(OLD, ODD))
    registry = folder.registry()
    record = by_name(registry.load_all())["acme"]
    assert record.state is State.UNAVAILABLE
    assert [d.name for d in record.unusable] == ["acme:0", "acme:1"]
    with pytest.raises(Unavailable) as caught:
        registry.device("acme:0")
    assert caught.value.message.splitlines() == [
        "acme:0 (Old card) does not work: no kernel image for sm_30",
        "acme:1 does not work: trying it failed: RuntimeError: driver said no",
    ]
    assert caught.value.remedy.startswith("install the build for it; update its driver")


def test_what_was_mended_works_when_loaded_again(folder, monkeypatch):
    folder.add("acme", probed(OLD))
    registry = folder.registry()
    with pytest.raises(Unavailable):
        registry.load("acme")
    import opweave_acme  # type: ignore[import-not-found]

    monkeypatch.setattr(opweave_acme.Unit, "_probe", lambda self: None)
    record = registry.load("acme")
    assert (record.state, record.unusable) == (State.READY, ())


def test_registered_by_a_program():
    class Broken(Device):
        kernels = KernelTable()

        def _probe(self) -> None:
            raise Unavailable("it answers nothing")

    registry = Registry(environ={}, search=[])
    with pytest.raises(Unavailable, match="broken does not work: it answers nothing"):
        registry.register_device(Broken())
    assert [d.name for d in registry.devices()] == ["host"]
