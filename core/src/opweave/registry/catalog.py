"""`Catalog`: the plugins that were found, their names, and what can be decided about them without importing them; and
the order of their devices."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from opweave.contract.backend import Backend
from opweave.errors import NameConflict, OpweaveError, PluginError, Unavailable, UnknownNameError
from opweave.registry import discovery
from opweave.registry.compatibility import why_incompatible
from opweave.registry.devices import adopt, devices_of
from opweave.registry.discovery import Selection
from opweave.registry.naming import canonical, check_name, key
from opweave.registry.records import LoadedBackend, Plugin, State
from opweave.runtime.device import Device
from opweave.runtime.host.device import HostBackend

__all__ = ["Catalog", "once_per_hardware", "preferred"]


class Catalog:
    """The plugins of one registry; see `Registry` for the arguments. Not thread-safe by itself.

    Attributes:
        plugins: in order of loading, the built-in ``host`` not among them.
        host: the plugin that the core itself is.
        selection: what the environment selects.
    """

    def __init__(self, environ: Mapping[str, str] | None, search: Sequence[str] | None) -> None:
        self.plugins: list[Plugin] = []
        self.host: Final = Plugin("host", "opweave.runtime.host.device:HostBackend", distribution="opweave")
        self.selection = Selection()
        self._environ, self._search = environ, search
        self._scanned = False

    # --- finding ----------------------------------------------------------------------------------------------------

    def scan(self, *, again: bool = False) -> None:
        """Find installed plugins and those that the environment adds; only once, unless ``again``."""
        if self._scanned and not again:
            return
        if self._scanned:
            importlib.invalidate_caches()
            # Records that only say that nothing was found there are made anew.
            self.plugins = [p for p in self.plugins if p.fetch is not None or p.state is State.READY]
        else:
            self._scanned = True
            self.selection = Selection.read(os.environ if self._environ is None else self._environ)
            self._start_host()
        found = list(discovery.installed(self._search))
        for path in self.selection.paths:
            found += discovery.at_path(path)
        self.admit(found)

    def _start_host(self) -> None:
        host, backend = self.host, HostBackend()
        host.version = backend.version = discovery.core_version() or ""
        devices = devices_of(backend)
        adopt(backend, devices)
        listed = any(discovery.names(name, host) for name in self.selection.backends)
        host.ready([LoadedBackend(backend, devices, self.selection.rank(host) + (not listed))])

    def admit(self, found: Sequence[Plugin]) -> list[Plugin]:
        """Add the plugins that are new. Returns for each of ``found`` the plugin that the catalog now has."""
        admitted: list[Plugin] = []
        fresh: list[Plugin] = []
        for plugin in found:
            known = self._same(plugin)
            if known is None:
                self._judge(plugin)
                self.plugins.append(plugin)
                fresh.append(plugin)
            admitted.append(known or plugin)
        # Conflicts last, in two steps: of two that claim one name in one scan, both fail, unless one owns the name.
        conflicts = [(plugin, other) for plugin in fresh if (other := self._rival(plugin, plugin.name))]
        for plugin, other in conflicts:
            if plugin.owns_name and not other.owns_name and other.state is not State.READY:
                other.fail(_conflict(other, plugin, plugin.name))
            else:
                plugin.fail(_conflict(plugin, other, plugin.name))
        self.plugins.sort(key=lambda plugin: (self.selection.rank(plugin), key(plugin.name)))
        return admitted

    def _same(self, plugin: Plugin) -> Plugin | None:
        """The known plugin that ``plugin`` only repeats. Of a distribution found twice the first is imported."""
        copies = [p for p in self.plugins if _source(p) == _source(plugin)]
        for known in copies:
            if known.origin == plugin.origin:
                if (known.name, known.variant, known.value) == (plugin.name, plugin.variant, plugin.value):
                    return known
            elif known.version == plugin.version or plugin.origin in sys.path:
                return known
            elif known.state is not State.DISABLED:
                why = f"{known.label} in {known.origin} comes before it on the import path"
                plugin.fail(Unavailable(why, remedy="uninstall the one that is not wanted"), state=State.DISABLED)
        return None

    def _judge(self, plugin: Plugin) -> None:
        """Decide what needs no import."""
        if plugin.state is not State.DISCOVERED:
            return
        disabled = self.selection.why_disabled(plugin)
        if disabled is not None:
            plugin.fail(disabled, state=State.DISABLED)
            return
        try:
            check_name(plugin.name)
        except PluginError as error:
            plugin.fail(error)
            return
        incompatible = why_incompatible(plugin.distribution, plugin.requires, self.host.version)
        if incompatible is not None:
            plugin.fail(incompatible)

    def installed_since(self, name: str) -> Plugin | None:
        """The plugin called ``name``, if it was installed after the first look."""
        self.scan(again=True)
        return self.find(name)

    def gone(self) -> list[Plugin]:
        """The known plugins that are no longer installed, or whose file was deleted."""
        importlib.invalidate_caches()
        found = [*discovery.installed(self._search)]
        for folder in {p.origin for p in self.plugins if p.distribution}:  # also those that `load_all_from_path` names
            found += discovery.installed([folder])
        there = {(_source(plugin), plugin.name, plugin.variant) for plugin in found}
        return [
            plugin
            for plugin in self.plugins
            if plugin.fetch is not None
            and (
                (_source(plugin), plugin.name, plugin.variant) not in there
                if plugin.distribution
                else not os.path.exists(plugin.origin)
            )
        ]

    # --- names ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Plugin]:
        yield from self.plugins
        yield self.host

    def backends(self) -> Iterator[LoadedBackend]:
        """Every loaded backend."""
        for plugin in self:
            yield from plugin.backends

    def find(self, name: str) -> Plugin | None:
        """The plugin called ``name``; of several the one that can be used."""
        meant = [plugin for plugin in self if key(plugin.name) == key(name)]
        ready = next((plugin for plugin in meant if plugin.state is State.READY), None)
        return ready or next((plugin for plugin in meant if plugin.claims_name), meant[0] if meant else None)

    def named(self, name: str) -> LoadedBackend | None:
        """The backend called ``name``, if it is ready."""
        return next((loaded for loaded in self.backends() if key(loaded.backend.name) == key(name)), None)

    def loaded(self, backend: Backend | str) -> tuple[Plugin, LoadedBackend]:
        """A ready backend with its plugin; raises `UnknownNameError`."""
        name = backend.name or type(backend).__name__ if isinstance(backend, Backend) else str(backend)
        for plugin in self:
            for loaded in plugin.backends:
                if backend is loaded.backend or (isinstance(backend, str) and key(name) == key(loaded.backend.name)):
                    return plugin, loaded
        raise UnknownNameError("loaded backend", name, [loaded.backend.name for loaded in self.backends()])

    def _rival(self, plugin: Plugin, name: str) -> Plugin | None:
        if not plugin.claims_name:
            return None
        for other in self:
            names = {key(other.name)} | {key(loaded.backend.name) for loaded in other.backends}
            if plugin.variant and other.variant and key(plugin.name) == key(other.name):
                continue  # of variants one is used
            if other is not plugin and other.claims_name and key(name) in names:
                return other
        return None

    def check_free(self, plugin: Plugin, name: str) -> None:
        """Raises `NameConflict` if another plugin than ``plugin`` has, or will have, a backend called ``name``."""
        rival = self._rival(plugin, name)
        if rival is not None:
            raise _conflict(plugin, rival, name)

    def check_unowned(self, devices: Iterable[Device]) -> None:
        """Raises `NameConflict` if one of the devices belongs to a backend already."""
        owned = {id(device) for loaded in self.backends() for device in loaded.devices}
        for device in devices:
            if id(device) in owned:
                raise NameConflict(f"{type(device).__name__} is registered already, as {device.name!r}")

    def check_usable(self, name: str) -> None:
        """Raises `Unavailable` with the reason if ``name`` names a device that does not work."""
        for plugin in self:
            for device in plugin.unusable:
                if key(device.name) == key(name):
                    usable = ", ".join(d.name for loaded in plugin.backends for d in loaded.devices)
                    raise Unavailable(
                        f"{device.name} does not work: {device.error}",
                        remedy=" ".join(filter(None, [device.remedy, usable and f"(usable: {usable})"])),
                    )

    def check_selected(self) -> None:
        """Raises the first failure of what ``OPWEAVE_BACKENDS`` lists; further ones are added to it as notes."""
        errors: list[OpweaveError] = []
        for name in self.selection.backends:
            meant = [plugin for plugin in self if discovery.names(name, plugin)]
            if not meant:
                errors.append(UnknownNameError("plugin", name, self.known_names("plugin"), "(from OPWEAVE_BACKENDS)"))
            # A discovered plugin is no failure here: it was unloaded, or is being loaded.
            elif not any(plugin.state in (State.READY, State.DISCOVERED) for plugin in meant):
                errors.append(next((p for p in meant if p.claims_name), meant[0]).failure())
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"and {further}")
            raise errors[0]

    def known_names(self, what: str) -> list[str]:
        """Names to suggest for a ``"device"``: of devices, and of plugins that are not loaded or do not work; for a
        ``"backend"`` or a ``"plugin"``: of those."""
        if what == "device":
            known = {device.name for loaded in self.backends() for device in loaded.devices}
            return sorted(known | {p.name for p in self.plugins if not p.backends and p.state is not State.READY})
        return sorted({loaded.backend.name for loaded in self.backends()} | {plugin.name for plugin in self.plugins})


def _source(plugin: Plugin) -> str:
    """Identifies where a plugin comes from: the distribution's name, or the path of a file."""
    return canonical(plugin.distribution) or plugin.origin or plugin.value


