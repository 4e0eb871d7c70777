"""What a plugin's failure means: unavailable here, incompatible, or broken."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from opweave.errors import Broken, Incompatible, NameConflict, PluginError, Unavailable

if TYPE_CHECKING:
    from opweave.registry.records import Plugin

__all__ = ["fail"]

_FRAMES = 4
"""How many of the innermost frames a record keeps."""

_MACHINERY = ("<frozen importlib", *(os.path.dirname(f) + os.sep for f in (importlib.__file__, __file__)))


def fail(plugin: Plugin, error: BaseException) -> None:
    """Note on ``plugin`` what the failure of its code means."""
    import traceback

    meaning = _meaning(plugin, error)
    where = "" if isinstance(error, PluginError) else _last_frames(error)
    # The frames stay readable, but must not keep the plugin's objects (a driver's handles) alive.
    traceback.clear_frames(error.__traceback__)
    plugin.fail(meaning, error, traceback=where)


def _last_frames(error: BaseException) -> str:
    import traceback

    # What the import machinery and the registry did in between explains nothing to the plugin's author.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_MACHINERY)]
    return "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()


def _meaning(plugin: Plugin, error: BaseException) -> PluginError:
    if isinstance(error, PluginError):
        kind = next((k for k in (Unavailable, Incompatible, NameConflict) if isinstance(error, k)), Broken)
        return kind(error.message, remedy=error.remedy or (_report(plugin) if kind is Broken else ""))
    if isinstance(error, ModuleNotFoundError) and _is_third_party(error.name, plugin):
        return Unavailable(
            f"it needs the Python module {error.name!r}, which is not installed", remedy=_install(error.name, plugin)
        )
    import traceback

    # format_exception_only survives exceptions whose own __str__ fails.
    return Broken("".join(traceback.format_exception_only(error)).strip(), remedy=_report(plugin))


def _is_third_party(module: str | None, plugin: Plugin) -> bool:
    top = (module or "").partition(".")[0]
    return bool(top) and top != "opweave" and top not in plugin.packages and top not in sys.stdlib_module_names


def _install(module: str | None, plugin: Plugin) -> str:
    from opweave.registry.compatibility import requirement_on

    top = (module or "").partition(".")[0]
    requirement = requirement_on(top, plugin.requires)
    if requirement is not None:
        return f'pip install "{requirement.name}{requirement.specifier}"'
    return f"pip install {top} (or the package that provides that module)"


def _report(plugin: Plugin) -> str:
    who = f"report it to the authors of {plugin.distribution}" if plugin.distribution else f"correct {plugin.value}"
    return f"{who}; OPWEAVE_DISABLE={plugin.name} goes on without it"
