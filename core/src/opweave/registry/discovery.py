"""Finding plugins. Metadata is read, nothing is imported.

A plugin is an entry point in the group ``opweave.backends`` of an installed distribution, or a single ``.py`` file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from opweave.errors import Broken, Unavailable
from opweave.registry.records import Plugin

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = ["GROUP", "in_folder", "in_place", "installed", "single_file"]

GROUP = "opweave.backends"


def installed(search: Sequence[str] | None = None) -> Iterator[Plugin]:
    """The plugins of the distributions on the import path, or in the folders ``search``."""
    from importlib.metadata import distributions

    if search is None:
        for distribution in distributions():
            yield from _plugins_of(distribution, "")
    else:
        for folder in search:
            yield from in_folder(folder)


def in_folder(folder: str | os.PathLike[str]) -> Iterator[Plugin]:
    """The plugins in a folder as ``pip install --target`` makes them."""
    from importlib.metadata import distributions

    path = os.path.abspath(folder)
    for distribution in distributions(path=[path]):
        yield from _plugins_of(distribution, path)


def single_file(file: str | os.PathLike[str]) -> Plugin:
    """The plugin that a ``.py`` file is; it is called like the file."""
    path = os.path.abspath(file)
    return Plugin(_stem(path), path, lambda: _run_file(path), origin=path)


def in_place(place: str) -> Iterator[Plugin]:
    """The plugins in one entry of ``OPWEAVE_BACKEND_PATH``; one that says so where there is none."""
    path = os.path.expanduser(place)
    if path.endswith(".py") and os.path.isfile(path):
        yield single_file(path)
        return
    found = list(in_folder(path)) if os.path.isdir(path) else []
    if not found:
        why = "holds no distribution with a backend" if os.path.isdir(path) else "is no folder and no .py file"
        nothing = Plugin(place, path, origin=path)
        nothing.fail(Unavailable(f"{path} {why}", remedy="correct OPWEAVE_BACKEND_PATH"))
        yield nothing
    yield from found


def _plugins_of(distribution: Distribution, folder: str) -> Iterator[Plugin]:
    # Of most distributions only this one small file is read, and nothing of it can stop the others.
    try:
        text = distribution.read_text("entry_points.txt")
    except (OSError, UnicodeDecodeError):
        return
    if text is None or GROUP not in text:
        return
    try:
        name = distribution.metadata["Name"] or "unknown"
        version = distribution.metadata["Version"] or ""
        requires = tuple(distribution.requires or ())
        points = {(p.name, p.value): p for p in distribution.entry_points if p.group == GROUP}
        origin = str(distribution.locate_file(""))
        packages = _top_level(distribution)
    except Exception as error:  # whatever a damaged installation makes the parsers raise
        damaged = Plugin(_name_from(distribution), str(getattr(distribution, "_path", folder)), origin=folder)
        remedy = "install the distribution again: pip install --force-reinstall"
        damaged.fail(Broken(f"its metadata cannot be read: {type(error).__name__}: {error}", remedy=remedy), error)
        yield damaged
        return
    for point in points.values():
        yield Plugin(
            point.name,
            point.value,
            _importer(point, folder),
            distribution=name,
            version=version,
            requires=requires,
            packages=packages | {point.value.partition(":")[0].partition(".")[0].strip()},
            origin=origin,
        )


def _name_from(distribution: Distribution) -> str:
    """A name for a distribution whose metadata is damaged, from its folder ``opweave_acme-1.0.dist-info``."""
    path = str(getattr(distribution, "_path", "unknown"))
    return os.path.basename(path).partition("-")[0] or "unknown"


def _top_level(distribution: Distribution) -> frozenset[str]:
    """Top-level import names that a distribution installs, as far as it says."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    files = (file.parts[0] for file in distribution.files or () if file.suffix == ".py")
    return frozenset([*listed, *(part.removesuffix(".py") for part in files)])


def _importer(point: EntryPoint, folder: str) -> Callable[[], object]:
    def fetch() -> object:
        # At the end: what the folder holds besides the plugin must not take the place of what is installed.
        if folder and folder not in sys.path:
            sys.path.append(folder)
            importlib.invalidate_caches()
        return point.load()

    return fetch


def _run_file(path: str) -> object:
    from importlib.util import module_from_spec, spec_from_file_location

    name = f"opweave_backend_{_stem(path)}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Broken(f"{path} cannot be run as Python")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _stem(path: str) -> str:
    return os.path.basename(path).removesuffix(".py")
