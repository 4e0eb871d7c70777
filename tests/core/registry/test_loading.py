"""Running plugins' code: which failures there are, their state in the record, and that other plugins still load."""

from __future__ import annotations

import builtins
import sys
import threading

import pytest

from opweave import registry as registry_module
from opweave.errors import Broken, LifetimeError, NameConflict, PluginError, Unavailable, UnknownNameError
from opweave.graph.opdef import OPS
from opweave.registry import State
from tests.support.plugins_for_tests import BACKEND, PluginFolder, backend, by_name


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


def load_beside_a_good_one(folder, source, **options):
    """The record of a plugin ``bad`` with this source; a good one beside it has to be ready."""
    folder.add("bad", source, **options)
    folder.add("good")
    registry = folder.registry()
    records = by_name(registry.load_all())
    assert records["good"].state is State.READY
    assert registry.device("good").name == "good"
    assert "bad" not in {d.name.partition(":")[0] for d in registry.devices()}
    return registry, records["bad"]


BROKEN = {
    "raises at import": ("1 / 0", "ZeroDivisionError: division by zero"),
    "has a syntax error": ("def f(:", "SyntaxError"),
    "exits": ("raise SystemExit('bye')", "SystemExit: bye"),
    "raises something of its own": ("class Odd(BaseException): pass\nraise Odd('?')", "Odd: ?"),
    "raises what cannot be shown": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
        "Odd: <exception str() failed>",
    ),
    "lacks its class": ("x = 1", "has no attribute 'Acme'"),
    "misses a module of its own": ("import opweave_bad.inner", "No module named 'opweave_bad.inner'"),
    "misspells a module": ("import nunpy", "No module named 'nunpy'"),
    "misspells a module of an installed dependency": ("import numpy.linalk", "No module named 'numpy.linalk'"),
    "misses a module of opweave": ("import opweave.nothing", "No module named 'opweave.nothing'"),
    "is no class": ("Acme = 7", "opweave_bad:Acme is an object of type int, not a Backend class"),
    "is another class": ("class Acme: pass", "is the class Acme, not a Backend class"),
    "is an object": (backend() + "\nAcme = Acme()", "an object of type Acme, not a Backend class"),
    "cannot be made": (backend(extra="Acme.__init__ = lambda self, x: None"), "TypeError"),
    "devices raises": (backend(body="raise RuntimeError('driver said no')"), "RuntimeError: driver said no"),
    "devices exits": (backend(body="raise SystemExit(3)"), "SystemExit: 3"),
    "devices are not overridden": (backend(extra="del Acme.devices"), "NotImplementedError"),
    "devices is None": (backend("None"), "Acme.devices() returned None, not a sequence"),
    "devices is a text": (backend("'cpu'"), "Acme.devices() returned an object of type str"),
    "devices has strangers": (backend("[Unit(), 3]"), "an object of type int among its devices"),
    "one device twice": (backend("[Unit()] * 2"), "returned one device twice"),
    "ids twice": (backend("[Unit('a'), Unit('A')]"), "two devices are called 'bad:A'"),
    "id is a number": (backend("[Unit(0)]"), "the device id 0 is not a str"),
    "id has a space": (backend("[Unit('a b')]"), "'a b'"),
    "id is empty": (backend("[Unit('')]"), "''"),
    "kind is a text": (backend("[Unit(kind='GPU')]"), "Unit.kind is 'GPU', not a member of opweave.Kind"),
    "hardware_id is a number": (backend("[Unit(hardware_id=7)]"), "Unit.hardware_id is 7"),
    "no kernels": (backend(extra="del Unit.kernels"), "Unit has no KernelTable"),
    "kernels are a list": (backend(extra="Unit.kernels = []"), "Unit has no KernelTable"),
    "space is a text": (backend("[Unit(space='host')]"), "Unit is in an object of type str, which is no MemorySpace"),
    "shared spaces are None": (backend("[Unit(shared_spaces=None)]"), "Unit.shared_spaces is None"),
    "stream_class is an object": (backend("[Unit(stream_class=3)]"), "Unit.stream_class is an object of type int"),
}


