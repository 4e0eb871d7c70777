"""`ObservedValue`: a computed value where it lies, for an observer that reads on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opweave.errors import LifetimeError
from opweave.runtime.host.operands import bind_read

if TYPE_CHECKING:
    import numpy as np

    from opweave.contract.step import Arg
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.device import Device

__all__ = ["ObservedValue"]


class ObservedValue:
    """What an observer is given with ``on_device=True``: nothing is copied to the host unless it calls `read`.

    It shows memory of the program, which later nodes use for other values: it is valid until the observer returns, and
    work that the observer queues on it must be complete by then. It has ``__dlpack__`` where its device exports memory.
    """

    __slots__ = ("_arg",)

    def __init__(self, arg: Arg) -> None:
        self._arg: Arg | None = arg

    @property
    def arg(self) -> Arg:
        """The memory: ``buffer``, ``offset``, ``dtype``, ``shape``, ``strides``. Raises `LifetimeError` once the
        observer has returned."""
        if self._arg is None:
            raise LifetimeError("an observed value is valid until its observer returns; read() gives an array to keep")
        return self._arg

    @property
    def buffer(self) -> Buffer:
        """The buffer in which it lies."""
        buffer = self.arg.buffer
        assert buffer is not None
        return buffer

    @property
    def device(self) -> Device:
        """The device whose memory that is."""
        return self.buffer.device

    def read(self) -> np.ndarray[Any, Any]:
        """The value as a new array on the host; raises `LifetimeError` as `arg`."""
        return bind_read(self.arg)()  # type: ignore[no-any-return]

    def _exported(self) -> Any:
        arg = self.arg
        return self.buffer.exported(arg.offset, arg.dtype, arg.shape, arg.strides)

    def __dlpack__(self, **params: Any) -> Any:
        return self._exported().__dlpack__(**params)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._exported().__dlpack_device__()
        return int(kind), int(number)

    def end(self) -> None:
        """Called when the observer has returned."""
        self._arg = None
