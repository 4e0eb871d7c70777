"""Running a plugin's code: importing it, checking the backends and devices that it returns, naming devices, and turning
what it raises into `Unavailable`, `Incompatible` or `Broken`."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from math import isfinite
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from opweave.contract.backend import Backend
from opweave.errors import Broken, Incompatible, NameConflict, PluginError, Unavailable
from opweave.graph.opdef import OPS, OpDef, define_op
from opweave.registry.devices import adopt, described, devices_of, in_use, listed, none_usable, probed
from opweave.registry.discovery import requirements, version_of
from opweave.registry.isolation import IMPORT_SECONDS, Guard, Loading, TookTooLong, call, crash_of, guarded
from opweave.registry.naming import canonical, check_name, device_names, key
from opweave.registry.records import LoadedBackend, Plugin, State

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from opweave.registry.catalog import Catalog
    from opweave.registry.hooks import Hooks

__all__ = [
    "add_own_hooks", "check_backend", "drop", "import_plugin", "items_of", "load", "rescan", "run", "score_of",
    "withdraw",
]  # fmt: skip

T = TypeVar("T")


# --- loading ----------------------------------------------------------------------------------------------------------


def load(plugin: Plugin, hooks: Hooks, catalog: Catalog) -> None:
    """Import a discovered plugin and find its devices; its state is the result. Of variants the best that works is
    taken."""
    if plugin.state is not State.DISCOVERED or plugin.loading or plugin.fetch is None:
        return
    if not plugin.variant:
        _load_one(plugin, hooks, catalog)
        return
    from opweave.registry import variants  # importing opweave must not pay for it

    forced = catalog.selection.variant_of(plugin.name)
    ranked = variants.rank(plugin, catalog.plugins, forced, lambda other, doing: run(other, hooks, doing), _score)
    for variant in ranked:
        _load_one(variant, hooks, catalog)
        if variant.state is State.READY:
            variants.settle(variant, ranked)
            return


def _load_one(plugin: Plugin, hooks: Hooks, catalog: Catalog) -> None:
    plugin.tried = True
    run(plugin, hooks, lambda: plugin.ready(*_bring_up(plugin, hooks, catalog)))


def run(plugin: Plugin, hooks: Hooks, doing: Callable[[], object]) -> None:
    """Run code of a plugin; whatever it raises becomes the plugin's state. Where an earlier process ended while it did,
    a child process tries first; what ends that is not run here."""
    loading = Loading(plugin)
    death = crash_of(plugin, loading)
    if death is not None:
        plugin.tried = True
        why = f"{death.how} while it was loaded in a process of its own, and before that an earlier process"
        plugin.fail(Broken(why, remedy=f"update or uninstall it; OPWEAVE_DISABLE={plugin.name} goes on without it"))
        warn_of(plugin, why)
        return
    before = guarded(Guard(plugin.name, hooks.lock))
    plugin.loading = True
    loading.begin()
    try:
        doing()
    # A plugin may raise what it likes, SystemExit too; but the user's Ctrl-C is not the plugin's.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            withdraw(plugin, hooks)
            raise
        plugin.tried = True
        note_failure(plugin, error)
        if isinstance(error, TookTooLong):
            warn_of(plugin, error.message)
        if plugin.state is not State.UNAVAILABLE:  # the hooks of an unavailable plugin are still useful
            withdraw(plugin, hooks)
    finally:
        plugin.loading = False
        guarded(before)
        loading.end()


def warn_of(plugin: Plugin, why: str) -> None:
    """Warn of a plugin that the program goes on without."""
    message = f"plugin {plugin.name!r} ({plugin.label}): {why}; its devices are left out"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _bring_up(plugin: Plugin, hooks: Hooks, catalog: Catalog) -> tuple[list[LoadedBackend], list[PluginError]]:
    value = import_plugin(plugin, hooks)
    if not plugin.variant and not score_of(value):
        raise Unavailable("it does not suit this machine: its score is 0", remedy="use it on one that it suits")
    if plugin.module is not None:
        define_ops(plugin, hooks)
    rank = catalog.selection.rank(plugin)
    ready: list[LoadedBackend] = []
    missing: list[PluginError] = []
    for backend in backends_of(plugin, value, hooks):
        catalog.check_free(plugin, backend.name)
        try:
            devices = devices_of(backend)
        except Unavailable as error:
            missing.append(error)
            continue
        catalog.check_unowned(devices)
        adopt(backend, devices)
        usable, unusable = probed(devices, plugin.version)
        plugin.unusable += unusable
        if usable or (backend.dynamic and not unusable):
            ready.append(LoadedBackend(backend, usable, rank))
        else:
            missing.append(none_usable(unusable))
    if missing and not ready:
        raise missing[0]
    return ready, missing


# --- importing --------------------------------------------------------------------------------------------------------


def import_plugin(plugin: Plugin, hooks: Hooks) -> object:
    """Import the plugin; returns the value of its entry point. The hooks of a module are registered, once."""
    if plugin.module is not None:
        return plugin.module
    assert plugin.fetch is not None
    value = call("its import", plugin.fetch, IMPORT_SECONDS)
    if isinstance(value, ModuleType) and hooks.register(value, plugin.name):
        plugin.module = value
    return value


_OWN_HOOKS = "opweave.formats.hooks"
"""The module of the core with hooks. It is found by name, like those of plugins: it builds on the registry."""


def add_own_hooks(hooks: Hooks) -> None:
    """Register the hooks of the core, once."""
    hooks.register(importlib.import_module(_OWN_HOOKS), _OWN_HOOKS)


def withdraw(plugin: Plugin, hooks: Hooks) -> None:
    """Remove the hooks and operations of ``plugin``."""
    if plugin.module is not None:
        hooks.unregister(plugin.module)
    for op in plugin.ops:
        if OPS.get(op.name) is op:
            del OPS[op.name]
    plugin.ops, plugin.module = [], None


def define_ops(plugin: Plugin, hooks: Hooks) -> None:
    """Define the operations of the plugin's hook ``opweave_ops``; raises `Broken` unless they are definitions."""
    for op in items_of(hooks, plugin.module, "opweave_ops", OpDef, "definitions"):
        if op.name not in OPS:
            plugin.ops.append(op)
        define_op(op)