class TestBroken:
    @pytest.mark.parametrize(("source", "error"), BROKEN.values(), ids=BROKEN)
    def test_is_recorded_and_the_others_go_on(self, folder, source, error):
        registry, record = load_beside_a_good_one(folder, source)
        assert record.state is State.BROKEN
        assert error in record.error
        assert "opweave-bad" in record.remedy or "entry point" in record.remedy
        with pytest.raises(Broken) as caught:
            registry.device("bad:0")
        assert error in str(caught.value)
        assert (caught.value.plugin, caught.value.distribution, caught.value.version) == ("bad", "opweave-bad", "1.0")

    def test_keeps_the_last_frames_and_the_cause(self, folder):
        source = "def deep():\n    raise ValueError('here')\n\ndef outer():\n    deep()\n\nouter()\n"
        registry, record = load_beside_a_good_one(folder, source)
        assert "line 2, in deep" in record.traceback
        assert "raise ValueError('here')" in record.traceback
        assert "importlib" not in record.traceback
        with pytest.raises(Broken) as caught:
            registry.device("bad")
        assert isinstance(caught.value.__cause__, ValueError)

    def test_does_not_keep_the_plugins_objects_alive(self, folder):
        source = """
            import builtins, weakref

            class Handle:
                pass

            def open_driver():
                handle = Handle()
                builtins.handle = weakref.ref(handle)
                1 / 0

            open_driver()
        """
        try:
            load_beside_a_good_one(folder, source)
            assert builtins.handle() is None  # type: ignore[attr-defined]
        finally:
            del builtins.handle  # type: ignore[attr-defined]

    def test_a_module_of_an_entry_point_that_does_not_exist(self, folder):
        _, record = load_beside_a_good_one(folder, "", value="opweave_bda:Acme")
        assert record.state is State.BROKEN
        assert "No module named 'opweave_bda'" in record.error

    def test_ctrl_c_is_the_users(self, folder):
        folder.add("slow", "raise KeyboardInterrupt")
        registry = folder.registry()
        with pytest.raises(KeyboardInterrupt):
            registry.load_all()
        assert by_name(registry.plugins())["slow"].state is State.DISCOVERED

    def test_strict_raises_all_faults_together(self, folder):
        folder.add("boom", "1 / 0")
        folder.add("future", requires=("opweave>=9",))
        folder.add("lacking", "import a_module_that_nobody_has", requires=("a-module-that-nobody-has",))
        folder.add("good")
        registry = folder.registry()
        with pytest.raises(ExceptionGroup, match="boom, future") as caught:
            registry.load_all(strict=True)
        assert [getattr(e, "plugin", None) for e in caught.value.exceptions] == ["boom", "future"], (
            "unavailable is no fault"
        )
        assert registry.device("good")


