"""What is known about a plugin: its `State`, the `PluginRecord` shown to people, the registry's own `Plugin`; and the
records that plugins bring by hooks, `Diagnosis` and `FileFormat`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from opweave.errors import Broken, Incompatible, NameConflict, PluginError, Unavailable
from opweave.registry.naming import canonical

if TYPE_CHECKING:
    from pathlib import Path

    from opweave.contract.backend import Backend
    from opweave.contract.device import Device
    from opweave.graph.opdef import OpDef

__all__ = ["Diagnosis", "FileFormat", "LoadedBackend", "Plugin", "PluginRecord", "State", "UnusableDevice"]


class State(enum.Enum):
    """How far a plugin has come."""

    DISCOVERED = "discovered"
    """Its metadata was read; nothing was imported."""
    DISABLED = "disabled"
    """A setting excludes it; it is not imported."""
    INCOMPATIBLE = "incompatible"
    """It asks for another version of opweave; it is not imported."""
    BROKEN = "broken"
    """Its code failed, or what it returned makes no sense."""
    UNAVAILABLE = "unavailable"
    """It is sound, but the hardware, driver or library it needs is not here."""
    READY = "ready"
    """Its devices are there."""


class UnusableDevice(NamedTuple):
    """A device that is here but does not work; see `Device.probe`.

    Attributes:
        name, description: the device's.
        error: why, in the driver's own words.
        remedy: what the reader can do about it.
    """

    name: str
    description: str
    error: str
    remedy: str = ""


class PluginRecord(NamedTuple):
    """What is known about one plugin at one moment.

    Attributes:
        name: the entry point's name, which begins the names of its devices.
        distribution, version: the package that carries it; ``""`` for files and for what a program registered.
        state: how far it has come.
        value: what the entry point names (``"opweave_acme:Acme"``), or the path of the file.
        devices: names of its devices.
        error: why it is not ready, ``""`` if it is. A ready plugin may name backends of its own that are missing.
        remedy: what the reader can do about it.
        traceback: the innermost frames of the failure as text, ``""`` where no code failed.
        unusable: its devices that do not work. Where that is all of them, the plugin is unavailable.
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


class Diagnosis(NamedTuple):
    """What a check of ``opweave doctor`` found.

    Attributes:
        about: what was looked at, e.g. ``"BLAS"``.
        status: ``"ok"``, ``"slow"`` (it works, and could be faster), or ``"wrong"``.
        message: what was found.
        remedy: the command, or the sentence, that mends it.
    """

    about: str
    status: Literal["ok", "slow", "wrong"]
    message: str
    remedy: str = ""


class FileFormat(NamedTuple):
    """A format of files with weights or models, brought by the hook ``opweave_formats``.

    Attributes:
        name: for people and messages, e.g. ``"safetensors"``.
        suffixes: of file names, with the dot, in lower case.
        load_weights: reads a file: names and arrays (or `opweave.Blocks`), in a mapping that ``ow.weights`` takes.
            ``None``: the format holds none.
        load_model: makes what the format calls a model of a file; ``None``: the format holds none.
        magic: bytes with which such files begin, ``b""`` where nothing tells them; they decide before the suffix.
    """

    name: str
    suffixes: tuple[str, ...]
    load_weights: Callable[[Path], Mapping[str, Any]] | None = None
    load_model: Callable[[Path], Any] | None = None
    magic: bytes = b""

    def fits(self, path: Path, head: bytes) -> int:
        """How well a file that begins with ``head`` fits: 0 not at all, 1 by its suffix, more by its first bytes."""
        if self.magic and head.startswith(self.magic):
            return 1 + len(self.magic)
        return int(path.name.lower().endswith(self.suffixes)) if not self.magic else 0


class LoadedBackend(NamedTuple):
    """A backend and the devices it gave. ``rank``: place in ``OPWEAVE_BACKENDS``, lower is preferred."""

    backend: Backend
    devices: list[Device]
    rank: int


class Plugin:
    """A plugin as the registry keeps it, from discovery to unloading.

    Attributes:
        name, distribution, version, value: as in `PluginRecord`.
        requires: the distribution's ``Requires-Dist`` lines.
        packages: top-level import names that belong to it.
        origin: the folder or file it was found in.
        fetch: imports it and gives its value; ``None`` where there is nothing to import.
        module: its module, if that has hooks; known from import on.
        backends, ops: what it brought, once ready.
        unusable: what it has of devices that do not work.
        loading: its code is running right now.
        tried: its code was run; what failed then may be tried again.
    """

    def __init__(
        self,
        name: str,
        value: str,
        fetch: Callable[[], object] | None = None,
        *,
        distribution: str = "",
        version: str = "",
        requires: Sequence[str] = (),
        packages: frozenset[str] = frozenset(),
        origin: str = "",
    ) -> None:
        self.name, self.value, self.fetch = name, value, fetch
        self.distribution, self.version, self.requires = distribution, version, requires
        self.packages, self.origin = packages, origin
        self.state = State.DISCOVERED
        self.backends: list[LoadedBackend] = []
        self.unusable: list[UnusableDevice] = []
        self.ops: list[OpDef] = []
        self.module: object = None
        self.loading = self.tried = False
        self._error: PluginError | None = None
        self._cause: BaseException | None = None
        self._traceback = ""

    @property
    def label(self) -> str:
        """Where it comes from, for messages."""
        return " ".join(part for part in (self.distribution, self.version) if part) or self.value

    @property
    def may_have_hooks(self) -> bool:
        """Whether it may be a module with hooks, as far as its entry point tells."""
        return bool(self.fetch) and (not self.distribution or ":" not in self.value)

    @property
    def owns_name(self) -> bool:
        """Whether its distribution is the one that is called after its name, ``opweave-<name>``."""
        return canonical(self.distribution) == canonical(f"opweave-{self.name}")

    @property
    def claims_name(self) -> bool:
        """Whether its name is its own: plugins that are never imported, or have lost it to another, claim nothing."""
        lost = isinstance(self._error, NameConflict)
        return not lost and self.state not in (State.DISABLED, State.INCOMPATIBLE)

    def ready(self, backends: Sequence[LoadedBackend], missing: Sequence[PluginError] = ()) -> None:
        """Its devices are there, ``missing`` being backends of it that are unavailable."""
        self.state = State.READY
        self.backends = list(backends)
        self._cause, self._traceback = None, ""
        message, remedy = "; ".join(e.message for e in missing), "; ".join(e.remedy for e in missing if e.remedy)
        self._error = Unavailable(message, remedy=remedy) if missing else None

    def fail(
        self, error: PluginError, cause: BaseException | None = None, *, traceback: str = "", state: State | None = None
    ) -> None:
        """It cannot be used, because of ``error``."""
        self.state = state or _STATES.get(type(error), State.BROKEN)
        self._error, self._cause, self._traceback = error, cause, traceback

    def reset(self) -> None:
        """Back to discovered."""
        self.state = State.DISCOVERED
        self.backends, self.unusable, self.ops, self.module = [], [], [], None
        self._error, self._cause, self._traceback = None, None, ""

    def failure(self) -> PluginError:
        """Why it is not ready, as a new exception that names the plugin, its distribution, version and a remedy."""
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
            tuple(device.name for family in self.backends for device in family.devices),
            self._error.message if self._error else "",
            self._error.remedy if self._error else "",
            self._traceback,
            tuple(self.unusable),
        )


_STATES = {
    Unavailable: State.UNAVAILABLE,
    Incompatible: State.INCOMPATIBLE,
    Broken: State.BROKEN,
    NameConflict: State.BROKEN,
}
