"""Finding plugins by their metadata, and whether the environment and their requirements allow them. Imports nothing.

A plugin is an entry point in the group ``opweave.backends`` of an installed distribution, or a file: a ``.py`` file, an
extension module, or a package folder. An entry point in the group ``opweave.hooks`` names a module with hooks but
without backends (commands, file formats), which ``OPWEAVE_BACKENDS`` does not leave out. The environment selects:

=======================  ==============================================================================================
``OPWEAVE_BACKENDS``     the only plugins to load, comma-separated; the order is their priority, and one that fails is
                         an error
``OPWEAVE_DISABLE``      plugins not to load, comma-separated
``OPWEAVE_VARIANTS``     which variant of a plugin to use, whatever its score, comma-separated: ``acme=cu12``
``OPWEAVE_BACKEND_PATH`` further paths, separated as in ``PATH``: folders as ``pip install --target`` makes them, or
                         files
=======================  ==============================================================================================

A plugin is named by its entry point or by its distribution. The built-in ``host`` is always there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, NamedTuple

from opweave.errors import Broken, Unavailable
from opweave.registry.naming import canonical, key
from opweave.registry.records import Plugin

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

    from packaging.requirements import Requirement

__all__ = [
    "GROUP", "HOOKS", "Selection", "at_path", "core_version", "from_file", "in_folder", "installed", "is_plugin_file",
    "is_plugin_file_name", "names", "requirements", "version_of",
]  # fmt: skip

GROUP = "opweave.backends"
HOOKS = "opweave.hooks"

# The longest first: ".cpython-311-x86_64-linux-gnu.so" before ".so".
_SUFFIXES = sorted([*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES], key=len, reverse=True)


# --- installed distributions ------------------------------------------------------------------------------------------


def installed(search: Sequence[str] | None = None) -> Iterator[Plugin]:
    """The plugins of the distributions on the import path, or in the folders ``search``."""
    from importlib.metadata import distributions

    if search is None:
        for distribution in distributions():
            yield from _plugins_of(distribution, "")
    else:
        for folder in search:
            yield from _in_distributions(folder)


def _in_distributions(folder: str) -> Iterator[Plugin]:
    from importlib.metadata import distributions

    path = os.path.abspath(folder)
    for distribution in distributions(path=[path]):
        yield from _plugins_of(distribution, path)


def _plugins_of(distribution: Distribution, folder: str) -> Iterator[Plugin]:
    # Of most distributions only this small file is read. No error in one distribution stops the search.
    try:
        text = distribution.read_text("entry_points.txt")
    except (OSError, UnicodeDecodeError):
        return
    if text is None or (GROUP not in text and HOOKS not in text):
        return
    try:
        name = distribution.metadata["Name"] or "unknown"
        version = distribution.metadata["Version"] or ""
        requires = tuple(distribution.requires or ())
        points = {(p.name, p.value): p for p in distribution.entry_points if p.group in (GROUP, HOOKS)}
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
            has_backends=point.group == GROUP,
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
        # At the end: other modules in the folder must not shadow installed ones.
        if folder and folder not in sys.path:
            sys.path.append(folder)
            importlib.invalidate_caches()
        return point.load()

    return fetch


# --- folders and files ------------------------------------------------------------------------------------------------


def at_path(entry: str) -> Iterator[Plugin]:
    """The plugins at one entry of ``OPWEAVE_BACKEND_PATH``; if there are none, a plugin whose failure says so."""
    path = os.path.abspath(os.path.expanduser(entry))
    if is_plugin_file(path):
        yield from_file(path)
    elif os.path.isdir(path):
        yield from in_folder(path, entry)
    else:
        yield _nothing(entry, path, "is no folder and no file with a plugin", "correct OPWEAVE_BACKEND_PATH")


def in_folder(folder: str | os.PathLike[str], entry: str = "") -> Iterator[Plugin]:
    """The plugins in a folder as ``pip install --target`` makes it; if there are none, a plugin whose failure says so.

    Args:
        entry: the folder as ``OPWEAVE_BACKEND_PATH`` names it, if it comes from there.
    """
    path = os.path.abspath(folder)
    found = list(_in_distributions(path))
    yield from found
    if not found:
        why = "holds no distribution with a backend"
        remedy = "correct OPWEAVE_BACKEND_PATH" if entry else "name a folder as pip install --target makes them"
        files = sorted(name for name in os.listdir(path) if is_plugin_file(os.path.join(path, name)))
        if files:
            # They are not imported: a setup.py or a test in the folder is no plugin.
            why += f", only {', '.join(files[:8])}{' ...' if len(files) > 8 else ''}"
            remedy = (
                f"name each file that is a plugin, in OPWEAVE_BACKEND_PATH or ow.load: {os.path.join(path, files[0])}"
            )
        yield _nothing(entry or path, path, why, remedy)


def _nothing(name: str, path: str, why: str, remedy: str) -> Plugin:
    nothing = Plugin(name, path, origin=path)
    nothing.fail(Unavailable(f"{path} {why}", remedy=remedy))
    return nothing


def is_plugin_file(path: str) -> bool:
    """Whether ``path`` is a file that Python imports, or the folder of a package."""
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, "__init__.py"))
    return is_plugin_file_name(path) and os.path.isfile(path)


def is_plugin_file_name(path: str) -> bool:
    """Whether a file of that name would be one that Python imports."""
    return path.endswith(tuple(_SUFFIXES))


def from_file(file: str | os.PathLike[str]) -> Plugin:
    """The plugin in a file or a package folder; its name is the file's, without the suffix."""
    path = os.path.abspath(file)
    name = os.path.basename(path)
    if not os.path.isdir(path):
        name = name.removesuffix(next(suffix for suffix in _SUFFIXES if name.endswith(suffix)))
    return Plugin(name, path, lambda: _run_file(name, path), origin=path, packages=frozenset([name]))


