"""`Catalog`: every plugin that was found, and what can be decided about each before it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from opweave.contract.device import Backend
from opweave.errors import NameConflict, OpweaveError, PluginError, Unavailable, UnknownNameError
from opweave.host.device import HostBackend
from opweave.registry import discovery
from opweave.registry.checks import adopt, devices_of
from opweave.registry.compatibility import core_version, why_incompatible
from opweave.registry.naming import canonical, check_name, key
from opweave.registry.records import Family, Plugin, State
from opweave.registry.selection import Selection, names

__all__ = ["Catalog"]


class Catalog:
    """The plugins of one registry; see `Registry` for the arguments. Not thread-safe by itself.

    Attributes:
        plugins: in order of loading, the built-in ``host`` not among them.
        host: the plugin that the core itself is.
        selection: what the environment selects.
    """

    def __init__(self, environ: Mapping[str, str] | None, search: Sequence[str] | None) -> None:
        self.plugins: list[Plugin] = []
        self.host = Plugin("host", "opweave.host.device:HostBackend", distribution="opweave")
        self.selection = Selection()
        self._environ, self._search = environ, search
        self._scanned = False

    # --- finding ----------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Find what is installed and what the environment adds; only the first call does anything."""
        if self._scanned:
            return
        self._scanned = True
        self.selection = Selection.read(os.environ if self._environ is None else self._environ)
        self._start_host()
        found = list(discovery.installed(self._search))
        for place in self.selection.paths:
            found += discovery.in_place(place)
        self.admit(found)

    def admit(self, found: Sequence[Plugin]) -> list[Plugin]:
        """Enter the plugins that are new. Gives, for each found, the one that is now in the catalog."""
        admitted: list[Plugin] = []
        fresh: list[Plugin] = []
        for plugin in found:
            known = self._same(plugin)
            if known is None:
                self._judge(plugin)
                self.plugins.append(plugin)
                fresh.append(plugin)
            admitted.append(known or plugin)
        # Conflicts last, in two steps: of two that claim one name in one scan, both fail.
        conflicts = [(plugin, other) for plugin in fresh if (other := self._rival(plugin, plugin.name))]
        for plugin, other in conflicts:
            plugin.fail(_conflict(plugin, other, plugin.name))
        self.plugins.sort(key=lambda plugin: (self.selection.rank(plugin), key(plugin.name)))
        return admitted

    def _start_host(self) -> None:
        host, backend = self.host, HostBackend()
        host.version = backend.version = core_version() or ""
        devices = devices_of(backend)
        adopt(backend, devices)
        listed = any(names(name, host) for name in self.selection.backends)
        host.ready([Family(backend, devices, self.selection.rank(host) + (not listed))])

    def _same(self, plugin: Plugin) -> Plugin | None:
        """The known plugin that ``plugin`` only repeats. Of a distribution found twice the first is imported."""
        copies = [p for p in self.plugins if _source(p) == _source(plugin)]
        for known in copies:
            if known.origin == plugin.origin:
                if (known.name, known.value) == (plugin.name, plugin.value):
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

    # --- names ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Plugin]:
        yield from self.plugins
        yield self.host

    def families(self) -> Iterator[Family]:
        """Every backend that is ready."""
        for plugin in self:
            yield from plugin.families

    def find(self, name: str) -> Plugin | None:
        """The plugin called ``name``: rather one that can be used."""
        meant = [plugin for plugin in self if key(plugin.name) == key(name)]
        return next((plugin for plugin in meant if plugin.claims_name), meant[0] if meant else None)

    def family(self, name: str) -> Family | None:
        """The backend called ``name``, if it is ready."""
        return next((f for f in self.families() if key(f.backend.name) == key(name)), None)

    def family_of(self, backend: Backend | str) -> tuple[Plugin, Family]:
        """A ready backend with its plugin; raises `UnknownNameError`."""
        for plugin in self:
            for family in plugin.families:
                if backend is family.backend or (isinstance(backend, str) and key(backend) == key(family.backend.name)):
                    return plugin, family
        name = backend if isinstance(backend, str) else backend.name or type(backend).__name__
        raise UnknownNameError("loaded backend", name, [family.backend.name for family in self.families()])

    def check_free(self, plugin: Plugin, name: str) -> None:
        """Raises `NameConflict` if another plugin than ``plugin`` has, or will have, a backend called ``name``."""
        rival = self._rival(plugin, name)
        if rival is not None:
            raise _conflict(plugin, rival, name)

    def _rival(self, plugin: Plugin, name: str) -> Plugin | None:
        if not plugin.claims_name:
            return None
        for other in self:
            taken = {key(other.name)} | {key(family.backend.name) for family in other.families}
            if other is not plugin and other.claims_name and key(name) in taken:
                return other
        return None

    def check_usable(self, name: str) -> None:
        """Raises `Unavailable` with the reason if ``name`` is that of a device that does not work."""
        for plugin in self:
            for device in plugin.unusable:
                if key(device.name) == key(name):
                    usable = ", ".join(d.name for family in plugin.families for d in family.devices)
                    raise Unavailable(
                        f"{device.name} does not work: {device.error}",
                        remedy=" ".join(filter(None, [device.remedy, usable and f"(usable: {usable})"])),
                    )

    def known_names(self) -> list[str]:
        """Names to suggest: of devices, and of plugins that have none yet."""
        known = {device.name for family in self.families() for device in family.devices}
        return sorted(known | {plugin.name for plugin in self.plugins if not plugin.families})

    def check_selected(self) -> None:
        """Raises the first failure of what ``OPWEAVE_BACKENDS`` lists; further ones are added to it as notes."""
        errors: list[OpweaveError] = []
        for name in self.selection.backends:
            meant = [plugin for plugin in self if names(name, plugin)]
            if not meant:
                errors.append(UnknownNameError("plugin", name, self.known_names(), "(from OPWEAVE_BACKENDS)"))
            # Discovered is in order here: it was unloaded on purpose, or is just being loaded.
            elif not any(plugin.state in (State.READY, State.DISCOVERED) for plugin in meant):
                errors.append(next((p for p in meant if p.claims_name), meant[0]).failure())
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"and {further}")
            raise errors[0]


def _source(plugin: Plugin) -> str:
    """What a plugin comes from: copies of one distribution are the same, files are their paths."""
    return canonical(plugin.distribution) or plugin.origin or plugin.value


def _conflict(plugin: Plugin, other: Plugin, name: str) -> NameConflict:
    one, two = plugin.distribution or plugin.name, other.distribution or other.name
    leave_out = one if two == "opweave" else two
    return NameConflict(
        f"{plugin.label} and {other.label} both claim the name {name!r}",
        remedy=f"uninstall one of the two, or leave one out: OPWEAVE_DISABLE={leave_out}",
    )
