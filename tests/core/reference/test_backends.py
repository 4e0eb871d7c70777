"""Backends, registries and streams as ggml's functions for them behave, of the shipped backends: found by their entry
points, registered by hand, loaded from files and folders, unloaded; names, orders, errors."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Backend, Features, SetThreads
from opweave.registry import Registry, State
from tests.support.plugins_for_tests import PluginFolder, by_name
from tests.support.real_devices import NAMES, make

CLASSES = {"cpu": "CpuBackend", "opencl": "OpenCLBackend", "torch": "TorchBackend"}
KINDS = {"cpu": ow.Kind.CPU, "opencl": None, "torch": None}  # None: as the hardware is


def again(name: str) -> str:
    """A module whose class ``Again`` is the shipped backend, under another name."""
    return f"from opweave_{name}.backend import {CLASSES[name]}\nclass Again({CLASSES[name]}):\n    pass\n"


@pytest.fixture(params=NAMES)
def name(request):
    make(request.param)  # skips where there is no hardware for it
    return request.param


@pytest.fixture
def registry(name, monkeypatch):
    """A registry that sees this plugin only, and has imported nothing of it."""
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", "1")
    return Registry(environ={"OPWEAVE_BACKENDS": name})


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        yield folder


def computes(stream):
    """Whether a stream adds numbers."""
    from opweave.contract import Arg, Step
    from opweave.graph.dtypes import f32

    device = stream.device
    a, b = (Arg(device.alloc(64), 0, f32, (16,), (4,)) for _ in range(2))
    a.buffer.upload(0, np.arange(16, dtype=np.float32))
    stream.run([Step("add", b, (a, a), {})])
    stream.synchronize()
    values = b.buffer.read().view(np.float32)
    return np.array_equal(values, 2 * np.arange(16))


# --- backends and their devices ---------------------------------------------------------------------------------------


def test_a_backend_is_the_one_of_its_name(registry, name):
    """`guid`, `reg_name`, `reg_by_name`."""
    backend = registry.backend(name.upper())
    assert backend.name == name
    assert type(backend).__name__ == CLASSES[name]
    assert registry.backend(name) is backend, "it is made once"
    with pytest.raises(ow.UnknownNameError, match=f"no backend named '{name}x'; did you mean .*'{name}'"):
        registry.backend(name + "x")
    with pytest.raises(ow.errors.NameConflict, match="both claim the name"):
        registry.register(type("Other", (type(backend),), {"name": name.upper()})())
    assert registry.backend(name) is backend, "who was there first keeps the name"


def test_only_the_backend_that_was_asked_for_is_loaded(name):
    registry = Registry(environ={})
    registry.backend(name)
    loaded = {record.name for record in registry.plugins() if record.state is State.READY}
    assert loaded == {name, "host"}


def test_backends_are_counted_and_listed_in_order(registry, name):
    """`reg_count`, `reg_get`: any number of times the same objects, the host last."""
    assert [backend.name for backend in registry.backends()] == [name, "host"]
    assert registry.backends() == registry.backends()
    assert registry.backends()[0] is registry.backend(name)


def test_devices_of_a_backend_know_it_and_have_its_name(registry, name):
    """`reg_dev_count`, `reg_dev_get`, `dev_backend_reg`, `dev_name`, `name`."""
    backend = registry.backend(name)
    found = [device for device in registry.devices() if device.backend is backend]
    record = by_name(registry.plugins())[name]
    assert [device.name for device in found] == list(record.devices)
    assert len(found) >= 1
    for device in found:
        assert device.name == (name if device.id is None else f"{name}:{device.id}")
        assert registry.device(device.name) is device
        with device.open() as stream:
            assert stream.device.name == device.name
    assert found[0].id is None or len({device.id for device in found}) == len(found)


def test_devices_are_counted_and_listed_in_order(registry, name):
    """`dev_count`, `dev_get`: by kind, and the host, which is always there, last."""
    devices = registry.devices()
    ranks = [device.kind.rank for device in devices]
    assert ranks == sorted(ranks)
    assert devices[-1] is registry.device("host")
    assert devices[-1].kind is ow.Kind.HOST
    assert registry.devices() == devices
    assert set(registry.default_devices()) <= set(devices)


def test_a_device_is_found_by_name_and_by_prefix(registry, name):
    """`dev_by_name`, `reg_find_by_name`: without regard to case; what is not there is an error with what is."""
    first = next(device for device in registry.devices() if device.backend.name == name)
    for spelled in (first.name, first.name.upper(), name, name.capitalize()):
        assert registry.device(spelled) is first
    for wrong in (f"{name}:nothing", f"{name}:", f"{name}x", ""):
        with pytest.raises(ow.UnknownNameError, match="there is no device named") as caught:
            registry.device(wrong)
        assert name in str(caught.value)


def test_a_device_is_found_by_kind(registry, name):
    """`dev_by_type`, `is_cpu`, `device_i.get_type`: the first of that kind; one that there is not is an error."""
    first = next(device for device in registry.devices() if device.backend.name == name)
    assert first.kind is (KINDS[name] or first.kind)
    assert first.kind in (ow.Kind.CPU, ow.Kind.GPU, ow.Kind.IGPU, ow.Kind.ACCEL)
    assert registry.device(kind=first.kind) is first
    assert registry.device(kind=first.kind.name.lower()) is first
    assert registry.best_device() is first
    missing = next(kind for kind in ow.Kind if not registry.devices(kind))
    with pytest.raises(ow.UnknownNameError, match=f"no device of kind named '{missing.name}'"):
        registry.device(kind=missing)
    with pytest.raises(ow.UnknownNameError, match="no kind of device"):
        registry.device(kind="gpus")
    with pytest.raises(TypeError, match="a name or a kind"):
        registry.device(first.name, kind=first.kind)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_streams_are_opened_by_name_kind_or_the_best(registry, name):
    """`dev_init`, `init_by_name`, `init_by_type`, `init_best`, `reg_init_backend`: each call a new stream."""
    first = registry.device(name)
    kind = first.kind
    made = [
        registry.open_device(name), registry.open_device(first.name.upper()), first.open(),
        registry.device(kind=kind).open(), registry.best_device().open(),
    ]  # fmt: skip
    assert len({id(stream) for stream in made}) == len(made)
    for stream in made:
        assert stream.device is first
        assert computes(stream)
        stream.close()
        with pytest.raises(ow.LifetimeError, match="was closed"):
            stream.record()
        stream.close()
    with pytest.raises(ow.UnknownNameError):
        registry.open_device(f"{name}:nothing")
    with pytest.raises(ow.UnknownNameError):
        registry.open_device(7)


def test_parameters_of_streams_are_checked(registry, name):
    """`reg_init_backend_from_str`: in the name or by keyword, of which the latter counts."""
    for spec in (f"{name}?", f"{name}?threads", f"{name}?=1", f"{name}?threads=1&threads=2"):
        with pytest.raises(ValueError, match=r"\?"):
            registry.open_device(spec)
    with pytest.raises(TypeError, match="colour"):
        registry.open_device(f"{name}?colour=red")
    with pytest.raises(TypeError, match="colour"):
        registry.open_device(name, colour="red")
    with registry.open_device(f"{name}?worker=true") as stream, registry.open_device(name) as plain:
        assert type(stream) is not type(plain)
        assert computes(stream)
    if registry.backend(name).extension(SetThreads) is not None:
        with registry.open_device(f"{name}?threads=7", threads=2) as stream:
            assert stream.threads == 2
        with pytest.raises(ow.PluginError, match="positive whole number"):
            registry.open_device(f"{name}?threads=0")
    else:
        with pytest.raises(TypeError, match="threads"):
            registry.open_device(f"{name}?threads=2")


# --- registering, loading, unloading ----------------------------------------------------------------------------------


def test_a_program_registers_backends_and_devices_itself(name):
    """`register`, `device_register`: of an empty registry, once each; then they are found as others are."""
    shipped = Registry(environ={"OPWEAVE_BACKENDS": name}).backend(name)
    registry = Registry(environ={}, search=[])
    own = registry.register(type("Mine", (type(shipped),), {"name": ""}))
    assert own.name == "mine"
    assert registry.register(own) is own
    first = registry.device("MINE")
    assert (first.backend, first.name.partition(":")[0]) == (own, "mine")
    with first.open() as stream:
        assert computes(stream)
    with pytest.raises(ow.errors.NameConflict, match="both claim the name"):
        registry.register(type("Mine", (type(shipped),), {"name": "MINE"})())
    before = [device.name for device in registry.devices()]
    (device, *_) = type(shipped)().devices()
    device.id = "further"
    assert registry.register_device(device, "mine") is device
    assert (device.name, device.backend) == ("mine:further", own)
    assert registry.device("mine:further") is device
    assert sorted([*before, "mine:further"]) == sorted(d.name for d in registry.devices())
    with pytest.raises(ow.errors.NameConflict, match="registered already"):
        registry.register_device(device)
    with pytest.raises(ow.UnknownNameError, match="no loaded backend"):
        registry.register_device(type(shipped)().devices()[0], "nothing")
    with device.open() as stream:
        assert computes(stream)


def test_backends_are_loaded_by_name_and_all_at_once(registry, name, folder):
    """`load`, `load_all`: one that fails never stops the others, and says why."""
    folder.add("again", again(name), value="opweave_again:Again")
    folder.add("broken", again(name) + "1 / 0\n", value="opweave_broken:Again")
    beside = folder.registry()
    with pytest.raises(ow.errors.Broken, match="ZeroDivisionError"):
        beside.load("broken")
    records = by_name(beside.load_all())
    assert (records["again"].state, records["broken"].state) == (State.READY, State.BROKEN)
    with beside.open_device("again") as stream:
        assert computes(stream)
    assert registry.load(name).devices == by_name(registry.load_all())[name].devices
    with pytest.raises(ow.UnknownNameError, match="no plugin named"):
        registry.load("nothing")


def test_backends_are_loaded_from_a_file_and_from_a_folder(name, folder, tmp_path):
    """`load`, `load_all_from_path`."""
    file = tmp_path / "loose.py"
    file.write_text(again(name))
    registry = Registry(environ={}, search=[])
    record = registry.load(file)
    assert (record.name, record.state) == ("loose", State.READY)
    with registry.open_device("loose") as stream:
        assert computes(stream)
    with pytest.raises(FileNotFoundError):
        registry.load(tmp_path / "nothing.py")
    folder.add("placed", again(name), value="opweave_placed:Again")
    (found,) = registry.load_all_from_path(folder.path)
    assert (found.name, found.state) == ("placed", State.READY)
    assert registry.load_all_from_path(folder.path) == (found,), "nothing is found twice"
    with pytest.raises(NotADirectoryError):
        registry.load_all_from_path(tmp_path / "nothing")


def test_a_backend_is_unloaded_when_nothing_of_it_is_in_use(registry, name):
    """`unload`: refused while buffers or streams live; then its devices are gone until it is loaded again."""
    assert registry.device(name) in registry.devices()
    device = registry.device(name)
    buffer, stream = device.alloc(64), device.open()
    with pytest.raises(ow.LifetimeError, match=r"1 (stream|buffer) of .* and 1 (stream|buffer) of"):
        registry.unload(name)
    buffer.free()
    with pytest.raises(ow.LifetimeError, match="1 stream of"):
        registry.unload(name)
    assert registry.device(name) is device
    stream.close()
    registry.unload(name)
    assert device.backend is None
    assert [d.name for d in registry.devices()] == ["host"]
    registry.load(name)
    assert registry.device(name) is not device
    with registry.open_device(name) as stream:
        assert computes(stream)
    with pytest.raises(ow.LifetimeError, match="built-in"):
        registry.unload("host")


# --- optional procedures ----------------------------------------------------------------------------------------------


def test_optional_procedures_are_found_by_protocol_and_by_name(registry, name):
    """`reg_get_proc_address`, `set_n_threads`, `get_features`: those it has; ``None`` for those it has not."""
    backend = registry.backend(name)
    threads, features = backend.extension(SetThreads), backend.extension(Features)
    assert (threads is None) == (backend.extension("set_threads") is None) == (name == "opencl")
    if features is not None:
        assert dict(backend.extension("features")()) == dict(features.features()) != {}
    assert registry.device(name).features(), "what a device has to show does not depend on its backend"
    for absent in ("nothing", "name", "_devices"):
        assert backend.extension(absent) is None
    assert isinstance(backend, Backend)
    if threads is None:
        return
    try:
        backend.extension("set_threads")(1)
        with registry.device(name).open() as stream, registry.device(name).open(threads=2) as own:
            assert (stream.threads, own.threads) == (1, 2)
            assert computes(stream)
        for wrong in (0, -1, True):
            with pytest.raises(ow.PluginError, match="positive whole number"):
                threads.set_threads(wrong)
    finally:
        threads.set_threads(None)
