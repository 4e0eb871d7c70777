"""What devices are called, how they are found, in which order they come, and what a program registers itself."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

import opweave
from opweave import registry as default
from opweave.contract import Backend, Device, Features, Kind, SetThreads, Stream
from opweave.contract.kernels import KernelTable
from opweave.errors import Broken, NameConflict, Unavailable, UnknownNameError
from opweave.registry import Registry, State
from opweave.registry.naming import device_names, parse_spec
from opweave.runtime.host.memory import HostMemory
from tests.support.plugins_for_tests import BACKEND, PluginFolder


class Worker(Stream):
    """Takes the parameters ``threads`` and ``label``."""

    def __init__(self, device: Device, threads: int = 1, label: str = "") -> None:
        super().__init__(device)
        self.params = threads, label


class Unit(HostMemory):
    kind = Kind.CPU
    kernels = KernelTable()

    def __init__(self, id: str | None = None, kind: Kind = Kind.CPU, hardware_id: str | None = None) -> None:
        self.id, self.kind, self.hardware_id = id, kind, hardware_id

    def _open(self, **params: Any) -> Stream:
        return Worker(self, **params)


class Family(Backend):
    def __init__(self, name: str, *devices: Device, priority: int = 0) -> None:
        self.name, self.priority = name, priority
        self._devices = devices

    def devices(self):
        return self._devices


def registry_of(*backends: Backend) -> Registry:
    """A registry that looks for nothing on this machine."""
    registry = Registry(environ={}, search=[])
    for backend in backends:
        registry.register(backend)
    return registry


def names(devices) -> list[str]:
    return [device.name for device in devices]


class TestNames:
    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            ([None], ["acme"]),
            ([None, None], ["acme:0", "acme:1"]),
            (["0"], ["acme:0"]),
            (["cuda:0", "cpu"], ["acme:cuda:0", "acme:cpu"]),
            ([None, "0", None], ["acme:1", "acme:0", "acme:2"]),
            ([], []),
        ],
    )
    def test_follow_the_ids(self, ids, expected):
        assert device_names("acme", ids) == expected

    def test_later_devices_change_no_name(self):
        assert device_names("acme", [None, "x"], ["acme"]) == ["acme:1", "acme:x"]
        assert device_names("acme", [None], ["acme:0", "acme:1"]) == ["acme:2"]
        assert device_names("acme", [None], ["acme:1"]) == ["acme:2"]
        with pytest.raises(Broken, match="two devices are called 'acme:X'"):
            device_names("acme", ["X"], ["acme:x"])

    def test_are_set_on_the_devices(self):
        family = Family("acme", Unit("a"), Unit("b"))
        registry_of(family)
        assert [(d.name, d.backend) for d in family.devices()] == [("acme:a", family), ("acme:b", family)]


class TestLookup:
    def test_has_no_regard_to_case(self):
        device = Unit("CUDA:0")
        registry = registry_of(Family("Acme", device))
        for name in ("Acme:CUDA:0", "acme:cuda:0", "ACME", "acme"):
            assert registry.device(name) is device
        assert registry.backend("ACME") is device.backend
        assert device.name == "Acme:CUDA:0"

    def test_a_bare_prefix_is_the_first_device(self):
        registry = registry_of(Family("acme", Unit("b"), Unit("a")))
        assert registry.device("acme").name == "acme:b"

    @pytest.mark.parametrize("name", ["acme:7", "acme:", "acmee:0", "", ":", "acme:a:b"])
    def test_an_unknown_device(self, name):
        registry = registry_of(Family("acme", Unit("0"), Unit("1")))
        with pytest.raises(UnknownNameError, match="there is no device named") as caught:
            registry.device(name)
        assert "acme:0" in str(caught.value)

    def test_an_unknown_device_lists_what_is_there_and_the_backend_says_what_would_make_it(self):
        class Counted(Family):
            def why_no_device(self, id):
                return f"Set ACME_DEVICES={id}." if id else ""

        registry = registry_of(Counted("acme", Unit("0")))
        with pytest.raises(
            UnknownNameError, match=r"did you mean 'acme:0'\? There are: acme:0, host\. Set ACME_DEVICES=1\."
        ):
            registry.device("acme:1")

    def test_an_unknown_backend(self):
        with pytest.raises(UnknownNameError, match="no backend named 'acne'; did you mean 'acme'"):
            registry_of(Family("acme", Unit())).backend("acne")

    def test_by_kind(self):
        registry = registry_of(Family("acme", Unit("c"), Unit("g", Kind.GPU), Unit("h", Kind.GPU)))
        assert registry.device(kind=Kind.GPU).name == "acme:g"
        assert registry.device(kind="gpu").name == "acme:g"
        assert names(registry.devices("GPU")) == ["acme:g", "acme:h"]
        assert names(registry.devices(Kind.IGPU)) == []
        with pytest.raises(UnknownNameError, match="no device of kind named 'IGPU'; did you mean 'CPU' or 'GPU'"):
            registry.device(kind=Kind.IGPU)
        with pytest.raises(UnknownNameError, match=r"no kind of device named 'gpus'; did you mean .*'GPU'"):
            registry.device(kind="gpus")

    def test_takes_a_name_or_a_kind(self):
        with pytest.raises(TypeError):
            registry_of().device()
        with pytest.raises(TypeError):
            registry_of().device("host", kind=Kind.HOST)


class TestOpen:
    @pytest.mark.parametrize(
        ("spec", "name", "params"),
        [
            ("cpu", "cpu", {}),
            ("torch:cuda:0?threads=2", "torch:cuda:0", {"threads": 2}),
            ("a?x=-1&y=0.5&z=1e3&w=true&v=False", "a", {"x": -1, "y": 0.5, "z": 1000.0, "w": True, "v": False}),
            ("a?path=/dev/x%26y&empty=&text=two%20words", "a", {"path": "/dev/x&y", "empty": "", "text": "two words"}),
        ],
    )
    def test_parameters_are_read(self, spec, name, params):
        found = parse_spec(spec)
        assert found == (name, params)
        assert [type(v) for v in found[1].values()] == [type(v) for v in params.values()]

    @pytest.mark.parametrize("spec", ["a?", "a?x", "a?=1", "a?x=1&", "a?x=1&x=2"])
    def test_parameters_that_cannot_be_read(self, spec):
        with pytest.raises(ValueError, match=r"^.*a\?"):
            parse_spec(spec)

    def test_reach_the_device(self):
        registry = registry_of(Family("acme", Unit()))
        with registry.open_device("acme?threads=2&label=x", label="y") as stream:
            assert stream.device is registry.device("acme")
            assert isinstance(stream, Worker)
            assert stream.params == (2, "y")

    def test_that_the_device_does_not_take(self):
        registry = registry_of(Family("acme", Unit()))
        with pytest.raises(TypeError, match="acme does not take colour"):
            registry.open_device("acme?colour=red")
        with pytest.raises(TypeError, match="host does not take threads"):
            registry.open_device("host?threads=2")


class TestOrder:
    def test_is_by_kind_then_priority_and_the_host_is_last(self):
        registry = registry_of(
            Family("cpu", Unit(), priority=50),
            Family("slow", Unit("g", Kind.GPU), Unit("i", Kind.IGPU)),
            Family("fast", Unit("a", Kind.ACCEL), Unit("g", Kind.GPU), priority=10),
        )
        expected = ["fast:g", "slow:g", "slow:i", "fast:a", "cpu", "host"]
        assert names(registry.devices()) == expected
        assert names(registry.default_devices()) == expected
        assert [b.name for b in registry.backends()] == ["cpu", "fast", "slow", "host"]

    @pytest.mark.parametrize("kinds", [("GPU", "CPU"), ("IGPU", "ACCEL"), ("ACCEL", "CPU"), ("CPU",), ()])
    def test_the_best_device(self, kinds):
        registry = registry_of(*(Family(k.lower(), Unit(None, Kind[k])) for k in reversed(kinds)))
        assert registry.best_device().kind.name == (kinds[0] if kinds else "HOST")

    def test_hardware_is_used_once_through_the_backend_of_higher_priority(self):
        registry = registry_of(
            Family("open", Unit("0", Kind.GPU, "pci:1"), Unit("1", Kind.GPU, "pci:2"), priority=1),
            Family("vendor", Unit("x", Kind.ACCEL, "pci:1"), priority=2),
            Family("plain", Unit("a"), Unit("b"), priority=0),
        )
        assert names(registry.default_devices()) == ["open:1", "vendor:x", "plain:a", "plain:b", "host"]
        assert names(registry.devices()) == ["open:0", "open:1", "vendor:x", "plain:a", "plain:b", "host"]

    def test_hardware_that_a_backend_shows_twice_is_used_once(self):
        registry = registry_of(Family("open", Unit("0", Kind.GPU, "pci:1"), Unit("1", Kind.GPU, "pci:1")))
        assert names(registry.default_devices()) == ["open:0", "host"]


class TestRegister:
    def test_a_class_is_called_like_itself(self):
        class Acme(Backend):
            def devices(self):
                return [Unit()]

        registry = registry_of()
        backend = registry.register(Acme)
        assert registry.device("acme").backend is backend
        record = registry.plugins()[0]
        assert (record.name, record.distribution, record.devices) == ("acme", "", ("acme",))
        assert record.value.endswith("Acme")

    def test_the_same_object_twice_is_once(self):
        family = Family("acme", Unit())
        registry = registry_of(family, family)
        assert names(registry.devices()) == ["acme", "host"]

    def test_a_taken_name(self):
        registry = registry_of(Family("acme", Unit()))
        with pytest.raises(NameConflict, match="both claim the name 'ACME'"):
            registry.register(Family("ACME", Unit()))
        with pytest.raises(NameConflict, match="opweave"):
            registry.register(Family("host", Unit()))
        assert names(registry.devices()) == ["acme", "host"]

    def test_what_a_plugin_may_not_either(self):
        registry = registry_of()
        with pytest.raises(Unavailable, match="no device"):
            registry.register(Family("acme"))
        with pytest.raises(Broken, match="cannot be the name of a backend"):
            registry.register(Family("a:b", Unit()))
        with pytest.raises(Broken, match="among its devices"):
            registry.register(Family("acme", "cpu"))  # type: ignore[arg-type]
        device = Unit()
        registry.register(Family("one", device))
        with pytest.raises(NameConflict, match="registered already, as 'one'"):
            registry.register(Family("two", device))
        assert names(registry.devices()) == ["one", "host"]

    def test_devices_of_an_existing_backend(self):
        family = Family("acme", Unit())
        registry = registry_of(family)
        assert registry.register_device(Unit(), "ACME").name == "acme:1"
        assert registry.register_device(Unit("x"), family).name == "acme:x"
        assert names(registry.devices()) == ["acme", "acme:1", "acme:x", "host"]
        with pytest.raises(Broken, match="two devices are called 'acme:x'"):
            registry.register_device(Unit("x"), family)
        with pytest.raises(UnknownNameError, match="no loaded backend"):
            registry.register_device(Unit(), "nosuch")

    def test_devices_alone(self):
        registry = registry_of()
        first, second = registry.register_device(Unit()), registry.register_device(Unit("b"))
        assert names([first, second]) == ["unit", "unit:b"]
        assert first.backend is second.backend is registry.backend("unit")
        with pytest.raises(NameConflict, match="registered already, as 'unit'"):
            registry.register_device(first)
        registry.unload("unit")
        assert names(registry.devices()) == ["host"]
        assert first.backend is None

    def test_a_device_without_kernels(self):
        class Bare(HostMemory):
            pass

        class Memory(HostMemory):
            kernels = KernelTable()

        class Rules(HostMemory):
            def _why_not(self, step):
                return "nothing runs here"

        class Own(HostMemory):
            def __init__(self):
                self.kernels = KernelTable("f32")
                self.kernels("neg")(lambda stream, op, out, x: lambda: None)

        with pytest.raises(Broken, match=r"Bare has no KernelTable.*only holds memory that is KernelTable\(\)"):
            registry_of().register_device(Bare())
        for usable in (Memory, Rules, Own):
            assert registry_of().register_device(usable()).kernels is not None


class Threads:
    def set_threads(self, n: int) -> None:
        self.n = n


class TestExtensions:
    """Optional procedures of a backend, by protocol or by name."""

    def test_are_found_beside_the_backend(self):
        threads = Threads()

        class Acme(Family):
            def extensions(self):
                return [threads]

            def features(self):
                return {"driver": 7}

        backend = registry_of(Acme("acme", Unit())).backend("acme")
        assert backend.extension(SetThreads) is threads
        backend.extension("set_threads")(3)
        assert threads.n == 3
        assert backend.extension(Features) is backend
        assert backend.extension("features")() == {"driver": 7}

    def test_that_are_not_there(self):
        backend = registry_of(Family("acme", Unit())).backend("acme")
        assert backend.extension(SetThreads) is None
        assert backend.extension("set_threads") is None
        assert backend.extension("priority") is None, "an attribute is no procedure"
        assert backend.extension("_devices") is None, "what begins with _ is private"


NAMED = """
class Acme(Backend):
    name = "chosen"

    def devices(self):
        return [Unit()]
