"""`Registry`: finds, loads and unloads the plugins of a process, and names their devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from opweave.concurrency import Lock
from opweave.contract.backend import Backend
from opweave.contract.device import Kind
from opweave.errors import LifetimeError, OpweaveError, PluginError, UnknownNameError
from opweave.registry import discovery, loading
from opweave.registry.catalog import Catalog, once_per_hardware, preferred
from opweave.registry.devices import adopt, check_device, devices_of, in_use, none_usable, probed
from opweave.registry.hooks import Hooks
from opweave.registry.isolation import lock_of
from opweave.registry.naming import key, parse_spec
from opweave.registry.records import Diagnosis, FileFormat, LoadedBackend, Plugin, PluginRecord, State, format_of
from opweave.runtime.device import Device
from opweave.runtime.reclaim import reclaim

if TYPE_CHECKING:
    from opweave.runtime.stream import Stream

__all__ = ["Registry", "load_alone"]

T = TypeVar("T")


class Registry:
    """Finds, loads, names and unloads backends. All methods may be called from any thread.

    Nothing is read before the first call of a method, and a plugin is imported only when its devices or hooks are
    needed. A plugin that fails never stops the others; its record says why.

    Args:
        environ: where the variables that `opweave.registry.discovery` lists are read, once; default: the process's
            environment at the first call.
        search: folders in which installed distributions are looked for; default: the import path.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None, search: Sequence[str] | None = None) -> None:
        self.hooks = Hooks()
        self._catalog = Catalog(environ, search)
        self._complete = False

    @property
    def _lock(self) -> Lock:
        return lock_of(self.hooks.lock)

    # --- plugins ----------------------------------------------------------------------------------------------------

    def plugins(self) -> tuple[PluginRecord, ...]:
        """The records of all plugins, the built-in ``host`` last. Imports nothing."""
        with self._lock:
            self._catalog.scan()
            return tuple(plugin.record() for plugin in self._catalog)

    def load_all(self, *, strict: bool = False) -> tuple[PluginRecord, ...]:
        """Load all plugins that are not loaded yet, also those installed since the last call.

        Plugins that failed before are not tried again; `load` does that.

        Args:
            strict: raise if a plugin is broken or incompatible. (Unavailable plugins, whose hardware or driver is
                missing, do not count.)

        Returns:
            The records of all plugins.

        Raises:
            PluginError: a plugin that ``OPWEAVE_BACKENDS`` lists failed. All others are loaded all the same.
            UnknownNameError: ``OPWEAVE_BACKENDS`` lists a name that no plugin has.
            ExceptionGroup: with ``strict``: the errors of all broken and incompatible plugins.
        """
        with self._lock:
            self._catalog.scan(again=True)
            self._load_each()
            self._catalog.check_selected()
            at_fault = [p for p in self._catalog if p.state in (State.BROKEN, State.INCOMPATIBLE)]
            if strict and at_fault:
                summary = f"plugins at fault: {', '.join(p.name for p in at_fault)}"
                raise ExceptionGroup(summary, [p.failure() for p in at_fault])
            return self.plugins()

    def load(self, name_or_path: str | os.PathLike[str]) -> PluginRecord:
        """Load one plugin: by name, or by the path of a ``.py`` file, an extension module or a package folder.

        A plugin that failed before is tried again. The name of a file's plugin is the file's, without the suffix.

        Raises:
            PluginError: it failed; `Unavailable`, `Broken`, `Incompatible` or `NameConflict` with cause and remedy.
            UnknownNameError: there is no plugin of that name.
            FileNotFoundError: there is no such file.
        """
        with self._lock:
            self._catalog.scan()
            if not isinstance(name_or_path, (str, os.PathLike)):
                self._unknown("plugin", name_or_path)
            if _is_path(name_or_path):
                plugin: Plugin | None = self._file(name_or_path)
            else:
                plugin = self._catalog.find(str(name_or_path)) or self._catalog.installed_since(str(name_or_path))
            if plugin is None:
                self._unknown("plugin", name_or_path)
            if plugin.tried and plugin.state is not State.READY:
                loading.withdraw(plugin, self.hooks)
                plugin.reset()
            loading.load(plugin, self.hooks, self._catalog)
            if plugin.variant:
                plugin = self._catalog.find(plugin.name) or plugin
            if plugin.state is not State.READY:
                raise plugin.failure()
            return plugin.record()

    def load_all_from_path(self, folder: str | os.PathLike[str]) -> tuple[PluginRecord, ...]:
        """Load every plugin in a folder as ``pip install --target`` makes them.

        Plain files in it are not loaded; use `load` for each.

        Returns:
            The records of the plugins found there; if there are none, a record that says so.

        Raises:
            NotADirectoryError: there is no such folder.
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise NotADirectoryError(f"a folder is a path, not {folder!r:.60}")
        path = os.path.expanduser(folder)
        if not os.path.isdir(path):
            raise NotADirectoryError(f"{path} is no folder")
        with self._lock:
            self._catalog.scan()
            found = self._catalog.admit(list(discovery.in_folder(path)))
            for plugin in found:
                loading.load(plugin, self.hooks, self._catalog)
            return tuple(plugin.record() for plugin in found)

    def rescan(self) -> tuple[Device, ...]:
        """Look again for the devices of all loaded backends, and try those again that had none.

        Devices that are gone (`Device.alive`) are removed; new ones are added, also those that have come back. Devices
        that are still there stay the same objects.

        Plugins that were uninstalled, or whose file was deleted, since they were loaded are unloaded; those whose
        devices are in use stay until they are not. A `RuntimeWarning` and their record (`plugins`) say so.

        Returns:
            The devices that are new.
        """
        with self._lock:
            self._all_loaded()
            known = {id(device) for loaded in self._catalog.backends() for device in loaded.devices}
            gone = self._catalog.gone()
            for plugin in list(self._catalog):
                if plugin in gone:
                    loading.drop(plugin, self.hooks)
                    continue
                if plugin.uninstalled:  # and installed again
                    plugin.uninstalled = False
                    plugin.leave(None)
                if plugin.state is State.UNAVAILABLE and plugin.tried:
                    loading.withdraw(plugin, self.hooks)
                    plugin.reset()
                    loading.load(plugin, self.hooks, self._catalog)
                loading.rescan(plugin, self.hooks)
            found = [device for loaded in self._catalog.backends() for device in loaded.devices]
            return tuple([device for device in found if id(device) not in known])

    def unload(self, backend: Backend | str) -> None:
        """Remove a backend and its devices; with the last backend of a plugin also its hooks and operations.

        It can be loaded again, with `load` or `load_all`. Its Python modules stay imported.

        Raises:
            LifetimeError: buffers or streams of its devices are alive, or it is the built-in ``host``.
            UnknownNameError: it is not loaded.
        """
        with self._lock:
            self._catalog.scan()
            plugin, loaded = self._catalog.loaded(backend)
            if plugin is self._catalog.host:
                raise LifetimeError("the built-in backend 'host' cannot be unloaded")
            reclaim()
            used = in_use(loaded.devices)
            if used:
                raise LifetimeError(f"backend {loaded.backend.name!r} is in use: free or close {' and '.join(used)}")
            for device in loaded.devices:
                device.backend = None
            if len(plugin.backends) == 1:
                loading.withdraw(plugin, self.hooks)
                plugin.reset()
                if plugin.fetch is None:
                    self._catalog.plugins.remove(plugin)
                return
            plugin.backends.remove(loaded)
            name = key(loaded.backend.name)
            plugin.unusable = [d for d in plugin.unusable if key(d.name).partition(":")[0] != name]

    def exclude(self, name: str, why: PluginError) -> None:
        """Set the plugin called ``name`` to failed because of ``why``, without running its code."""
        with self._lock:
            self._catalog.scan()
            plugin = self._catalog.find(name)
            if plugin is not None and plugin.state is State.DISCOVERED:
                plugin.tried = True
                plugin.fail(why)

    # --- registering ------------------------------------------------------------------------------------------------

    def register(self, backend: Backend | type[Backend]) -> Backend:
        """Add a backend that the program made. Its name is ``backend.name``, else its class's in lower case.

        Registering the same object again does nothing.

        Raises:
            NameConflict: another plugin or backend has the name.
            Unavailable: it found no device, or none that works.
            Broken: it is no backend, or its name or what its ``devices()`` returned is invalid.
        """
        with self._lock:
            self._catalog.scan()
            made = loading.check_backend(backend)
            if not any(loaded.backend is made for loaded in self._catalog.backends()):
                self._register(made, devices_of(made))
            return made

    def register_device(self, device: Device, backend: Backend | str | None = None) -> Device:
        """Add a device to a loaded backend; default: to a backend with the name of the device's class in lower case.

        Raises:
            NameConflict: the device is registered already, or another plugin has the name.
            Unavailable: it does not work.
            Broken: an attribute of the device is missing or invalid, or another device has its id.
            UnknownNameError: the backend is not loaded.
        """
        with self._lock:
            self._catalog.scan()
            check_device(device)
            self._catalog.check_unowned([device])
            if backend is None:
                known = self._catalog.named(type(device).__name__)
                if known is None or not isinstance(known.backend, _Registered):
                    self._register(_Registered(device), [device])
                    return device
                backend = known.backend
            _, loaded = self._catalog.loaded(backend)
            adopt(loaded.backend, [device], loaded.devices)
            _, unusable = probed([device])
            if unusable:
                raise none_usable(unusable)
            loaded.devices.append(device)
            return device

    def _register(self, backend: Backend, devices: list[Device]) -> None:
        cls = type(backend)
        plugin = Plugin(backend.name, f"{cls.__module__}:{cls.__qualname__}")
        self._catalog.check_free(plugin, backend.name)
        self._catalog.check_unowned(devices)
        adopt(backend, devices)
        usable, plugin.unusable = probed(devices)
        if not usable:
            raise none_usable(plugin.unusable)
        plugin.ready([LoadedBackend(backend, usable, self._catalog.selection.rank(plugin))])
        self._catalog.plugins.append(plugin)

    # --- backends and devices ---------------------------------------------------------------------------------------

    def backends(self) -> tuple[Backend, ...]:
        """All backends, the preferred first, ``host`` last. Loads all plugins at first use."""
        backends = sorted(self._all_loaded(), key=lambda loaded: (loaded.rank, -loaded.backend.priority))
        return tuple(loaded.backend for loaded in backends)

    def backend(self, name: str) -> Backend:
        """The backend called ``name``, without regard to case. Loads only the plugin of that name.

        Raises:
            PluginError: its plugin failed; this is why.
            UnknownNameError: there is none.
        """
        with self._lock:
            loaded = self._resolve(name) if isinstance(name, str) else None
            return loaded.backend if loaded is not None else self._unknown("backend", name)

    def devices(self, kind: Kind | str | None = None) -> tuple[Device, ...]:
        """All devices, the preferred first, ``host`` last; of one kind if given. Loads all plugins at first use.

        They are sorted by the order in ``OPWEAVE_BACKENDS``, then by kind (GPU, IGPU, ACCEL, CPU), then by the
        backend's priority. Two backends may show the same hardware; `default_devices` lists it only once.

        Raises:
            PluginError, UnknownNameError: as `load_all`.
        """
        wanted = None if kind is None else Kind.named(kind)
        return tuple(d for d in preferred(self._all_loaded()) if wanted is None or d.kind is wanted)

    def default_devices(self) -> tuple[Device, ...]:
        """The devices that programs use by default: as `devices`, but each piece of hardware only once."""
        return tuple(once_per_hardware(self._all_loaded()))

    def best_device(self) -> Device:
        """The first device by kind: GPU, IGPU, ACCEL, CPU, ``host``."""
        return min(preferred(self._all_loaded()), key=lambda device: device.kind.rank)

    def device(self, name: str | None = None, *, kind: Kind | str | None = None) -> Device:
        """One device: by name, without regard to case, or the preferred one of a kind.

        ``"opencl:0"`` is that device, ``"opencl"`` the first one of the backend. Only its plugin is loaded.

        Raises:
            PluginError: its plugin failed, or the device does not work; the message says why.
            UnknownNameError: there is none.
        """
        if (name is None) == (kind is None):
            raise TypeError("device() takes a name or a kind")
        if kind is not None:
            wanted = Kind.named(kind)
            for device in self.devices(wanted):
                return device
            self._unknown("device of kind", wanted.name, {d.kind.name for d in self.devices()})
        with self._lock:
            if isinstance(name, str):
                prefix, colon, _ = name.partition(":")
                loaded = self._resolve(prefix)
                for device in loaded.devices if loaded is not None else ():
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
        if not isinstance(spec, str):
            self._unknown("device", spec)
        name, given = parse_spec(spec)
        return self.device(name).open(**{**given, **params})

    # --- hooks ------------------------------------------------------------------------------------------------------

    def load_hook_modules(self) -> None:
        """Import the plugins whose entry point is a module, or a file: only those can have hooks.

        Their devices are not looked for, so that commands and file formats do not load drivers.
        """
        with self._lock:
            self._catalog.scan()
            for plugin in list(self._catalog.plugins):
                if (
                    plugin.state is State.DISCOVERED
                    and plugin.module is None
                    and not plugin.loading
                    and plugin.may_have_hooks
                    and not plugin.variant
                ):
                    loading.run(plugin, self.hooks, partial(loading.import_plugin, plugin, self.hooks))

    def diagnose(self) -> list[tuple[str, Diagnosis]]:
        """The results of the hooks ``opweave_doctor``, each with the name of its plugin. Loads all plugins."""
        with self._lock:
            self._catalog.scan()
            self._load_each()
            found: list[tuple[str, Diagnosis]] = []
            for name, module in self.hooks.implementers("opweave_doctor"):
                plugin = next((p for p in self._catalog.plugins if p.module is module), None)
                devices = [d for loaded in plugin.backends for d in loaded.devices] if plugin is not None else []
                try:
                    diagnoses = loading.items_of(
                        self.hooks, module, "opweave_doctor", Diagnosis, "diagnoses", registry=self, devices=devices
                    )
                except Exception as error:
                    why = f"its check failed: {type(error).__name__}: {error}"
                    diagnoses = [Diagnosis("opweave_doctor", "wrong", why, "report it to the authors of the plugin")]
                found += [(name, diagnosis) for diagnosis in diagnoses]
            return found

    def formats(self) -> tuple[FileFormat, ...]:
        """The file formats of all plugins, then those of the core. Imports the plugins that may have hooks, without
        looking for devices."""
        with self._lock:
            self.load_hook_modules()
            loading.add_own_hooks(self.hooks)
            hook = "opweave_formats"
            return tuple(self._offered(hook, lambda m: loading.items_of(self.hooks, m, hook, FileFormat, "formats")))

    def placements(self) -> dict[str, Any]:
        """The strategies of placement of all plugins by name; of two with one name that of the first plugin. Imports
        the plugins that may have hooks, without looking for devices."""
        return self._named("opweave_placements")

    def rewrites(self) -> dict[str, Any]:
        """The rewrites of graphs of all plugins by name, as `placements`."""
        return self._named("opweave_rewrites")

    def _named(self, hook: str) -> dict[str, Any]:
        with self._lock:
            self.load_hook_modules()
            offered = self._offered(hook, lambda module: map(dict, self.hooks.call(module, hook)))
            return {name: what for each in reversed(offered) for name, what in each.items()}

    def make_devices(self, names: Iterable[str] = ()) -> None:
        """Have plugins make the devices among ``names`` that are only there once somebody has asked for them, and those
        that their environment variables list. Imports the plugins that may have hooks.

        Raises:
            OpweaveError: what a plugin says of a device that it cannot make.
        """
        with self._lock:
            self.load_hook_modules()
        for _, module in list(self.hooks.implementers("opweave_make_devices")):
            self.hooks.call(module, "opweave_make_devices", names=tuple(names))

    def _offered(self, hook: str, offers: Callable[[object], Iterable[T]]) -> list[T]:
        """What the implementations of a hook in all modules offer; a `RuntimeWarning` names those that fail."""
        found: list[T] = []
        for name, module in list(self.hooks.implementers(hook)):
            try:
                found += list(offers(module))
            except Exception as error:
                self.hooks.warn(hook, name, error)
        return found

    def file_format(self, path: str | os.PathLike[str]) -> FileFormat:
        """The format of a file, recognized by its first bytes, else by its suffix.

        Raises:
            UnknownNameError: neither the core nor a plugin knows the format.
            OSError: the file cannot be read.
        """
        return format_of(path, self.formats())

    def model_format(self, path: str | os.PathLike[str]) -> FileFormat:
        """As `file_format`, of the formats of models only. A folder is known by its ``config.json``.

        Raises:
            UnknownNameError: no plugin that is here reads such models.
            OSError: the file cannot be read.
        """
        place = Path(path)
        return format_of(place / "config.json" if place.is_dir() else place, [f for f in self.formats() if f.plan])

    # --- loading ----------------------------------------------------------------------------------------------------

    def _load_each(self) -> None:
        self._complete = True
        for plugin in list(self._catalog.plugins):
            loading.load(plugin, self.hooks, self._catalog)

    def _all_loaded(self) -> list[LoadedBackend]:
        """Every backend, after loading all plugins if that was not done yet."""
        with self._lock:
            self._catalog.scan()
            if not self._complete:
                self._load_each()
            self._catalog.check_selected()
            return list(self._catalog.backends())

    def _resolve(self, name: str) -> LoadedBackend | None:
        """The backend called ``name``, loaded if necessary; raises the failure of its plugin."""
        self._catalog.scan()
        ready = self._catalog.named(name)
        if ready is not None:
            return ready
        plugin = self._catalog.find(name) or self._catalog.installed_since(name)
        if plugin is not None:
            loading.load(plugin, self.hooks, self._catalog)
            plugin = self._catalog.find(plugin.name) if plugin.variant else plugin
            if plugin is not None and plugin.state is not State.READY:
                raise plugin.failure()
        elif not self._complete:
            # A plugin with several backends may have one of this name.
            self._load_each()
        return self._catalog.named(name)

    def _file(self, path: str | os.PathLike[str]) -> Plugin:
        file = os.path.expanduser(path)
        if not discovery.is_plugin_file(file):
            if not os.path.isdir(file):
                raise FileNotFoundError(f"{file} is no .py file")
            raise FileNotFoundError(f"{file} is no package: it has no __init__.py; load_all_from_path() takes folders")
        return self._catalog.admit([discovery.from_file(file)])[0]

    def _unknown(self, what: str, name: object, known: Iterable[str] | None = None) -> NoReturn:
        hints: list[str] = []
        if what == "device" and isinstance(name, str):
            prefix, _, id = name.partition(":")
            loaded = self._catalog.named(prefix)
            hints = [loaded.backend.why_no_device(id)] if loaded is not None else []
        usable = (State.READY, State.DISCOVERED, State.DISABLED)
        failed = [plugin.name for plugin in self._catalog if plugin.state not in usable]
        if failed:
            hints.append(f"(not usable: {', '.join(failed)}; `opweave plugins` says why)")
        if not isinstance(name, (str, os.PathLike)):
            hints = [f"(a name is a str, not an object of type {type(name).__name__})"]
        known = self._catalog.known_names(what) if known is None else known
        raise UnknownNameError(what, str(name), known, " ".join(filter(None, hints)), listed=what == "device")


class _Registered(Backend):
    """The backend of devices that were registered without one."""

    def __init__(self, device: Device) -> None:
        self.name = type(device).__name__.lower()
        self._device = device

    def devices(self) -> Sequence[Device]:
        return (self._device,)


def _is_path(name: str | os.PathLike[str]) -> bool:
    return not isinstance(name, str) or "/" in name or os.sep in name or discovery.is_plugin_file_name(name)


def load_alone(asked: Mapping[str, Any]) -> None:
    """In a child process: load a plugin, whose own failures do not matter here."""
    environ = {"OPWEAVE_VARIANTS": f"{asked['what']}={asked['variant']}"} if asked["variant"] else {}
    registry = Registry(environ=environ, search=asked.get("search", []))
    with suppress(OpweaveError, OSError):
        registry.load(asked["what"])