class TestUnavailable:
    def test_the_plugin_says_so(self, folder):
        source = backend(body="raise Unavailable('no driver', remedy='install one')")
        registry, record = load_beside_a_good_one(folder, source)
        assert (record.state, record.error, record.remedy) == (State.UNAVAILABLE, "no driver", "install one")
        with pytest.raises(Unavailable, match=r"plugin 'bad' \(opweave-bad 1.0\): no driver\n  remedy: install one"):
            registry.device("bad")

    def test_at_import_too(self, folder):
        _, record = load_beside_a_good_one(folder, BACKEND.replace("\n    ", "\n") + "\nraise Unavailable('no card')")
        assert (record.state, record.error) == (State.UNAVAILABLE, "no card")

    @pytest.mark.parametrize("where", ["import", "devices"])
    def test_a_third_party_module_is_missing(self, folder, where):
        line = "import a_module_that_nobody_has.inner"
        source = line if where == "import" else backend(body=line)
        _, record = load_beside_a_good_one(folder, source, requires=("opweave>=0.1", "a-module-that-nobody-has"))
        assert record.state is State.UNAVAILABLE
        assert "a_module_that_nobody_has" in record.error
        assert record.remedy == 'pip install "a-module-that-nobody-has"'

    def test_a_module_may_be_called_otherwise_than_its_distribution(self, folder):
        _, record = load_beside_a_good_one(folder, "import nobodys_module", requires=("numpy", "PyNobody>=2"))
        assert record.state is State.UNAVAILABLE
        assert record.remedy == 'pip install "PyNobody>=2"'

    def test_the_remedy_follows_the_plugins_own_requirements(self, folder):
        requires = ("opweave>=0.1", "a-module.that_nobody-has[x]>=2,<3")
        _, record = load_beside_a_good_one(folder, "import a_module_that_nobody_has", requires=requires)
        assert record.remedy == 'pip install "a-module.that_nobody-has<3,>=2"'

    def test_no_devices_are_no_devices(self, folder):
        _, record = load_beside_a_good_one(folder, backend("[]"))
        assert (record.state, record.error) == (State.UNAVAILABLE, "it found no device on this machine")