"""
SEVERAL = """
class First(Backend):
    name = "one"

    def devices(self):
        return [Unit()]

class Second(First):
    name = "two"

@hookimpl
def opweave_backends():
    return [First(), Second()]
"""


def test_which_of_several_names_a_backend_has(tmp_path):
    """As the table in ``docs/backend/package.md`` says."""
    with PluginFolder(tmp_path / "site") as folder:
        folder.add("acme", dedent(BACKEND) + NAMED, entry="entry")
        folder.add("pair", dedent(BACKEND) + SEVERAL, value="opweave_pair")
        registry = folder.registry()
        registry.load_all()
        assert names(registry.devices()) == ["entry", "one", "two", "host"]
    file = tmp_path / "by_file.py"
    file.write_text(dedent(BACKEND) + NAMED)
    registry = registry_of()
    assert registry.load(file).devices == ("by_file",)
    assert registry.register(Family("given", Unit())).name == "given"
    assert registry.register(Family("", Unit())).name == "family"
    with pytest.raises(NameConflict, match="both claim the name 'by_file'"):
        registry.register(Family("by_file", Unit()))


@pytest.mark.parametrize(("first", "second", "left"), [("acme", "other", ["acme"]), ("one", "other", [])])
def test_which_of_two_plugins_keeps_a_name(tmp_path, first, second, left):
    with PluginFolder(tmp_path / "site") as folder:
        for distribution in (first, second):
            folder.add(distribution, entry="acme")
        registry = folder.registry()
        registry.load_all()
        assert names(registry.devices()) == [*left, "host"]
        broken = [record for record in registry.plugins() if record.error]
        assert len(broken) == 2 - len(left)
        assert all("opweave-other" in record.error and record.state is State.BROKEN for record in broken)


def test_the_module_asks_the_registry_of_the_process():
    assert default.device("host") is default.REGISTRY.device("HOST")
    assert default.devices()[-1] is default.device("host")
    assert opweave.device("host") is default.device("host")
    for name in default.__all__:
        assert hasattr(default, name)
