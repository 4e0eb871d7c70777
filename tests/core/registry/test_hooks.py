"""Hooks of plugins: checks, file formats, commands; and which modules each imports."""

from __future__ import annotations

import pytest

from opweave.errors import UnknownNameError
from opweave.registry import Diagnosis, State
from tests.support.plugins_for_tests import PluginFolder, backend, by_name


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


DOCTOR = """
from opweave.registry import Diagnosis

@hookimpl
def opweave_backends():
    return [Acme()]

@hookimpl
def opweave_doctor(devices):
    {body}
    return [Diagnosis("driver", "slow", ", ".join(d.name for d in devices) or "none", "update it")]
"""


def doctor(body: str = "pass", **options: str) -> str:
    return backend(extra=DOCTOR.format(body=body), **options)


class TestDoctor:
    def test_says_what_the_plugins_checks_say(self, folder):
        folder.add("acme", doctor(devices="[Unit(), Unit()]"), value="opweave_acme")
        folder.add("silent", value="opweave_silent:Acme")
        assert folder.registry().diagnose() == [("acme", Diagnosis("driver", "slow", "acme:0, acme:1", "update it"))]

    def test_a_plugin_that_is_unavailable_is_asked_too(self, folder):
        folder.add("acme", doctor(devices="[]"), value="opweave_acme")
        registry = folder.registry()
        assert registry.diagnose() == [("acme", Diagnosis("driver", "slow", "none", "update it"))]
        assert by_name(registry.plugins())["acme"].state is State.UNAVAILABLE

    @pytest.mark.parametrize("body", ["1 / 0", "return 5", "return ['well']"])
    def test_a_check_that_fails_is_reported_and_the_others_go_on(self, folder, body):
        folder.add("bad", doctor(body), value="opweave_bad")
        folder.add("good", doctor(), value="opweave_good")
        found = dict(folder.registry().diagnose())
        assert found["good"].status == "slow"
        assert found["bad"].status == "wrong"
        assert "its check failed" in found["bad"].message


def test_plugins_without_devices_are_not_named_among_devices(folder):
    folder.add("acme", backend(), value="opweave_acme:Acme")
    folder.add("front", backend(extra="@hookimpl\ndef opweave_backends(): return []"), value="opweave_front")
    for name in ("zzz", "front"):
        with pytest.raises(UnknownNameError) as caught:
            folder.registry().device(name)
        assert caught.value.known == ["acme", "host"]


FORMATS = """
from opweave.registry import FileFormat

@hookimpl
def opweave_formats():
    return [
        FileFormat("acme", (".acme", ".am"), load_weights=lambda path: {"w": path.name}),
        FileFormat("sealed", (".bin",), plan=lambda path, devices, length: path.stem, magic=b"SEAL"),
    ]
"""


class TestFormats:
    @pytest.fixture
    def registry(self, folder):
        folder.add("acme", backend(body="raise SystemExit('asked for devices')", extra=FORMATS), value="opweave_acme")
        folder.add("other", "raise SystemExit('imported')")
        return folder.registry()

    def test_are_found_by_suffix_or_by_the_first_bytes(self, registry, tmp_path):
        (tmp_path / "x.ACME").write_bytes(b"")
        (tmp_path / "y.acme").write_bytes(b"SEALED")
        (tmp_path / "z.bin").write_bytes(b"something else")
        found = registry.file_format(tmp_path / "x.ACME")
        assert found.name == "acme"
        assert found.load_weights(tmp_path / "x.ACME") == {"w": "x.ACME"}
        assert registry.file_format(str(tmp_path / "y.acme")).plan(tmp_path / "y.acme", [], 1) == "y"
        assert registry.model_format(tmp_path / "y.acme").name == "sealed"
        with pytest.raises(UnknownNameError, match=r"no file format named '\.ACME'"):
            registry.model_format(tmp_path / "x.ACME")
        with pytest.raises(UnknownNameError, match=r"no file format named '.bin'"):
            registry.file_format(tmp_path / "z.bin")
        with pytest.raises(FileNotFoundError):
            registry.file_format(tmp_path / "nothing.acme")

    def test_ask_for_no_devices_and_import_no_plugin_without_hooks(self, folder, registry):
        names = [fmt.name for fmt in registry.formats()]
        assert names[:2] == ["acme", "sealed"]
        assert set(names[2:]) == {"safetensors", "GGUF"}, "the core's come last"
        assert folder.imported() == {"opweave_acme"}
        assert by_name(registry.plugins())["acme"].state is State.DISCOVERED

    def test_nonsense_is_a_warning(self, folder, registry):
        folder.add("bad", backend(extra="@hookimpl\ndef opweave_formats(): return [5]"), value="opweave_bad")
        with pytest.warns(RuntimeWarning, match="opweave_formats of plugin 'bad' failed"):
            assert {fmt.name for fmt in registry.formats()} == {"acme", "sealed", "safetensors", "GGUF"}

    def test_without_plugins_there_are_those_of_the_core(self, folder, tmp_path):
        (tmp_path / "x.acme").write_bytes(b"")
        with pytest.raises(UnknownNameError, match="plugins may add others"):
            folder.registry().file_format(tmp_path / "x.acme")
        (tmp_path / "x.safetensors").write_bytes(b"")
        assert folder.registry().file_format(tmp_path / "x.safetensors").name == "safetensors"


def test_a_module_is_imported_once_for_its_hooks_and_its_devices(folder):
    source = "import builtins\nbuiltins.imports = getattr(builtins, 'imports', 0) + 1\n" + doctor()
    folder.add("acme", source, value="opweave_acme")
    registry = folder.registry()
    import builtins

    try:
        registry.load_hook_modules()
        assert by_name(registry.plugins())["acme"].state is State.DISCOVERED
        assert registry.load("acme").devices == ("acme",)
        registry.load_hook_modules()
        assert len(registry.diagnose()) == 1
        registry.unload("acme")
        assert list(registry.hooks.implementers("opweave_doctor")) == []
        assert registry.load("acme").devices == ("acme",)
        assert builtins.imports == 1  # type: ignore[attr-defined]
    finally:
        del builtins.imports  # type: ignore[attr-defined]