class TestLoading:
    def test_all_is_idempotent(self, folder):
        folder.add("acme", "import builtins\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\n" + backend())
        folder.add("boom", "import builtins\nbuiltins.booms = getattr(builtins, 'booms', 0) + 1\n1 / 0")
        registry = folder.registry()
        try:
            first = registry.load_all()
            device = registry.device("acme")
            assert registry.load_all() == first
            assert registry.device("acme") is device
            with pytest.raises(Broken):
                registry.device("boom")
            assert (builtins.loads, builtins.booms) == (1, 1)  # type: ignore[attr-defined]
        finally:
            del builtins.loads, builtins.booms  # type: ignore[attr-defined]

    def test_asking_for_a_device_imports_only_its_plugin(self, folder):
        folder.add("torchlike", backend("[Unit('cuda:0'), Unit('cpu')]"))
        folder.add("other")
        registry = folder.registry()
        assert registry.device("torchlike:cuda:0").name == "torchlike:cuda:0"
        assert folder.imported() == {"opweave_torchlike"}
        assert by_name(registry.plugins())["other"].state is State.DISCOVERED
        assert {d.name for d in registry.devices()} >= {"other"}

    def test_one_by_name_raises_its_cause_and_may_be_tried_again(self, folder):
        switch = folder.path / "driver"
        body = f"if not __import__('os').path.exists({str(switch)!r}): raise Unavailable('no driver')"
        folder.add("acme", backend(body=body))
        registry = folder.registry()
        with pytest.raises(Unavailable, match="no driver"):
            registry.load("ACME")
        switch.touch()
        with pytest.raises(Unavailable, match="no driver"):
            registry.device("acme")
        record = registry.load("acme")
        assert (record.state, record.devices, record.error) == (State.READY, ("acme",), "")

    def test_an_unknown_name_gets_suggestions(self, folder):
        folder.add("acme")
        with pytest.raises(UnknownNameError, match="no plugin named 'amce'; did you mean 'acme'"):
            folder.registry().load("amce")

    def test_a_file(self, folder, tmp_path):
        file = tmp_path / "loose.py"
        file.write_text(backend())
        registry = folder.registry()
        record = registry.load(file)
        assert record[:3] == ("loose", "", "")
        assert registry.device("loose").name == "loose"
        assert registry.load(str(file)) == record

    def test_a_file_that_fails(self, folder, tmp_path):
        file = tmp_path / "loose.py"
        file.write_text("1 / 0")
        registry = folder.registry()
        with pytest.raises(Broken, match="ZeroDivisionError") as caught:
            registry.load(str(file))
        assert f"correct {file}" in str(caught.value)
        assert not any(m.startswith("opweave_backend_loose") for m in sys.modules)
        file.write_text(backend(extra="class Second(Acme): pass"))
        with pytest.raises(Broken, match=r"several Backend classes \(Acme, Second\)"):
            registry.load(str(file))
        file.write_text("x = 1")
        with pytest.raises(Broken, match="no Backend class"):
            registry.load(str(file))
        file.write_text(backend(extra="class _Helper(Acme): pass"))
        assert registry.load(str(file)).state is State.READY

    def test_a_file_that_is_not_there(self, folder, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"is no \.py file$"):
            folder.registry().load(tmp_path / "nothing.py")
        with pytest.raises(FileNotFoundError, match=r"load_all_from_path\(\) takes folders"):
            folder.registry().load(tmp_path)

    def test_a_file_cannot_take_a_name(self, folder, tmp_path):
        folder.add("acme")
        file = tmp_path / "Acme.py"
        file.write_text(backend())
        registry = folder.registry()
        with pytest.raises(NameConflict, match=r"opweave-acme 1\.0 both claim the name 'Acme'"):
            registry.load(file)
        assert registry.device("acme").backend is registry.backend("acme"), "the first to have it keeps it"

    def test_a_folder(self, folder, tmp_path):
        with PluginFolder(tmp_path / "target") as target:
            target.add("here")
            target.add("boom", "1 / 0")
            folder.add("elsewhere")
            registry = folder.registry()
            records = by_name(registry.load_all_from_path(target.path))
            assert {name: r.state for name, r in records.items()} == {"here": State.READY, "boom": State.BROKEN}
            assert registry.load_all_from_path(target.path) == tuple(records.values()), "nothing is found twice"
            assert by_name(registry.plugins())["elsewhere"].state is State.DISCOVERED

    def test_a_folder_that_is_not_there(self, folder, tmp_path):
        with pytest.raises(NotADirectoryError):
            folder.registry().load_all_from_path(tmp_path / "nothing")
        with pytest.raises(NotADirectoryError, match="a folder is a path, not 5"):
            folder.registry().load_all_from_path(5)

    def test_a_plugin_may_ask_while_it_is_loaded(self, folder):
        folder.add(
            "a_nosy", "import builtins\nbuiltins.seen = [d.name for d in builtins.registry.devices()]\n" + backend()
        )
        folder.add("b_vain", "import builtins\nbuiltins.registry.device('b_vain')\n")
        registry = builtins.registry = folder.registry()  # type: ignore[attr-defined]
        try:
            names = {d.name for d in registry.devices()}
            assert names == {"a_nosy", "host"}
            assert builtins.seen == ["host"]  # type: ignore[attr-defined]
        finally:
            del builtins.registry, builtins.seen  # type: ignore[attr-defined]
        assert "while it is being loaded" in by_name(registry.plugins())["b_vain"].error

    def test_many_threads_load_each_plugin_once(self, folder):
        folder.add("acme", backend(body="import time; time.sleep(0.02)"))
        registry = folder.registry()
        barrier, found = threading.Barrier(8), []

        def ask():
            barrier.wait()
            found.append((registry.device("acme"), registry.devices()))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(found)) == 1

    def test_registries_do_not_disturb_each_other(self, folder):
        folder.add("acme")
        one, two = folder.registry(), folder.registry()
        assert one.device("acme") is not two.device("acme")
        two.unload("acme")
        assert one.device("acme").backend is one.backend("acme")


HOOKS = """
    import opweave.registry as ow

    class Left(Acme):
        name = "left"

    class Right(Acme):
        name = "right"
"""


def hooks(*functions: str, **options: str) -> str:
    marked = "\n".join(f"@hookimpl\n{function}" for function in functions)
    return backend(extra=HOOKS, **options) + marked


