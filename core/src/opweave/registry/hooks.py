"""Hooks: functions of a plugin's module that opweave calls, for more than backends.

If a plugin's entry point is a module, its functions with the decorator `hookimpl` are hooks::

    import opweave

    @opweave.hookimpl
    def opweave_backends():
        return [AcmeBackend()]

The hooks are specified in `opweave.registry.hookspecs`. pluggy manages them; it is imported with the first module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, overload

from opweave.concurrency import Lock
from opweave.errors import Broken

if TYPE_CHECKING:
    from typing import TypeVar

    from pluggy import PluginManager

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["PROJECT", "Hooks", "hookimpl"]

PROJECT = "opweave"


@overload
def hookimpl(function: F, /) -> F: ...
@overload
def hookimpl(*, tryfirst: bool = ..., trylast: bool = ..., optionalhook: bool = ...) -> Callable[[F], F]: ...
def hookimpl(function: Any = None, /, **options: Any) -> Any:
    """Decorator: the function implements the hook of the same name.

    Args:
        options: ``tryfirst``, ``trylast``, ``optionalhook``, as in pluggy.
    """
    from pluggy import HookimplMarker

    return HookimplMarker(PROJECT)(function, **options)


class Hooks:
    """The hooks of the modules of one registry. Each module is called separately, so that a failure in one does not
    prevent the others from being called.

    Attributes:
        lock: held while the registry runs code of plugins.
    """

    def __init__(self) -> None:
        self.lock: Final = Lock()
        self._manager: PluginManager | None = None

    def register(self, module: ModuleType, plugin: str) -> bool:
        """Register the hooks of ``module`` under the plugin's name, once; returns whether it has any.

        Raises:
            Broken: it implements a hook that does not exist, or takes arguments that the hook does not have.
        """
        from pluggy import PluginManager, PluginValidationError

        if self._manager is None:
            from opweave.registry import hookspecs

            self._manager = PluginManager(PROJECT)
            self._manager.add_hookspecs(hookspecs)
        if self._manager.is_registered(module):
            return True
        try:
            self._manager.register(module, plugin)
            self._manager.check_pending()
        except PluginValidationError as error:
            self.unregister(module)
            raise Broken(" ".join(str(error).split())) from error
        if not self._manager.get_hookcallers(module):
            self.unregister(module)
            return False
        return True

    def unregister(self, module: object) -> None:
        """Remove the hooks of ``module``."""
        if self._manager is not None and self._manager.is_registered(module):
            self._manager.unregister(module)

    def call(self, module: object, hook: str, **arguments: Any) -> list[Any]:
        """The results of the implementations of ``hook`` in one module."""
        if self._manager is None:
            return []
        others = [other for other in self._manager.get_plugins() if other is not module]
        results: list[Any] = self._manager.subset_hook_caller(hook, others)(**arguments)
        return results

    def implementers(self, hook: str) -> Iterator[tuple[str, object]]:
        """Name and module of every plugin that implements ``hook``, in pluggy's order of calling."""
        if self._manager is not None:
            for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
                yield implementation.plugin_name, implementation.plugin

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call ``hook`` in every module; a failure becomes a `RuntimeWarning`."""
        for plugin, module in self.implementers(hook):
            try:
                self.call(module, hook, **arguments)
            except Exception as error:
                self.warn(hook, plugin, error)

    def warn(self, hook: str, plugin: str, error: Exception) -> None:
        """Warn with a `RuntimeWarning` that ``hook`` of a plugin failed."""
        warnings.warn(f"{hook} of plugin {plugin!r} failed: {error!r}", RuntimeWarning, stacklevel=4)
