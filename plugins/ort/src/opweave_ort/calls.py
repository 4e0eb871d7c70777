"""`SessionCall`: the run of a session on bound memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opweave.contract import Call
from opweave_ort.model import ONNX_TYPES
from opweave_ort.runtime import RUNTIME

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave_ort.sessions import Opened, Session
    from opweave_ort.stream import OrtStream

__all__ = ["Places", "SessionCall"]


class Places(NamedTuple):
    """Where a session reads and writes.

    Attributes:
        inputs, outputs: type, shape and address of each.
        constants: those of the model, which may be inputs of a session that serves several sizes.
    """

    inputs: Sequence[tuple[DType, Shape, int]]
    outputs: Sequence[tuple[DType, Shape, int]]
    constants: Mapping[str, np.ndarray[Any, Any]]


class SessionCall:
    """The run of a session on bound memory, after the calls ``before``; keeps alive what is bound.

    Args:
        remarks: further texts for `remark`.

    Attributes:
        arena: bytes by which the arena grew when it first ran.
    """

    __slots__ = (
        "__weakref__", "_before", "_bound", "_kept", "_options", "_places", "_ran", "_remarks", "_session", "_stream",
        "arena",
    )  # fmt: skip

    def __init__(
        self,
        stream: OrtStream,
        session: Session,
        places: Places,
        before: Sequence[Call],
        kept: Sequence[Any],
        remarks: Callable[[Session], str],
    ) -> None:
        self._session, self._places, self._before, self._kept = session, places, before, kept
        self._stream, self._options = stream, stream.run_options
        self._bound: tuple[Opened, Call] | None = None
        self._ran, self._remarks, self.arena = False, remarks, 0
        session.join(self)
        self._bind()

    def __call__(self) -> None:
        for call in self._before:
            call()
        # An earlier run was ended by it. Whoever ends this one says so before setting it again.
        self._options.terminate = False
        if self._stream.ending:
            return
        bound = self._bound
        run = bound[1] if bound is not None and bound[0] is self._session.opened else self._bind()
        if self._ran:
            run()
        else:
            self.arena = RUNTIME.measured(run)
            self._ran = True

    def _bind(self) -> Call:
        """A run of the session that is open now, on the call's memory."""
        opened, (inputs, outputs, constants) = self._session.opened, self._places
        binding = opened.native.io_binding()
        for i, (dtype, shape, address) in enumerate(inputs):
            binding.bind_input(f"in{i}", "cpu", 0, ONNX_TYPES[dtype], shape, address)
        for name, array in constants.items():
            if name not in opened.pattern.constants:
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for value, (dtype, shape, address) in zip(opened.native.get_outputs(), outputs, strict=True):
            binding.bind_output(value.name, "cpu", 0, ONNX_TYPES[dtype], shape, address)
        run = partial(opened.native.run_with_iobinding, binding, self._options)
        self._bound = opened, run
        return run

    def unbind(self) -> None:
        """Let go of the session of ONNX Runtime; a run that goes on ends with it."""
        self._bound = None

    @property
    def remark(self) -> str:
        """What `Program.explain` shows."""
        return self._remarks(self._session)

    @property
    def library_bytes(self) -> int:
        """Bytes that ONNX Runtime has taken: for repacked weights, and in its arena."""
        return self._session.repacked + self.arena

    def refresh(self, token: object) -> None:
        """Use weights that were written: ONNX Runtime packs them when a session is opened."""
        self._session.refresh(token)