def items_of(hooks: Hooks, module: object, hook: str, kind: type[T], what: str, **arguments: Any) -> list[T]:
    """The items that the implementations of ``hook`` in a module return; raises `Broken` unless all are of ``kind``."""
    found: list[T] = []
    for result in call(f"{hook}()", partial(hooks.call, module, hook, **arguments)):
        for item in listed(result, f"{hook}()"):
            if not isinstance(item, kind):
                raise Broken(f"{hook}() returned {described(item)} among its {what}")
            found.append(item)
    return found


# --- backends ---------------------------------------------------------------------------------------------------------


def _score(variant: Plugin) -> None:
    """Import a variant, and set its score."""
    assert variant.fetch is not None
    variant.score = score_of(call("its import", variant.fetch, IMPORT_SECONDS))


def score_of(value: object) -> float:
    """The score that a plugin gives itself on this machine: by ``opweave_score`` of its module with hooks, else by
    ``score`` of its backend class; 1 where it says nothing.

    Args:
        value: the value of its entry point.

    Raises:
        Broken: no number of at least 0.
    """
    ask = getattr(value, "opweave_score", None) if isinstance(value, ModuleType) else None
    if ask is None:
        classes = [value] if _is_backend_class(value) else _own_classes(value) if isinstance(value, ModuleType) else []
        ask = classes[0].score if len(classes) == 1 else None
    score = 1.0 if ask is None else call("its score", ask)
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not isfinite(score) or score < 0:
        raise Broken(f"its score is {score!r}, not a number of at least 0")
    return float(score)