def _run_file(stem: str, path: str) -> object:

    name, file, inside = f"opweave_backend_{stem}", path, None
    if path.endswith(tuple(EXTENSION_SUFFIXES)):
        name = f"opweave_backend.{stem}"  # its init function is called like what comes after the dot
    elif os.path.isdir(path):
        # Under its own name, by which its modules import each other; modules of an earlier load are imported anew.
        name, file, inside = stem, os.path.join(path, "__init__.py"), [path]
        other = find_spec(stem)
        if other is not None and os.path.abspath(other.origin or "") != file:
            raise Broken(f"{stem!r} is the name of another module: {other.origin}", remedy="rename the folder")
        for imported in [known for known in sys.modules if known == stem or known.startswith(f"{stem}.")]:
            del sys.modules[imported]
    spec = spec_from_file_location(name, file, submodule_search_locations=inside)
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


# --- what the environment selects -------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """What the environment variables select, as given; ``backends`` is empty if everything is selected."""

    backends: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Selection:
        def parts(variable: str, separator: str) -> tuple[str, ...]:
            return tuple(p for part in environ.get(variable, "").split(separator) if (p := part.strip()))

        return cls(
            parts("OPWEAVE_BACKENDS", ","),
            parts("OPWEAVE_DISABLE", ","),
            parts("OPWEAVE_BACKEND_PATH", os.pathsep),
            parts("OPWEAVE_VARIANTS", ","),
        )

    def variant_of(self, name: str) -> str:
        """The variant of the plugin ``name`` that is asked for (``OPWEAVE_VARIANTS=acme=cu12``), or ``""``."""
        pairs = [pair.partition("=") for pair in self.variants]
        return next((variant.strip() for given, _, variant in pairs if key(given) == key(name)), "")

    def why_disabled(self, plugin: Plugin) -> Unavailable | None:
        """Why ``plugin`` is not to be loaded, or ``None``."""
        if any(names(name, plugin) for name in self.disabled):
            return Unavailable("disabled by OPWEAVE_DISABLE", remedy=f"remove {plugin.name} from OPWEAVE_DISABLE")
        if plugin.has_backends and self.backends and not any(names(name, plugin) for name in self.backends):
            return Unavailable("not listed in OPWEAVE_BACKENDS", remedy=f"add {plugin.name} to OPWEAVE_BACKENDS")
        return None

    def rank(self, plugin: Plugin) -> int:
        """Position in ``OPWEAVE_BACKENDS``; plugins that are not listed come after all that are."""
        return next((i for i, name in enumerate(self.backends) if names(name, plugin)), len(self.backends))


def names(name: str, plugin: Plugin) -> bool:
    """Whether ``name`` is the name of ``plugin``, or of its distribution."""
    by_distribution = bool(plugin.distribution) and canonical(name) == canonical(plugin.distribution)
    return key(name) == key(plugin.name) or by_distribution


# --- what a distribution requires -------------------------------------------------------------------------------------


def core_version() -> str | None:
    """The version of the installed ``opweave``, ``None`` if it is not installed."""
    return version_of("opweave")


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def requirements(requires: Sequence[str]) -> Iterator[Requirement]:
    """The requirements in ``Requires-Dist`` lines that apply to this machine, without extras; skips invalid lines."""
    if not requires:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
