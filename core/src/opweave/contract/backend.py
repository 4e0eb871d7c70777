"""`Backend`: what a plugin registers, and the protocols of its optional procedures (`Backend.extension`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from opweave.runtime.device import Device

__all__ = ["Backend", "Features", "SetThreads"]

P = TypeVar("P")


class Backend:
    """What a plugin registers: a named family of devices. The entry point's name becomes the backend's.

    An author may set its attributes.

    Attributes:
        priority: if several backends offer the same hardware (``Device.hardware_id``), the devices of the backend with
            the highest priority are used by default.
        dynamic: devices come and go while the process runs (`opweave.rescan`), so that having none is no failure.
        name: the name of the entry point; set by the registry.
        version: shown to people. Default: the version of the distribution.
    """

    priority: int = 0
    dynamic: bool = False
    name: str = ""
    version: str = ""

    def devices(self) -> Sequence[Device]:
        """The devices that are present now, including those for which ``Device._probe`` will find that they do not
        work.

        Raises:
            Unavailable: the hardware, driver or library is missing; the remedy says which and how to get it.
        """
        raise NotImplementedError

    @classmethod
    def score(cls) -> float:
        """How well the backend suits this machine. With score 0 it is `Unavailable`, however it is loaded; of variants
        (``acme@cu12``) the one with the highest score is used. Asked once, after the import and before anything else of
        the backend runs. Authors override it; a module with hooks has a function ``opweave_score`` instead. What a
        program registers itself (`opweave.register`) is not asked."""
        return 1.0

    def why_no_device(self, id: str) -> str:
        """What would make a device of this id exist, as a sentence that the error of an unknown name ends with; ``""``:
        nothing. Authors override it."""
        return ""

    def extensions(self) -> Sequence[object]:
        """Objects with further optional procedures, which `extension` searches after the backend itself. Authors
        override it."""
        return ()

    def extension(self, which: type[P] | str) -> Any:
        """An optional procedure of the backend, or ``None`` if it has none.

        Args:
            which: a protocol, e.g. `SetThreads`: returns the object that implements it. Or the name of a method, e.g.
                ``"set_threads"``: returns the bound method.
        """
        for candidate in (self, *self.extensions()):
            if isinstance(which, str):
                found = None if which.startswith("_") else getattr(candidate, which, None)
                if callable(found):
                    return found
            elif isinstance(candidate, which):
                return candidate
        return None

    def __repr__(self) -> str:
        return f"<Backend {self.name or type(self).__name__}>"


@runtime_checkable
class SetThreads(Protocol):
    """The number of threads that the backend's kernels use can be set."""

    def set_threads(self, n: int) -> None:
        """Use ``n`` threads, at least 1, from the next kernel on."""


@runtime_checkable
class Features(Protocol):
    """The backend as a whole has properties worth showing to people."""

    def features(self) -> Mapping[str, Any]:
        """Name -> value, e.g. the version of a driver library."""
