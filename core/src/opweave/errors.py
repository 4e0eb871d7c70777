"""Every error that opweave raises on purpose.

::

    OpweaveError
    ├── ShapeError (ValueError)             shapes that do not fit an operation
    ├── DTypeError (TypeError)              a dtype that an operation or a device does not support
    ├── LayoutError (ValueError)            a view that strides cannot express, a split quantized block
    ├── HazardError                         conflicting reads and writes, writes to read-only memory
    ├── UnknownNameError (KeyError)         a name that does not exist; suggests similar ones
    ├── UnsupportedOpError                  no device runs a node; has the reason of every device
    ├── AllocationError (MemoryError)       a device has not enough free memory
    ├── BoundsError (IndexError)            a byte range outside its buffer, an index outside its axis
    ├── FormatError (ValueError)            a file or saved bytes that are damaged, cut off, or contradict themselves
    ├── PathError (OSError)                 a file that cannot be written where it was asked for
    ├── LifetimeError                       something freed, closed, busy or of another device was used
    ├── DeviceLostError                     a device stopped working; its buffers are lost
    ├── ExecutionError                      a run failed; has node, device, half-written states
    ├── SchedulerError                      a scheduler or program was asked for something impossible
    ├── GradientError                       no gradient leads from a loss to a parameter
    ├── CheckpointError                     a damaged checkpoint, or one of another training
    ├── Cancelled                           a run was ended early on request
    └── PluginError                         has plugin, distribution, version, remedy
        ├── Broken                          the code of a plugin failed or breaks the contract
        ├── Unavailable                     no such hardware, driver or library here
        ├── Incompatible                    a plugin for another version of opweave
        └── NameConflict                    two plugins use the same name
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

__all__ = [
    "AllocationError",
    "BoundsError",
    "Broken",
    "Cancelled",
    "CheckpointError",
    "DTypeError",
    "DeviceLostError",
    "ExecutionError",
    "FormatError",
    "GradientError",
    "HazardError",
    "Incompatible",
    "LayoutError",
    "LifetimeError",
    "NameConflict",
    "OpweaveError",
    "PathError",
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
    # Python refuses either one for the other kind.
    error: OpweaveError = (OSError if issubclass(cls, OSError) else Exception).__new__(cls, *args)
    vars(error).update(attributes)
    return error


class ShapeError(OpweaveError, ValueError):
    """Shapes that do not fit an operation, or an array that does not fit its tensor."""


class DTypeError(OpweaveError, TypeError):
    """A dtype that an operation, a kernel or a leaf does not support."""


class LayoutError(OpweaveError, ValueError):
    """A view that strides cannot express or that splits a quantized block, or bytes that are not contiguous."""


class HazardError(OpweaveError):
    """Reads and writes of the same memory that no order of the nodes satisfies, or a write to read-only memory."""


class UnknownNameError(OpweaveError, KeyError):
    """A name that does not exist. The message suggests similar ones.

    Args:
        what: the kind of thing that was looked up, e.g. ``"device"``; also an attribute.
        name: the name that was asked for; also an attribute.
        known: the names that exist; as an attribute sorted.
        hint: a sentence to add to the message.
        listed: the names that exist are listed beside suggestions, too; else only where nothing is similar.
    """

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "", *, listed: bool = False) -> None:
        self.what, self.name, self.known = what, name, sorted(set(known))
        self._hint, self._listed = hint, listed
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        if self.args:
            return str(self.args[0])  # it comes from another process, with its message
        # Made where it is read: `Mapping.get` raises this for each name that is not there, and finding similar ones
        # takes milliseconds among hundreds. Its import costs as much as the others of this module together.
        from difflib import get_close_matches

        close = get_close_matches(self.name.lower(), [k.lower() for k in self.known], n=3, cutoff=0.5)
        close = [k for k in self.known if k.lower() in close]
        message = f"there is no {self.what} named {self.name!r}"
        if close:
            message += f"; did you mean {' or '.join(map(repr, close))}?"
        if self.known and (self._listed or not close):
            message += f"{' There' if close else '; there'} are: {', '.join(self.known[:20])}"
        if self._hint[:1].isupper() and not message.endswith("?"):
            message += "."
        return f"{message} {self._hint}".rstrip()


class UnsupportedOpError(OpweaveError):
    """No device that may run a node supports it.

    Attributes:
        reasons: device name -> why that device does not run the node.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        super().__init__("\n".join([message, *(f"  {device}: {why}" for device, why in self.reasons.items())]))


