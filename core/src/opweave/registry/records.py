"""Plugins as data: `State`, the public `PluginRecord`, the registry's own `Plugin`; and the records that hooks return,
`Diagnosis` and `FileFormat`."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from opweave.errors import Broken, Incompatible, NameConflict, PluginError, Unavailable, UnknownNameError
from opweave.registry.naming import canonical

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from opweave.contract.backend import Backend
    from opweave.graph.opdef import OpDef
    from opweave.runtime.device import Device

__all__ = [
    "Diagnosis", "FileFormat", "LoadedBackend", "Plugin", "PluginRecord", "State", "UnusableDevice", "format_of",
]  # fmt: skip


class State(enum.Enum):
    """The state of a plugin."""

    DISCOVERED = "discovered"
    """Its metadata was read; nothing was imported."""
    DISABLED = "disabled"
    """A setting excludes it; it is not imported."""
    INCOMPATIBLE = "incompatible"
    """It was made for another version of opweave: its requirement says so, then it is not imported, or its hooks."""
    BROKEN = "broken"
    """Its code failed, or returned something invalid."""
    UNAVAILABLE = "unavailable"
    """The hardware, driver or library that it needs is missing on this machine."""
    READY = "ready"
    """It is loaded, and its devices can be used."""


class UnusableDevice(NamedTuple):
    """A device that was found but does not work; see `Device.probe`.

    Attributes:
        name, description: of the device.
        error: the reason, usually the driver's message.
        remedy: what the user can do about it.
        replaced_by: the name of a device of the same backend that works and is the same hardware, so that nothing is
            missing; else ``""``.
    """

    name: str
    description: str
    error: str
    remedy: str = ""
    replaced_by: str = ""


class PluginRecord(NamedTuple):
    """A snapshot of what the registry knows about one plugin.

    Attributes:
        name: the entry point's name, with which the names of its devices begin.
        distribution, version: of its package; ``""`` for files and for backends that a program registered.
        state: its state.
        value: the entry point's value (``"opweave_acme:Acme"``), or the path of the file.
        devices: names of its devices.
        error: why it is not ready, or ``""``. For a ready plugin: why some of its backends are unavailable, or that it
            was uninstalled.
        remedy: what the user can do about it.
        traceback: the innermost frames of the failure as text, ``""`` if no code failed.
        unusable: its devices that do not work. If all of them do not, the plugin is unavailable.
        variant: which variant of several with this name, ``""`` where there is one plugin only.
    """

    name: str
    distribution: str
    version: str
    state: State
    value: str
    devices: tuple[str, ...] = ()
    error: str = ""
    remedy: str = ""
    traceback: str = ""
    unusable: tuple[UnusableDevice, ...] = ()
    variant: str = ""


class Diagnosis(NamedTuple):
    """What a check of ``opweave doctor`` found.

    Attributes:
        about: what was checked, e.g. ``"BLAS"``.
        status: ``"ok"``, ``"slow"`` (it works, but could be faster), or ``"wrong"``.
        message: what was found.
        remedy: a command or a sentence that says how to fix it.
    """

    about: str
    status: Literal["ok", "slow", "wrong"]
    message: str
    remedy: str = ""


class FileFormat(NamedTuple):
    """A file format of weights or models, returned by the hook ``opweave_formats``.

    Attributes:
        name: for messages, e.g. ``"safetensors"``.
        suffixes: file name suffixes, with the dot, in lower case.
        load_weights: reads a file; returns a mapping of names to arrays (or `opweave.Blocks`) for ``ow.weights``.
            ``None``: the format does not contain weights.
        plan: of a path, devices or their names, and the length of axes that the model leaves open: a context in which
            its graph is there as it is placed on them (`opweave.scheduler.PlannedGraph`). ``None``: the format does
            not contain models.
        magic: the first bytes of such files; if not empty, they decide instead of the suffix.
    """

    name: str
    suffixes: tuple[str, ...]
    load_weights: Callable[[Path], Mapping[str, Any]] | None = None
    plan: Callable[[Path, Sequence[Any], int], AbstractContextManager[Any]] | None = None
    magic: bytes = b""

    def fits(self, path: Path, head: bytes) -> int:
        """How well a file that begins with ``head`` matches: 0 not at all, 1 by its suffix, more by its first bytes."""
        if self.magic and head.startswith(self.magic):
            return 1 + len(self.magic)
        return int(path.name.lower().endswith(self.suffixes)) if not self.magic else 0


def format_of(path: str | os.PathLike[str], known: Sequence[FileFormat]) -> FileFormat:
    """The format of a file: of those that match its first bytes the one with the longest, else by its suffix.

    Raises:
        UnknownNameError: none of them fits.
        OSError: the file cannot be read.
    """
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(64)
    best = max(known, key=lambda fmt: fmt.fits(file, head), default=None)
    if best is None or not best.fits(file, head):
        names = [suffix for fmt in known for suffix in fmt.suffixes]
        raise UnknownNameError("file format", file.suffix or file.name, names, "(plugins may add others)")
    return best


class LoadedBackend(NamedTuple):
    """A loaded backend and its usable devices. ``rank``: its position in ``OPWEAVE_BACKENDS``, lower is preferred."""

    backend: Backend
    devices: list[Device]
    rank: int


@dataclass(eq=False)
class Plugin:
    """A plugin as the registry keeps it, from discovery to unloading.

    Attributes:
        name, distribution, version, value, variant: as in `PluginRecord`.
        score: how well it suits this machine, where it is a variant and was asked.
        requires: the distribution's ``Requires-Dist`` lines.
        packages: top-level import names of its distribution.
        origin: the folder or file it was found in.
        has_backends: it is in the group of backends; others have hooks only.
        fetch: imports it and returns the entry point's value; ``None`` if there is nothing to import.
        module: its module, if that has hooks; set when it is imported.
        backends, ops: its backends and operations, once it is ready.
        unusable: its devices that do not work.
        loading: its code is running now.
        tried: its code was run at least once; after a failure `Registry.load` may try again.
        uninstalled: it was there once, and is no longer installed.
    """

    name: str
    value: str
    fetch: Callable[[], object] | None = None
    _: KW_ONLY
    distribution: str = ""
    version: str = ""
    requires: Sequence[str] = ()
    packages: frozenset[str] = frozenset()
    origin: str = ""
    has_backends: bool = True
    variant: str = field(default="", init=False)
    score: float = field(default=0.0, init=False)
    state: State = field(default=State.DISCOVERED, init=False)
    backends: list[LoadedBackend] = field(default_factory=list, init=False)
    unusable: list[UnusableDevice] = field(default_factory=list, init=False)
    ops: list[OpDef] = field(default_factory=list, init=False)
    module: object = field(default=None, init=False)
    loading: bool = field(default=False, init=False)
    tried: bool = field(default=False, init=False)
    uninstalled: bool = field(default=False, init=False)
    _error: PluginError | None = field(default=None, init=False)
    _cause: BaseException | None = field(default=None, init=False)
    _traceback: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name, _, self.variant = self.name.partition("@")

    @property
    def label(self) -> str:
        """Where it comes from, for messages."""
        return " ".join(part for part in (self.distribution, self.version) if part) or self.value

    @property
    def may_have_hooks(self) -> bool:
        """Whether it may be a module with hooks, judged by its entry point: files, and modules without ``:name``."""
        return bool(self.fetch) and (not self.distribution or ":" not in self.value)

    @property
    def owns_name(self) -> bool:
        """Whether its distribution is named ``opweave-<name>``."""
        return canonical(self.distribution) == canonical(f"opweave-{self.name}")

    @property
    def claims_name(self) -> bool:
        """Whether it takes part in name conflicts: disabled and incompatible plugins, and those that lost a conflict,
        do not."""
        lost = isinstance(self._error, NameConflict)
        return not lost and self.state not in (State.DISABLED, State.INCOMPATIBLE)

    def ready(self, backends: Sequence[LoadedBackend], missing: Sequence[PluginError] = ()) -> None:
        """Set the state to ready; ``missing``: the errors of its backends that are unavailable."""
        self.state = State.READY
        self.backends = list(backends)
        self._cause, self._traceback = None, ""
        message, remedy = "; ".join(e.message for e in missing), "; ".join(e.remedy for e in missing if e.remedy)
        self._error = Unavailable(message, remedy=remedy) if missing else None

    def fail(
        self, error: PluginError, cause: BaseException | None = None, *, traceback: str = "", state: State | None = None
    ) -> None:
        """Set the state that belongs to ``error``, or the given one."""
        self.state = state or _STATES.get(type(error), State.BROKEN)
        self._error, self._cause, self._traceback = error, cause, traceback

    def leave(self, error: PluginError | None) -> None:
        """Say of a plugin that is ready why it will not stay, or that it stays."""
        if self.state is State.READY:
            self._error = error

    def reset(self) -> None:
        """Set the state back to discovered."""
        self.state = State.DISCOVERED
        self.backends, self.unusable, self.ops, self.module = [], [], [], None
        self._error, self._cause, self._traceback = None, None, ""

    def failure(self) -> PluginError:
        """A new exception that says why it is not ready, with its distribution, version and a remedy."""
        known = self._error or Broken("its devices were asked for while it is being loaded")
        error = type(known)(
            known.message, remedy=known.remedy, plugin=self.name, distribution=self.distribution, version=self.version
        )
        error.__cause__ = self._cause
        return error

    def record(self) -> PluginRecord:
        return PluginRecord(
            self.name,
            self.distribution,
            self.version,
            self.state,
            self.value,
            tuple(device.name for loaded in self.backends for device in loaded.devices),
            self._error.message if self._error else "",
            self._error.remedy if self._error else "",
            self._traceback,
            tuple(self.unusable),
            self.variant,
        )


_STATES = {
    Unavailable: State.UNAVAILABLE,
    Incompatible: State.INCOMPATIBLE,
    Broken: State.BROKEN,
    NameConflict: State.BROKEN,
}