class TestModules:
    def test_a_single_backend_is_called_like_the_entry_point(self, folder):
        folder.add("acme", hooks("def opweave_backends(): return [Left()]"), value="opweave_acme")
        registry = folder.registry()
        assert registry.device("acme").backend.version == "1.0"

    def test_several_have_names_of_their_own(self, folder):
        folder.add("acme", hooks("def opweave_backends(): return Left(), Right()"), value="opweave_acme")
        registry = folder.registry()
        assert registry.device("RIGHT").name == "right", "found though no entry point is called so"
        assert by_name(registry.plugins())["acme"].devices == ("left", "right")
        registry.unload("left")
        assert by_name(registry.plugins())["acme"].devices == ("right",)

    def test_of_several_one_may_be_unavailable(self, folder):
        body = "if self.name == 'left': raise Unavailable('no left', remedy='turn')"
        folder.add("acme", hooks("def opweave_backends(): return Left(), Right()", body=body), value="opweave_acme")
        record = by_name(folder.registry().load_all())["acme"]
        assert (record.state, record.devices) == (State.READY, ("right",))
        assert (record.error, record.remedy) == ("no left", "turn")

    @pytest.mark.parametrize(
        ("function", "error"),
        [
            ("def opweave_backends(): return 5", "returned an object of type int, not a sequence"),
            ("def opweave_backends(): return [Acme]", "returned the class Acme among its backends"),
            ("def opweave_backends(): return [Left(), Left()]", "have one name: left, left"),
            ("def opweave_backends(): return [Left(), Acme()]", "Acme has no name"),
            ("def opweave_backends(): 1 / 0", "ZeroDivisionError"),
            ("def opweave_ops(): return ['add']", "returned an object of type str among its definitions"),
            ("def opweave_backend(): return []", "opweave_backend"),
            ("def opweave_cli(app, color): pass", "color"),
        ],
    )
    def test_nonsense_is_broken(self, folder, function, error):
        folder.add("good")
        folder.add("bad", hooks(function), value="opweave_bad")
        records = by_name(folder.registry().load_all())
        assert records["good"].state is State.READY
        assert records["bad"].state is State.BROKEN
        assert error in records["bad"].error

    def test_frames_are_those_of_the_plugin(self, folder):
        folder.add("bad", hooks("def opweave_backends(): 1 / 0"), value="opweave_bad")
        record = by_name(folder.registry().load_all())["bad"]
        assert record.traceback.count("File") == 1
        assert "in opweave_backends" in record.traceback

    def test_a_backend_of_a_taken_name(self, folder):
        folder.add("left")
        folder.add("acme", hooks("def opweave_backends(): return Left(), Right()"), value="opweave_acme")
        records = by_name(folder.registry().load_all())
        assert records["left"].state is State.READY
        assert records["acme"].state is State.BROKEN
        assert "opweave-acme 1.0 and opweave-left 1.0 both claim the name 'left'" in records["acme"].error

    def test_operations_come_and_go_with_the_plugin(self, folder):
        define = "def opweave_ops(): return [OP]"
        make = "OP = OpDef('acme_twist', infer=lambda x: (x.shape, x.dtype), reference=lambda x: x)\n"
        source = hooks("def opweave_backends(): return [Acme()]", define).replace("class Left", make + "class Left")
        folder.add("acme", source, value="opweave_acme")
        registry = folder.registry()
        registry.load("acme")
        assert OPS["acme_twist"].family == "third-party"
        registry.unload("acme")
        assert "acme_twist" not in OPS

    def test_operations_of_a_plugin_that_fails_are_taken_back(self, folder):
        make = "OP = OpDef('acme_twist', infer=lambda x: (x.shape, x.dtype), reference=lambda x: x)\n"
        source = hooks("def opweave_backends(): 1 / 0", "def opweave_ops(): return [OP]")
        folder.add("acme", source.replace("class Left", make + "class Left"), value="opweave_acme")
        assert by_name(folder.registry().load_all())["acme"].state is State.BROKEN
        assert "acme_twist" not in OPS

    def test_programs_are_shown_and_a_failing_observer_is_a_warning(self, folder):
        folder.add("watch", hooks("def opweave_program_built(program): program.append('seen')"), value="opweave_watch")
        folder.add("fails", hooks("def opweave_program_built(): raise KeyError('x')"), value="opweave_fails")
        registry = folder.registry()
        registry.load_all()
        program: list = []
        with pytest.warns(RuntimeWarning, match="opweave_program_built of plugin 'fails' failed: KeyError"):
            registry.hooks.notify("opweave_program_built", program=program)
        assert program == ["seen"]
        registry.hooks.unregister(sys.modules["opweave_fails"])
        registry.hooks.notify("opweave_program_built", program=program)
        assert program == ["seen", "seen"]

    def test_a_file_may_have_hooks(self, folder, tmp_path):
        file = tmp_path / "loose.py"
        file.write_text(hooks("def opweave_backends(): return Left(), Right()"))
        assert folder.registry().load(file).devices == ("left", "right")