def backends_of(plugin: Plugin, value: object, hooks: Hooks) -> list[Backend]:
    """The backends of a plugin: a single one gets the plugin's name, several have names of their own.

    Args:
        value: the value of its entry point, as `import_plugin` returns it.
    """
    if plugin.module is not None:
        found = items_of(hooks, plugin.module, "opweave_backends", Backend, "backends")
    else:
        cls = _backend_class(value, plugin.value)
        found = [call(f"{cls.__name__}()", cls)]
    for backend in found:
        if len(found) == 1:
            backend.name = plugin.name
        elif not isinstance(backend.name, str) or not backend.name:
            raise Broken(f"{type(backend).__name__} has no name; of several backends in a plugin each needs one")
        check_name(backend.name)
        backend.version = backend.version or plugin.version
    if len({key(backend.name) for backend in found}) < len(found):
        raise Broken(f"two of its backends have one name: {', '.join(b.name for b in found)}")
    return found


def _backend_class(value: object, what: str) -> type[Backend]:
    """The backend class in the value of an entry point; raises `Broken` unless there is exactly one."""
    remedy = "an entry point names a subclass of opweave.Backend, or a module with @opweave.hookimpl functions"
    if isinstance(value, ModuleType):
        own = _own_classes(value)
        if len(own) == 1:
            return own[0]
        names = f"several Backend classes ({', '.join(cls.__name__ for cls in own)})" if own else "no Backend class"
        raise Broken(f"{what} is a module with no hooks and with {names}", remedy=remedy)
    if _is_backend_class(value):
        return value
    raise Broken(f"{what} is {described(value)}, not a Backend class", remedy=remedy)


def _own_classes(module: ModuleType) -> list[type[Backend]]:
    classes = [v for v in vars(module).values() if _is_backend_class(v) and _is_of(v, module)]
    return [cls for cls in dict.fromkeys(classes) if not cls.__name__.startswith("_")]


def _is_of(cls: type, module: ModuleType) -> bool:
    """Whether a class is defined in a module, or in a submodule of it."""
    return cls.__module__ == module.__name__ or (
        hasattr(module, "__path__") and cls.__module__.startswith(f"{module.__name__}.")
    )


def _is_backend_class(value: object) -> TypeGuard[type[Backend]]:
    return isinstance(value, type) and issubclass(value, Backend) and value is not Backend


def check_backend(backend: object) -> Backend:
    """A backend with a valid name: its own, else its class's in lower case. Raises `Broken` if it is none."""
    made = backend() if isinstance(backend, type) else backend
    if not isinstance(made, Backend):
        raise Broken(f"{described(made)} is no opweave.Backend")
    if not isinstance(made.name, str):
        raise Broken(f"{type(made).__name__}.name is {made.name!r}, not a str")
    made.name = made.name or type(made).__name__.lower()
    check_name(made.name)
    return made


# --- when devices change ----------------------------------------------------------------------------------------------


def drop(plugin: Plugin, hooks: Hooks) -> None:
    """Unload a plugin that was uninstalled. Where its devices are in use it stays until they are not."""
    what = f"{plugin.label} was {'uninstalled' if plugin.distribution else 'deleted'}"
    devices = [device for loaded in plugin.backends for device in loaded.devices]
    used = in_use(devices)
    plugin.uninstalled = True
    if used:
        plugin.leave(Unavailable(f"{what}; its devices stay until {' and '.join(used)} are freed or closed",
                                 remedy="free them, and call opweave.rescan()"))  # fmt: skip
    elif devices or plugin.state is State.DISCOVERED:
        for device in devices:
            device.backend = None
        withdraw(plugin, hooks)
        plugin.reset()
        plugin.tried = True
        plugin.fail(Unavailable(what, remedy="install it again, and call opweave.rescan()"))
    else:
        return  # it was not loaded: its record says why
    if devices:
        warnings.warn(f"plugin {plugin.name!r}: {plugin.failure().message}", RuntimeWarning, stacklevel=3)


