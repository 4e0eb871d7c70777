"""`Registry`: the plugins and devices of a process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn

from opweave.contract.device import Backend, Device, Kind
from opweave.contract.discarding import reclaim
from opweave.errors import LifetimeError, UnknownNameError
from opweave.registry import checks, discovery
from opweave.registry.catalog import Catalog
from opweave.registry.hooks import Hooks
from opweave.registry.loading import Loader
from opweave.registry.naming import check_name, key, parse_spec
from opweave.registry.order import best, once_per_hardware, preferred
from opweave.registry.records import Family, Plugin, PluginRecord, State

if TYPE_CHECKING:
    from opweave.contract.execution import Stream

__all__ = ["Registry"]


class Registry:
    """Finds, loads, names and unloads backends. All methods may be called from any thread.

    Nothing is read before the first question, and no plugin is imported before its devices are asked for. One that
    fails keeps its cause and never stops the others.

    Args:
        environ: where ``OPWEAVE_BACKENDS``, ``OPWEAVE_DISABLE`` and ``OPWEAVE_BACKEND_PATH`` are read, once; default:
            the process's environment at the first question.
        search: folders in which installed distributions are looked for; default: the import path.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None, search: Sequence[str] | None = None) -> None:
        self.hooks = Hooks()
        self._catalog = Catalog(environ, search)
        self._loader = Loader(self._catalog, self.hooks)
        self._lock = RLock()
        self._complete = False

    # --- plugins ----------------------------------------------------------------------------------------------------

    def plugins(self) -> tuple[PluginRecord, ...]:
        """What is known about every plugin, by name, the built-in ``host`` last. Imports nothing."""
        with self._lock:
            self._catalog.scan()
            return tuple(plugin.record() for plugin in self._catalog)

    def load_all(self, *, strict: bool = False) -> tuple[PluginRecord, ...]:
        """Load every plugin that is not loaded yet, each by itself.

        What failed before is not tried again; `load` does that.

        Args:
            strict: raise if a plugin is broken or incompatible. (One whose hardware is not here is neither.)

        Returns:
            The records of all plugins.

        Raises:
            PluginError: one that ``OPWEAVE_BACKENDS`` lists failed. All others are loaded all the same.
            UnknownNameError: ``OPWEAVE_BACKENDS`` lists a name that no plugin has.
            ExceptionGroup: with ``strict``: the errors of all plugins at fault.
        """
        with self._lock:
            self._load_each()
            self._catalog.check_selected()
            at_fault = [p for p in self._catalog if p.state in (State.BROKEN, State.INCOMPATIBLE)]
            if strict and at_fault:
                summary = f"plugins at fault: {', '.join(p.name for p in at_fault)}"
                raise ExceptionGroup(summary, [p.failure() for p in at_fault])
            return self.plugins()

    def load(self, name_or_path: str | os.PathLike[str]) -> PluginRecord:
        """Load one plugin: by name, or a ``.py`` file by its path. One that failed before is tried again.

        Raises:
            PluginError: it failed; `Unavailable`, `Broken`, `Incompatible` or `NameConflict` with cause and remedy.
            UnknownNameError: there is no plugin of that name.
            FileNotFoundError: there is no such file.
        """
        with self._lock:
            self._catalog.scan()
            plugin = self._file(name_or_path) if _is_path(name_or_path) else self._catalog.find(str(name_or_path))
            if plugin is None:
                raise UnknownNameError("plugin", str(name_or_path), self._catalog.known_names())
            if plugin.tried and plugin.state is not State.READY:
                plugin.reset()
            self._loader.load(plugin)
            if plugin.state is not State.READY:
                raise plugin.failure()
            return plugin.record()

    def load_all_from_path(self, folder: str | os.PathLike[str]) -> tuple[PluginRecord, ...]:
        """Load every plugin in a folder as ``pip install --target`` makes them, each by itself.

        Returns:
            The records of the plugins found there.

        Raises:
            NotADirectoryError: there is no such folder.
        """
        path = os.path.expanduser(folder)
        if not os.path.isdir(path):
            raise NotADirectoryError(f"{path} is no folder")
        with self._lock:
            self._catalog.scan()
            found = self._catalog.admit(list(discovery.in_folder(path)))
            for plugin in found:
                self._loader.load(plugin)
            return tuple(plugin.record() for plugin in found)

    def unload(self, backend: Backend | str) -> None:
        """Forget a backend and its devices, and with the last of a plugin its hooks and operations.

        It can be loaded again: by name, or by `load_all`. Its Python modules stay imported.

        Raises:
            LifetimeError: buffers or streams of its devices are alive, or it is the built-in ``host``.
            UnknownNameError: it is not loaded.
        """
        with self._lock:
            self._catalog.scan()
            plugin, family = self._catalog.family_of(backend)
            if plugin is self._catalog.host:
                raise LifetimeError("the built-in backend 'host' cannot be unloaded")
            reclaim()
            used = _in_use(family.devices)
            if used:
                raise LifetimeError(f"backend {family.backend.name!r} is in use: free or close {' and '.join(used)}")
            if len(plugin.families) == 1:
                self._loader.forget(plugin)
                if plugin.fetch is None:
                    self._catalog.plugins.remove(plugin)
                return
            plugin.families.remove(family)
            name = key(family.backend.name)
            plugin.unusable = [d for d in plugin.unusable if key(d.name).partition(":")[0] != name]
            for device in family.devices:
                device.backend = None

    # --- registering ------------------------------------------------------------------------------------------------

    def register(self, backend: Backend | type[Backend]) -> Backend:
        """Add a backend of the program's own, called by its ``name``, else like its class in lower case.

        Registering one object twice does nothing.

        Raises:
            NameConflict: the name is taken.
            Unavailable: it found no device, or none that works.
            Broken: what its ``devices()`` returned makes no sense.
        """
        with self._lock:
            self._catalog.scan()
            backend = backend() if isinstance(backend, type) else backend
            if not any(family.backend is backend for family in self._catalog.families()):
                self._register(backend, checks.devices_of(backend))
            return backend

    def register_device(self, device: Device, backend: Backend | str | None = None) -> Device:
        """Add a device to a loaded backend, or to one that is called like the device's class in lower case.

        Raises:
            NameConflict: the device is registered already, or the class's name is that of another plugin.
            Unavailable: it does not work.
            Broken: the device lacks what every device has, or its id is taken.
            UnknownNameError: the backend is not loaded.
        """
        with self._lock:
            self._catalog.scan()
            checks.check_device(device)
            self._loader.check_unowned([device])
            if backend is None:
                known = self._catalog.family(type(device).__name__)
                if known is None or not isinstance(known.backend, _Registered):
                    self._register(_Registered(device), [device])
                    return device
                backend = known.backend
            _, family = self._catalog.family_of(backend)
            checks.adopt(family.backend, [device], family.devices)
            _, unusable = checks.probed([device])
            if unusable:
                raise checks.none_usable(unusable)
            family.devices.append(device)
            return device

    def _register(self, backend: Backend, devices: list[Device]) -> None:
        cls = type(backend)
        backend.name = backend.name or cls.__name__.lower()
        check_name(backend.name)
        plugin = Plugin(backend.name, f"{cls.__module__}:{cls.__qualname__}")
        self._catalog.check_free(plugin, backend.name)
        self._loader.check_unowned(devices)
        checks.adopt(backend, devices)
        usable, plugin.unusable = checks.probed(devices)
        if not usable:
            raise checks.none_usable(plugin.unusable)
        plugin.ready([Family(backend, usable, self._catalog.selection.rank(plugin))])
        self._catalog.plugins.append(plugin)

    # --- asking -----------------------------------------------------------------------------------------------------

    def backends(self) -> tuple[Backend, ...]:
        """All backends, the preferred first, ``host`` last. Loads all plugins at first use."""
        families = sorted(self._families(), key=lambda family: (family.rank, -family.backend.priority))
        return tuple(family.backend for family in families)

    def backend(self, name: str) -> Backend:
        """The backend called ``name``, without regard to case. Loads only the plugin of that name.

        Raises:
            PluginError: its plugin failed; this is why.
            UnknownNameError: there is none.
        """
        with self._lock:
            family = self._resolve(name)
            return family.backend if family is not None else self._unknown("backend", name)

    def devices(self, kind: Kind | str | None = None) -> tuple[Device, ...]:
        """All devices, the preferred first, ``host`` last; of one kind if given. Loads all plugins at first use.

        Preferred is what ``OPWEAVE_BACKENDS`` lists first, then by kind (GPU, IGPU, ACCEL, CPU), then by the backend's
        priority. Two backends may show one piece of hardware; both are here, `default_devices` leaves one out.

        Raises:
            PluginError, UnknownNameError: as `load_all`.
        """
        wanted = None if kind is None else _kind(kind)
        return tuple(d for d in preferred(self._families()) if wanted is None or d.kind is wanted)

    def default_devices(self) -> tuple[Device, ...]:
        """What a program runs on unless it says otherwise: as `devices`, each piece of hardware once."""
        return tuple(once_per_hardware(self._families()))

    def best_device(self) -> Device:
        """The first there is of GPU, IGPU, ACCEL, CPU, ``host``."""
        return best(self._families())

    def device(self, name: str | None = None, *, kind: Kind | str | None = None) -> Device:
        """One device: by name, without regard to case, or the preferred one of a kind.

        ``"opencl:0"`` is that device; a bare ``"opencl"`` the first of that backend. Only its plugin is loaded.

        Raises:
            PluginError: the plugin that would have it failed, or the device does not work; this is why.
            UnknownNameError: there is none.
        """
        if (name is None) == (kind is None):
            raise TypeError("device() takes a name or a kind")
        if name is None:
            wanted = _kind(kind)
            found = self.devices(wanted)
            return (
                found[0]
                if found
                else self._unknown("device of kind", wanted.name, {d.kind.name for d in self.devices()})
            )
        with self._lock:
            prefix, colon, _ = name.partition(":")
            family = self._resolve(prefix)
            if family is not None:
                for device in family.devices:
                    if key(device.name) == key(name) or not colon:
                        return device
            self._catalog.check_usable(name)
            self._unknown("device", name)

    def open_device(self, spec: str, **params: Any) -> Stream:
        """A new stream of the device that ``spec`` names, e.g. ``"cpu?threads=2"`` or ``"opencl:0"``.

        Raises:
            PluginError, UnknownNameError: as `device`.
            ValueError: the parameters in ``spec`` cannot be read.
            TypeError: the device does not take them.
        """
        name, given = parse_spec(spec)
        return self.device(name).open(**{**given, **params})

    def load_hook_modules(self) -> None:
        """Load the plugins whose entry point is a module, or a file: only those can have hooks."""
        with self._lock:
            self._catalog.scan()
            for plugin in list(self._catalog):
                if ":" not in plugin.value or plugin.value.endswith(".py"):
                    self._loader.load(plugin)

    # --- in common --------------------------------------------------------------------------------------------------

    def _load_each(self) -> None:
        self._catalog.scan()
        self._complete = True
        for plugin in list(self._catalog):
            self._loader.load(plugin)

    def _families(self) -> list[Family]:
        """Every backend, all plugins loaded."""
        with self._lock:
            if not self._complete:
                self._load_each()
            self._catalog.check_selected()
            return list(self._catalog.families())

    def _resolve(self, name: str) -> Family | None:
        """The backend called ``name``, loaded if need be; raises the failure of its plugin."""
        self._catalog.scan()
        loaded = self._catalog.family(name)
        if loaded is not None:
            return loaded
        plugin = self._catalog.find(name)
        if plugin is not None:
            self._loader.load(plugin)
            if plugin.state is not State.READY:
                raise plugin.failure()
        elif not self._complete:
            # A plugin with several backends may have one of this name.
            self._load_each()
        return self._catalog.family(name)

    def _file(self, path: str | os.PathLike[str]) -> Plugin:
        file = os.path.expanduser(path)
        if not os.path.isfile(file):
            hint = "; load_all_from_path() takes folders" if os.path.isdir(file) else ""
            raise FileNotFoundError(f"{file} is no .py file{hint}")
        return self._catalog.admit([discovery.single_file(file)])[0]

    def _unknown(self, what: str, name: str, known: Iterable[str] | None = None) -> NoReturn:
        usable = (State.READY, State.DISCOVERED, State.DISABLED)
        failed = [plugin.name for plugin in self._catalog if plugin.state not in usable]
        hint = f"(not usable: {', '.join(failed)}; `opweave plugins` says why)" if failed else ""
        raise UnknownNameError(what, name, self._catalog.known_names() if known is None else known, hint)


