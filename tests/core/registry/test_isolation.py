"""Plugins that hang, crash their process, are uninstalled, or say that they do not suit the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from opweave import registry as registry_module
from opweave.errors import Broken, Unavailable
from opweave.registry import Registry, State
from tests.support.plugins_for_tests import PluginFolder, backend, by_name, write_distribution

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PluginFolder]:
    with PluginFolder(tmp_path / "site") as made:
        made.path.mkdir()
        yield made


@pytest.fixture(autouse=True)
def own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What processes leave that a plugin ends is kept apart for each test."""
    monkeypatch.setenv("OPWEAVE_LOADING_CACHE", str(tmp_path / "loading"))


# --- hanging ----------------------------------------------------------------------------------------------------------

WAIT = "import threading; threading.Event().wait(1000)"
HANGS = {
    "its import": WAIT + "\n" + backend(),
    "Acme()": backend(attributes=f"priority = 0\n\n            def __init__(self):\n                {WAIT}"),
    "Acme.devices()": backend(body=WAIT),
    "its score": backend(
        attributes=f"priority = 0\n\n            @classmethod\n            def score(cls):\n                {WAIT}"
    ),
}


def test_plugins_that_hang_are_left_out_and_named(folder: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_PLUGIN_TIMEOUT", "0.5")
    for i, source in enumerate(HANGS.values()):
        folder.add(f"bad{i}", source)
    folder.add("good")
    registry = folder.registry()
    with pytest.warns(RuntimeWarning) as warned:
        names = [device.name for device in registry.devices()]
    assert names == ["good", "host"]
    messages = [str(warning.message) for warning in warned]
    records = by_name(registry.plugins())
    for i, doing in enumerate(HANGS):
        why = f"{doing} did not end within 0.5 s; it is in threading.py, line "
        assert messages[i].startswith(f"plugin 'bad{i}' (opweave-bad{i} 1.0): {why}")
        record = records[f"bad{i}"]
        assert record.state is State.BROKEN
        assert record.error.startswith(why)
        assert f"OPWEAVE_DISABLE=bad{i}" in record.remedy
        assert "OPWEAVE_PLUGIN_TIMEOUT" in record.remedy
        with pytest.raises(Broken, match="did not end within"):
            registry.device(f"bad{i}")


def test_a_device_that_hangs_is_unusable_and_others_of_its_plugin_are_not(
    folder: PluginFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPWEAVE_PLUGIN_TIMEOUT", "0.5")
    probe = f"""
        def _probe(self):
            if self.id == "1":
                {WAIT}

        Unit._probe = _probe
    """
    folder.add("acme", backend("[Unit('0'), Unit('1'), Unit('2')]", extra=probe))
    record = by_name(folder.registry().load_all())["acme"]
    assert record.devices == ("acme:0", "acme:2")
    assert [device.name for device in record.unusable] == ["acme:1"]
    assert "trying acme:1 did not end within 0.5 s" in record.unusable[0].error


def test_what_a_plugin_does_behind_the_limit_changes_nothing(
    folder: PluginFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(registry_module, "go_on", go, raising=False)
    source = "from opweave import registry\nregistry.go_on.wait(60)\n"
    monkeypatch.setenv("OPWEAVE_PLUGIN_TIMEOUT", "0.2")
    folder.add("late", source + backend())
    registry = folder.registry()
    with pytest.warns(RuntimeWarning, match="late"):
        registry.load_all()
    late = [thread for thread in threading.enumerate() if thread.name == "opweave loads late"]
    go.set()
    for thread in late:
        thread.join(60)
    assert by_name(registry.plugins())["late"].state is State.BROKEN
    with pytest.raises(Broken):
        registry.device("late")
    assert registry.load("late").state is State.READY, "it is tried again where it is asked for by itself"
    assert registry.device("late").name == "late"


def test_no_limit(folder: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_PLUGIN_TIMEOUT", "0")
    thread = "import threading\nassert threading.current_thread() is threading.main_thread()\n"
    folder.add("acme", thread + backend())
    assert folder.registry().load("acme").state is State.READY


def test_plugins_use_the_registry_that_loads_them(folder: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device over devices does, in its import and when its devices are looked for; also one within the other."""
    folder.add("inner")
    outer = "from opweave import registry\nassert registry.known.device('inner').name == 'inner'\n"
    folder.add("outer", outer + backend(body="registry.known.device('inner'); registry.known.plugins()"))
    most = "from opweave import registry\nregistry.known.device('outer')\n"
    folder.add("upper", most + backend(body="registry.known.device('outer')"))
    registry = folder.registry()
    monkeypatch.setattr(registry_module, "known", registry, raising=False)
    monkeypatch.setenv("OPWEAVE_PLUGIN_TIMEOUT", "30")
    assert registry.device("upper").name == "upper"
    assert {name for name, record in by_name(registry.plugins()).items() if record.state is State.READY} >= {
        "inner", "outer", "upper",
    }  # fmt: skip


def test_a_module_that_looks_for_devices_while_it_is_imported_is_no_deadlock(tmp_path: Path) -> None:
    """The plugin imports the module that is being imported."""
    write_distribution(tmp_path / "site", "acme", "import application\n" + backend())
    (tmp_path / "application.py").write_text("import opweave as ow\nfound = [d.name for d in ow.devices()]\n")
    done = python(tmp_path, "import application; print(application.found)")
    assert done.stdout == "['acme', 'host']\n", done.stderr
    assert not done.stderr


def python(tmp_path: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process that sees the plugins in the folder ``site`` and no others."""
    environment = {
        **os.environ, "OPWEAVE_BACKEND_PATH": str(tmp_path / "site"), "OPWEAVE_PLUGIN_TIMEOUT": "30",
        "OPWEAVE_DISABLE": "cpu,cost,opencl,ort,remote,torch,onnx,ray", "PYTHONPATH": f"{tmp_path}:{ROOT}", **environ,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=100, env=environment, check=False
    )


# --- crashing ---------------------------------------------------------------------------------------------------------

LIST = "import opweave as ow; print([d.name for d in ow.devices()])"
REASON = "import opweave as ow; ow.devices(); print([p.error for p in ow.plugins() if p.name == 'bad'][0])"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        (backend(body="import os; os._exit(3)"), "ended the process with exit status 3"),
    ],
    ids=["import", "devices"],
)
def test_a_plugin_that_ended_a_process_is_named_by_the_next_one(tmp_path: Path, source: str, how: str) -> None:
    write_distribution(tmp_path / "site", "bad", source)
    write_distribution(tmp_path / "site", "good")
    assert python(tmp_path, LIST).returncode not in (0, 1)
    for _ in range(2):  # nor does the one after that end
        done = python(tmp_path, LIST)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "['good', 'host']\n"
        assert "plugin 'bad' (opweave-bad 1.0): it " + how in done.stderr
    assert how in python(tmp_path, REASON).stdout
    write_distribution(tmp_path / "repaired", "bad", backend(), version="1.1")
    done = python(tmp_path, LIST, OPWEAVE_BACKEND_PATH=str(tmp_path / "repaired"))
    assert (done.stdout, done.stderr) == ("['bad', 'host']\n", "")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_ended_for_another_reason_costs_a_child_process_once(tmp_path: Path) -> None:
    once = f"""
        import os, pathlib
        mark = pathlib.Path({str(tmp_path / "mark")!r})
        mark.write_text(mark.read_text() + "." if mark.exists() else ".")
        if mark.read_text() == ".":
            os.kill(os.getpid(), 9)  # as the system does where memory is short
    """
    write_distribution(tmp_path / "site", "acme", dedent(once) + backend())
    assert python(tmp_path, LIST).returncode == -9
    for loaded in (3, 4):  # in the child process too, then no more
        done = python(tmp_path, LIST)
        assert (done.stdout, done.stderr) == ("['acme', 'host']\n", "")
        assert len((tmp_path / "mark").read_text()) == loaded
    assert not list((tmp_path / "loading").iterdir()), "nothing is left of processes that went on"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_files_that_end_their_process_are_named_too(tmp_path: Path) -> None:
    file = tmp_path / "acme.py"
    file.write_text("import os\nos._exit(5)\n")
    load = f"import opweave as ow\ntry: ow.load({str(file)!r})\nexcept ow.PluginError as error: print(error)"
    assert python(tmp_path, load, OPWEAVE_BACKEND_PATH="").returncode == 5
    done = python(tmp_path, load, OPWEAVE_BACKEND_PATH="")
    assert done.returncode == 0, done.stderr
    assert "exit status 5" in done.stdout
    assert "OPWEAVE_DISABLE=acme" in done.stdout


# --- scores -----------------------------------------------------------------------------------------------------------


def scored(score: str) -> str:
    method = f"@classmethod\n            def score(cls):\n                return {score}"
    return backend(attributes=f"priority = 0\n\n            {method}")


BY_FUNCTION = backend(
    extra="@hookimpl\ndef opweave_backends():\n    return [Acme()]\n\ndef opweave_score():\n    return 0\n"
)


@pytest.mark.parametrize(
    "source", [scored("0"), scored("0.0"), BY_FUNCTION], ids=["class", "float", "module with hooks"]
)
def test_a_backend_that_scores_0_is_not_loaded_in_any_way(folder: PluginFolder, tmp_path: Path, source: str) -> None:
    file = tmp_path / "unsuitable.py"
    file.write_text(source)
    package = tmp_path / f"package_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    folder.add("installed", source, value="opweave_installed" if source is BY_FUNCTION else None)
    registry = folder.registry()
    for what in (file, package, "installed"):
        with pytest.raises(Unavailable, match="its score is 0"):
            registry.load(what)
    assert {record.state for record in registry.load_all() if record.name != "host"} == {State.UNAVAILABLE}
    assert [device.name for device in registry.devices()] == ["host"]
    by_path = Registry(environ={"OPWEAVE_BACKEND_PATH": str(file)}, search=[])
    assert by_name(by_path.load_all())["unsuitable"].state is State.UNAVAILABLE


def test_other_scores_do_not_matter_where_there_are_no_variants(folder: PluginFolder, tmp_path: Path) -> None:
    file = tmp_path / "suitable.py"
    file.write_text(scored("0.001"))
    assert folder.registry().load(file).state is State.READY
    for wrong in ("-1", "'high'", "float('nan')", "True"):
        file.write_text(scored(wrong))
        with pytest.raises(Broken, match="not a number of at least 0"):
            folder.registry().load(file)


# --- uninstalling -----------------------------------------------------------------------------------------------------


def uninstall(folder: PluginFolder, name: str) -> None:
    (folder.path / f"opweave_{name}.py").unlink()
    shutil.rmtree(folder.path / f"opweave_{name}-1.0.dist-info")


def test_rescan_says_what_was_uninstalled(folder: PluginFolder) -> None:
    folder.add("acme")
    folder.add("good")
    registry = folder.registry()
    device = registry.device("acme")
    registry.load_all()
    uninstall(folder, "acme")
    with pytest.warns(RuntimeWarning, match="plugin 'acme': opweave-acme 1.0 was uninstalled"):
        assert registry.rescan() == ()
    assert {d.name for d in registry.devices()} == {"good", "host"}
    assert device.backend is None
    record = by_name(registry.plugins())["acme"]
    assert (record.state, record.devices) == (State.UNAVAILABLE, ())
    assert record.error == "opweave-acme 1.0 was uninstalled"
    assert "install it again" in record.remedy
    with pytest.raises(Unavailable, match="was uninstalled"):
        registry.device("acme")
    assert registry.rescan() == (), "without a second warning"
    folder.add("acme")
    (found,) = registry.rescan()
    assert found.name == "acme"
    assert by_name(registry.plugins())["acme"].error == ""


def test_what_is_in_use_stays_until_it_is_not(folder: PluginFolder) -> None:
    folder.add("acme")
    registry = folder.registry()
    buffer = registry.device("acme").alloc(64)
    uninstall(folder, "acme")
    with pytest.warns(RuntimeWarning, match="was uninstalled; its devices stay until 1 buffer of acme are freed"):
        registry.rescan()
    record = by_name(registry.plugins())["acme"]
    assert (record.state, record.devices) == (State.READY, ("acme",))
    assert "was uninstalled" in record.error
    assert registry.device("acme") is buffer.device
    buffer.free()
    with pytest.warns(RuntimeWarning, match="was uninstalled$"):
        registry.rescan()
    assert [device.name for device in registry.devices()] == ["host"]


def test_what_was_not_loaded_goes_without_a_warning(folder: PluginFolder) -> None:
    folder.add("faulty", "1 / 0")
    registry = folder.registry()
    registry.load_all()
    folder.add("acme")
    registry.load_all()
    registry.unload("acme")
    uninstall(folder, "acme")
    uninstall(folder, "faulty")
    registry.rescan()
    with pytest.raises(Unavailable, match="was uninstalled"):
        registry.device("acme")
    assert "ZeroDivisionError" in by_name(registry.plugins())["faulty"].error


def test_a_file_that_was_deleted(folder: PluginFolder, tmp_path: Path) -> None:
    file = tmp_path / "acme.py"
    file.write_text(backend())
    registry = folder.registry()
    registry.load(file)
    file.unlink()
    with pytest.warns(RuntimeWarning, match="was deleted"):
        registry.rescan()
    assert [device.name for device in registry.devices()] == ["host"]
