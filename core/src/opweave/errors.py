"""Every error that opweave raises on purpose.

::

    OpweaveError
    ├── ShapeError (ValueError)             shapes that do not fit an operation
    ├── DTypeError (TypeError)              a type that an operation or a device does not take
    ├── LayoutError (ValueError)            a view that cannot be expressed, a cut quantized block
    ├── HazardError                         reads and writes without an order, writes to what is read-only
    ├── UnknownNameError (KeyError)         a name that does not exist, with the ones that come close
    ├── UnsupportedOpError                  no device runs a node; carries every device's reason
    ├── AllocationError (MemoryError)       device, requested, free
    ├── BoundsError (IndexError)            a byte range outside its buffer
    ├── LifetimeError                       something freed, closed or foreign was used
    ├── DeviceLostError                     the device is gone; its buffers are too
    ├── ExecutionError                      a run failed: node, device, half-written states
    ├── SchedulerError                      a scheduler or program was asked for something impossible
    ├── Cancelled                           the caller ended the run
    └── PluginError                         carries plugin, distribution, version, remedy
        ├── Broken                          its code failed
        ├── Unavailable                     no such hardware, driver or library here
        ├── Incompatible                    it was made for another version of opweave
        └── NameConflict                    two plugins claim one name
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

__all__ = [
    "AllocationError",
    "BoundsError",
    "Broken",
    "Cancelled",
    "DTypeError",
    "DeviceLostError",
    "ExecutionError",
    "HazardError",
    "Incompatible",
    "LayoutError",
    "LifetimeError",
    "NameConflict",
    "OpweaveError",
    "PluginError",
    "SchedulerError",
    "ShapeError",
    "Unavailable",
    "UnknownNameError",
    "UnsupportedOpError",
]


class OpweaveError(Exception):
    """Base of every error that opweave raises on purpose. They can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with the message, which is not what constructors here take.
        return _restore, (type(self), self.args, dict(vars(self)))


def _restore(cls: type[OpweaveError], args: tuple[Any, ...], attributes: dict[str, Any]) -> OpweaveError:
    error = Exception.__new__(cls, *args)
    vars(error).update(attributes)
    return error


class ShapeError(OpweaveError, ValueError):
    """Shapes that do not fit an operation, or an array that does not fit its tensor."""


class DTypeError(OpweaveError, TypeError):
    """A type that an operation, a kernel or a leaf does not take."""


class LayoutError(OpweaveError, ValueError):
    """A view that strides cannot express, or one that cuts a quantized block."""


class HazardError(OpweaveError):
    """Reads and writes of the same memory that no order of the nodes makes right, or a write to what is read-only."""


class UnknownNameError(OpweaveError, KeyError):
    """A name that does not exist. The message suggests the ones that come close.

    Args:
        what: what was looked up, e.g. ``"device"``.
        name: the name that was asked for.
        known: the names that exist.
    """

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        from difflib import get_close_matches  # costs as much to import as the rest of this room together

        self.what, self.name, self.known = what, name, sorted(known)
        close = get_close_matches(name.lower(), [k.lower() for k in self.known], n=3, cutoff=0.5)
        close = [k for k in self.known if k.lower() in close]
        message = f"there is no {what} named {name!r}"
        if close:
            message += f"; did you mean {' or '.join(map(repr, close))}?"
        elif self.known:
            message += f"; there are: {', '.join(self.known[:20])}"
        super().__init__(f"{message} {hint}".rstrip())

    # A KeyError shows its message in quotes.
    __str__ = Exception.__str__


class UnsupportedOpError(OpweaveError):
    """No device that may run a node supports it.

    Attributes:
        reasons: device name -> why that device does not run the node.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        super().__init__("\n".join([message, *(f"  {device}: {why}" for device, why in self.reasons.items())]))


class AllocationError(OpweaveError, MemoryError):
    """A device could not give memory.

    Attributes:
        device: name of the device.
        requested: bytes asked for.
        free: bytes free by the device's own account, or ``None`` where it does not know.
    """

    def __init__(self, device: str, requested: int, free: int | None, detail: str = "") -> None:
        self.device, self.requested, self.free = device, requested, free
        known = "unknown" if free is None else f"{free:,}"
        message = f"{device} cannot allocate {requested:,} bytes (free: {known})"
        super().__init__(f"{message}: {detail}" if detail else message)


class BoundsError(OpweaveError, IndexError):
    """A byte range or an index outside of what it indexes."""


class LifetimeError(OpweaveError):
    """A buffer, stream, plan or program was used after it was freed or closed, or where it does not belong."""


class DeviceLostError(OpweaveError):
    """The device stopped answering. Its buffers and streams are gone; others go on."""


class ExecutionError(OpweaveError):
    """A run, or the preparation of one in a backend's code, failed.

    Attributes:
        node: what was running: op, name and the place where the tensor was built.
        device: name of the device.
        states: names of the states that may be half written; they refuse reads until rewritten.
    """

    def __init__(self, message: str, *, node: str = "", device: str = "", states: Iterable[str] = ()) -> None:
        self.node, self.device, self.states = node, device, tuple(states)
        super().__init__(message)


def raise_backend_failure(error: Exception, device: str, doing: str, node: str = "") -> NoReturn:
    """Raise what a backend's own code raised: one of our errors as it is, others as the cause of an `ExecutionError`.

    Args:
        doing: what the backend was asked for, e.g. ``"preparing a kernel"``.
        node: the operation that it was asked for, as messages show it.
    """
    if isinstance(error, OpweaveError):
        raise error
    what = f"{doing} for {node}" if node else doing
    message = f"{device} failed while {what}: {type(error).__name__}: {error}"
    raise ExecutionError(message, node=node, device=device) from error


class SchedulerError(OpweaveError):
    """A scheduler or a program was asked for something that it cannot do."""


class Cancelled(OpweaveError):
    """The run was ended by its caller."""


class PluginError(OpweaveError):
    """Something about a plugin.

    Attributes:
        plugin: entry-point name, ``""`` until the registry knows it.
        distribution, version: the package that carries the plugin, where known.
        remedy: what the reader can do about it.
    """

    def __init__(
        self, message: str = "", *, remedy: str = "", plugin: str = "", distribution: str = "", version: str = ""
    ) -> None:
        self.message, self.remedy = message, remedy
        self.plugin, self.distribution, self.version = plugin, distribution, version
        super().__init__(message)

    def __str__(self) -> str:
        origin = " ".join(part for part in (self.distribution, self.version) if part)
        head = f"plugin {self.plugin!r}" + (f" ({origin})" if origin else "") + ": " if self.plugin else ""
        return head + self.message + (f"\n  remedy: {self.remedy}" if self.remedy else "")


class Broken(PluginError):
    """The plugin's own code failed."""


class Unavailable(PluginError):
    """The plugin is sound, but the hardware, driver or library it needs is not here."""


class Incompatible(PluginError):
    """The plugin was made for another version of opweave."""


class NameConflict(PluginError):
    """Two plugins claim one name."""