class _Registered(Backend):
    """The backend of devices that were registered without one."""

    def __init__(self, device: Device) -> None:
        self.name = type(device).__name__.lower()
        self._device = device

    def devices(self) -> Sequence[Device]:
        return (self._device,)


def _kind(kind: Kind | str | None) -> Kind:
    if isinstance(kind, Kind):
        return kind
    try:
        return Kind[str(kind).upper()]
    except KeyError:
        raise UnknownNameError("kind of device", str(kind), [k.name for k in Kind]) from None


def _is_path(name: str | os.PathLike[str]) -> bool:
    return not isinstance(name, str) or name.endswith(".py") or "/" in name or os.sep in name


def _in_use(devices: Iterable[Device]) -> list[str]:
    """What is alive of the devices: ``["2 buffers of acme", "1 stream of acme"]``."""

    def count() -> list[str]:
        found: list[str] = []
        for device in devices:
            buffers = sum(not buffer.freed for buffer in list(device._buffers))
            streams = sum(not stream.closed for stream in list(device._streams))
            for n, what in ((buffers, "buffer"), (streams, "stream")):
                if n:
                    found.append(f"{n} {what}{'s' * (n > 1)} of {device.name}")
        return found

    if count():
        gc.collect()  # what lies in a dead cycle is not in use
    return count()