def rescan(plugin: Plugin, hooks: Hooks) -> None:
    """Remove the devices of a plugin's backends that are gone, and add those that they find and that have none of their
    names."""
    before = guarded(Guard(plugin.name, hooks.lock))
    try:
        for loaded in plugin.backends:
            _rescan(loaded, plugin.version)
    finally:
        guarded(before)


def _rescan(loaded: LoadedBackend, version: str) -> None:
    for device in [d for d in loaded.devices if not d.alive]:
        loaded.devices.remove(device)
        device.backend = None
    try:
        found = devices_of(loaded.backend)
    except PluginError:
        return
    names = device_names(loaded.backend.name, [d.id for d in found])
    known = {key(device.name) for device in loaded.devices}
    new = []
    for device, name in zip(found, names, strict=True):
        if key(name) not in known:
            device.name, device.backend = name, loaded.backend
            new.append(device)
    loaded.devices.extend(probed(new, version)[0])


# --- failures ---------------------------------------------------------------------------------------------------------

_FRAMES = 4
"""How many of the innermost frames a record keeps."""

_MACHINERY = ("<frozen importlib", *(os.path.dirname(f) + os.sep for f in (importlib.__file__, __file__)))


def note_failure(plugin: Plugin, error: BaseException) -> None:
    """Set the state of ``plugin`` after its code raised ``error``."""
    import traceback

    meaning = _meaning(plugin, error)
    where = "" if isinstance(error, PluginError) else _last_frames(error)
    # The frames stay readable, but must not keep the plugin's objects (a driver's handles) alive.
    traceback.clear_frames(error.__traceback__)
    plugin.fail(meaning, error, traceback=where)


def _last_frames(error: BaseException) -> str:
    import traceback

    # Frames of the import system, the registry and pluggy are of no use to the plugin's author.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_machinery(f.filename)]
    return "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()


def _is_machinery(file: str) -> bool:
    return file.startswith(_MACHINERY) or f"{os.sep}pluggy{os.sep}" in file


def _meaning(plugin: Plugin, error: BaseException) -> PluginError:
    if isinstance(error, PluginError):
        kind = next((k for k in (Unavailable, Incompatible, NameConflict) if isinstance(error, k)), Broken)
        return kind(error.message, remedy=error.remedy or (_report(plugin) if kind is Broken else ""))
    if isinstance(error, ModuleNotFoundError) and (lacking := _lacking(error.name or "", plugin)):
        needed = " and ".join(f"{r.name}{r.specifier}" for r in lacking)
        return Unavailable(
            f"it needs {needed}, which is not installed: there is no Python module {error.name!r}",
            remedy=f"pip install {' '.join(_quoted(requirement) for requirement in lacking)}",
        )
    import traceback

    # format_exception_only survives exceptions whose own __str__ fails.
    return Broken("".join(traceback.format_exception_only(error)).strip(), remedy=_report(plugin))


def _lacking(module: str, plugin: Plugin) -> list[Requirement]:
    """The declared dependencies that may provide the missing ``module``: the one with its name, else all that are not
    installed as declared, since a module may have another name than its distribution. If there are none, the import is
    a mistake in the plugin; suggesting to install a package with the name of a typing error would be dangerous."""
    top = module.partition(".")[0]
    if not top or top in plugin.packages or top in sys.stdlib_module_names:
        return []
    unmet = [r for r in requirements(plugin.requires) if canonical(r.name) != "opweave" and not _is_met(r)]
    return [r for r in unmet if canonical(r.name) == canonical(top)] or unmet


def _is_met(requirement: Requirement) -> bool:
    version = version_of(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _quoted(requirement: Requirement) -> str:
    return f'"{requirement.name}{requirement.specifier}"'


def _report(plugin: Plugin) -> str:
    who = f"report it to the authors of {plugin.distribution}" if plugin.distribution else f"correct {plugin.value}"
    return f"{who}; OPWEAVE_DISABLE={plugin.name} leaves it out"