class TestUnload:
    def test_forgets_the_devices_until_it_is_loaded_again(self, folder):
        folder.add("acme")
        registry = folder.registry()
        device = registry.device("acme")
        backend = device.backend
        registry.devices()
        registry.unload(backend)
        assert device.backend is None
        assert [d.name for d in registry.devices()] == ["host"]
        assert by_name(registry.plugins())["acme"].state is State.DISCOVERED
        assert registry.device("acme") is not device

    def test_is_refused_while_buffers_or_streams_live(self, folder):
        folder.add("acme", backend("[Unit(), Unit()]"))
        registry = folder.registry()
        buffer = registry.device("acme:1").alloc(64)
        stream = registry.open_device("acme")
        with pytest.raises(LifetimeError, match="1 stream of acme:0 and 1 buffer of acme:1"):
            registry.unload("acme")
        assert registry.device("acme:1") is buffer.device
        buffer.free()
        with pytest.raises(LifetimeError, match="1 stream of"):
            registry.unload("acme")
        stream.close()
        registry.unload("acme")

    def test_what_lies_in_a_dead_cycle_is_not_in_use(self, folder):
        folder.add("acme")
        registry = folder.registry()
        cycle: list = [registry.device("acme").alloc(64)]
        cycle.append(cycle)
        del cycle
        registry.unload("acme")

    def test_a_file_can_be_changed_and_loaded_again(self, folder, tmp_path):
        file = tmp_path / "loose.py"
        file.write_text(backend("[Unit()]"))
        registry = folder.registry()
        assert registry.load(file).devices == ("loose",)
        registry.unload("loose")
        file.write_text(backend("[Unit(), Unit(), Unit()]"))
        assert registry.load(file).devices == ("loose:0", "loose:1", "loose:2")

    def test_the_host_stays(self, folder):
        with pytest.raises(LifetimeError, match="built-in"):
            folder.registry().unload("host")

    def test_what_is_not_loaded_cannot_be_unloaded(self, folder):
        folder.add("acme")
        with pytest.raises(UnknownNameError, match="no loaded backend named 'acme'"):
            folder.registry().unload("acme")


def test_every_failure_is_a_plugin_error(folder):
    folder.add("boom", "1 / 0")
    with pytest.raises(PluginError):
        folder.registry().load("boom")


def test_the_marker_is_that_of_pluggy():
    from opweave.registry import hookimpl

    @hookimpl(trylast=True)
    def implemented(x): ...

    assert implemented.opweave_impl["trylast"] is True  # type: ignore[attr-defined]


def test_plugins_are_called_for_every_built_program(monkeypatch, folder):
    folder.add("watch", hooks("def opweave_program_built(program): program.append('seen')"), value="opweave_watch")
    default = registry_module.REGISTRY
    monkeypatch.setattr(default, "hooks", folder.registry().hooks)
    program: list = []
    registry_module.program_built(program)
    assert program == []
    watching = folder.registry()
    watching.load_all()
    monkeypatch.setattr(default, "hooks", watching.hooks)
    registry_module.program_built(program)
    assert program == ["seen"]