def _conflict(plugin: Plugin, other: Plugin, name: str) -> NameConflict:
    """The failure of ``plugin``, whose name belongs to ``other``."""
    one, two = plugin.distribution or plugin.name, other.distribution or other.name
    message = f"{plugin.label} and {other.label} both claim the name {name!r}"
    if other.owns_name and not plugin.owns_name:
        return NameConflict(f"{message}; {two} keeps it, being called like it", remedy=f"uninstall or rename {one}")
    leave_out = one if two == "opweave" else two
    return NameConflict(message, remedy=f"uninstall one of the two, or leave one out: OPWEAVE_DISABLE={leave_out}")


# --- order of devices -------------------------------------------------------------------------------------------------


def preferred(backends: Iterable[LoadedBackend]) -> list[Device]:
    """All devices, the preferred first.

    By position in ``OPWEAVE_BACKENDS``, then kind (GPU, IGPU, ACCEL, CPU, HOST), then the backend's priority. Devices
    that are gone, or that this process, forked from another one, cannot use, are left out.
    """
    pairs = [(loaded, d) for loaded in backends for d in loaded.devices if d.alive and not d.lost_by_fork]
    pairs.sort(key=lambda pair: (pair[0].rank, pair[1].kind.rank, -pair[0].backend.priority))
    return [device for _, device in pairs]


def once_per_hardware(backends: Sequence[LoadedBackend]) -> list[Device]:
    """The devices in order of preference, each piece of hardware once: through the backend of highest priority."""
    order = preferred(backends)
    preference = {id(d): (loaded.rank, -loaded.backend.priority) for loaded in backends for d in loaded.devices}
    chosen: dict[str, Device] = {}
    for device in order:
        hardware = device.hardware_id
        if hardware is not None:
            known = chosen.setdefault(hardware, device)
            if preference[id(device)] < preference[id(known)]:
                chosen[hardware] = device
    return [d for d in order if d.hardware_id is None or chosen[d.hardware_id] is d]
