"""Bringing a plugin up, each by itself: whatever its code does, the process and the other plugins go on."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from opweave.contract.device import Device
from opweave.errors import NameConflict, PluginError, Unavailable
from opweave.graph.opdef import OPS, define_op
from opweave.registry import checks
from opweave.registry.catalog import Catalog
from opweave.registry.failures import fail
from opweave.registry.hooks import Hooks
from opweave.registry.records import Family, Plugin, State

__all__ = ["Loader"]


class Loader:
    """Runs plugins' code and puts what they bring into the catalog, the hooks and the table of operations."""

    def __init__(self, catalog: Catalog, hooks: Hooks) -> None:
        self._catalog, self._hooks = catalog, hooks

    def load(self, plugin: Plugin) -> None:
        """Import a discovered plugin and ask for its devices; its state says afterwards how that went."""
        if plugin.state is not State.DISCOVERED or plugin.loading or plugin.fetch is None:
            return
        plugin.loading = plugin.tried = True
        try:
            plugin.ready(*self._bring_up(plugin))
        # A plugin may raise what it likes, SystemExit too; but the user's Ctrl-C is not the plugin's.
        except BaseException as error:
            self._withdraw(plugin)
            if isinstance(error, KeyboardInterrupt):
                raise
            fail(plugin, error)
        finally:
            plugin.loading = False

    def forget(self, plugin: Plugin) -> None:
        """Take back everything that ``plugin`` brought."""
        for family in plugin.families:
            for device in family.devices:
                device.backend = None
        self._withdraw(plugin)
        plugin.reset()

    def check_unowned(self, devices: Iterable[Device]) -> None:
        """Raises `NameConflict` if one of the devices belongs to a backend already."""
        owned = {id(device): device for family in self._catalog.families() for device in family.devices}
        for device in devices:
            if id(device) in owned:
                raise NameConflict(f"{type(device).__name__} is registered already, as {device.name!r}")

    def _bring_up(self, plugin: Plugin) -> tuple[list[Family], list[PluginError]]:
        assert plugin.fetch is not None
        value = plugin.fetch()
        if isinstance(value, ModuleType) and self._hooks.register(value, plugin.name):
            plugin.module = value
            self._define_ops(plugin, value)
            backends = checks.backends_from_hooks(self._hooks, value)
        else:
            backends = [checks.backend_class(value, plugin.value)()]
        checks.name_backends(backends, plugin.name, plugin.version)
        rank = self._catalog.selection.rank(plugin)
        families: list[Family] = []
        missing: list[PluginError] = []
        for backend in backends:
            self._catalog.check_free(plugin, backend.name)
            try:
                devices = checks.devices_of(backend)
            except Unavailable as error:
                missing.append(error)
                continue
            self.check_unowned(devices)
            checks.adopt(backend, devices)
            usable, unusable = checks.probed(devices)
            plugin.unusable += unusable
            if usable:
                families.append(Family(backend, usable, rank))
            else:
                missing.append(checks.none_usable(unusable))
        if missing and not families:
            raise missing[0]
        return families, missing

    def _define_ops(self, plugin: Plugin, module: ModuleType) -> None:
        for op in checks.ops_from_hooks(self._hooks, module):
            if op.name not in OPS:
                plugin.ops.append(op)
            define_op(op)

    def _withdraw(self, plugin: Plugin) -> None:
        self._hooks.unregister(plugin.module)
        for op in plugin.ops:
            if OPS.get(op.name) is op:
                del OPS[op.name]
        plugin.ops, plugin.module = [], None