class AllocationError(OpweaveError, MemoryError):
    """An allocation is larger than the free memory of a device, or than its largest buffer.

    Attributes:
        device: name of the device.
        requested: bytes that were asked for.
        free: free bytes as the device reports them, ``None`` if it does not know.
    """

    def __init__(self, device: str, requested: int, free: int | None, detail: str = "") -> None:
        self.device, self.requested, self.free = device, requested, free
        known = "unknown" if free is None else f"{free:,}"
        message = f"{device} cannot allocate {requested:,} bytes (free: {known})"
        super().__init__(f"{message}: {detail}" if detail else message)


class BoundsError(OpweaveError, IndexError):
    """A byte range outside of its buffer, or an index outside of its axis."""


class FormatError(OpweaveError, ValueError):
    """A file or saved bytes that are cut off, damaged, of another version, or not of the format that the name or the
    first bytes promise. The message says what does not fit, and in which file."""


class PathError(OpweaveError, OSError):
    """A file that cannot be written where it was asked for: a missing folder, one that may not be written to."""


class LifetimeError(OpweaveError):
    """A buffer, stream, plan or program was used after it was freed or closed, on a device that cannot reach it, in a
    forked child, or while another thread is submitting to the stream."""


class DeviceLostError(OpweaveError):
    """A device stopped working. Its buffers and streams are lost; other devices are not affected."""


class ExecutionError(OpweaveError):
    """A run, or the preparation of one in a backend's code, failed.

    Attributes:
        node: the node that was running: operation, name, and file and line where the tensor was built; ``""`` if that
            is not known.
        device: name of the device, or ``""``.
        states: names of the states that may be half written; reading them raises until they are written again.
    """

    def __init__(self, message: str, *, node: str = "", device: str = "", states: Iterable[str] = ()) -> None:
        self.node, self.device, self.states = node, device, tuple(states)
        super().__init__(message)


def raise_backend_failure(error: BaseException, device: str, doing: str, node: str = "") -> NoReturn:
    """Raise the exception of a backend's code: an `OpweaveError` with a note that names ``node`` if it names none yet,
    a ``KeyboardInterrupt`` unchanged, others (``SystemExit`` too) as the cause of an `ExecutionError`.

    Args:
        error: what the backend raised.
        device: name of the device.
        doing: what the backend was doing, e.g. ``"preparing a kernel"``.
        node: the operation concerned, as messages show it.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    what = f"{doing} for {node}" if node else doing
    if isinstance(error, OpweaveError):
        if node and not getattr(error, "node", "") and not getattr(error, "__notes__", ()):
            error.add_note(f"{device} was {what}")
        if isinstance(error, ExecutionError):
            error.node, error.device = error.node or node, error.device or device
        raise error
    message = f"{device} failed while {what}: {type(error).__name__}: {error}"
    raise ExecutionError(message, node=node, device=device) from error


class SchedulerError(OpweaveError):
    """A scheduler, program or leaf was used in a way that is not possible."""


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes (``__cause__``), the outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def not_pickled(what: object) -> SchedulerError:
    """The error for what is bound to memory and devices of this process, when it is pickled or copied."""
    return SchedulerError(
        f"{what!r} cannot be copied or pickled: it is bound to memory and devices of this process. Pickle its graph, "
        "ow.Graph(outputs) or ow.Graph(outputs).to_bytes(), and build that where it is to run"
    )


def simulated_error(name: str) -> SchedulerError:
    """The error for allocating memory or running steps on a simulated device of that name."""
    return SchedulerError(
        f"{name} is simulated: Scheduler.partition plans, explains and predicts with it, nothing can be stored "
        "or run there; give weights as ow.Spec"
    )


class GradientError(OpweaveError):
    """A loss does not depend on a parameter, or only through an operation that has no gradient.

    Attributes:
        path: the tensors from the loss to the parameter, the operation in question among them, as messages show them.
    """

    def __init__(self, message: str, path: Iterable[str] = ()) -> None:
        self.path = tuple(path)
        super().__init__("\n".join([message, *(f"  {step}" for step in self.path)]))


class CheckpointError(OpweaveError):
    """A checkpoint that is missing, damaged, or of another training: other parameters, options or data."""


class Cancelled(OpweaveError):
    """A run was ended early: by ``Scheduler.cancel``, the ``cancel`` of its future, or ``Stream.abort``."""


class PluginError(OpweaveError):
    """Base of the errors about plugins.

    Attributes:
        message: what is wrong.
        plugin: name of the entry point, ``""`` until the registry knows it.
        distribution, version: the package that contains the plugin, ``""`` if not known.
        remedy: what the reader can do about it, ``""`` if not known.
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
    """The plugin's code failed or does not keep to the contract."""


class Unavailable(PluginError):
    """The hardware, driver or library that a plugin or device needs is missing or cannot be used in this process."""


class Incompatible(PluginError):
    """The plugin is for another version of opweave."""


class NameConflict(PluginError):
    """Two plugins use the same name."""
