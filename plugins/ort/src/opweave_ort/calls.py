"""`SessionCall`: the run of a session on bound memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opweave.contract import Call
from opweave_ort.runtime import RUNTIME

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave_ort.sessions import Session
    from opweave_ort.stream import OrtStream

__all__ = ["Places", "SessionCall"]


class Places(NamedTuple):
    """Where a session reads and writes.

    Attributes:
        inputs, outputs: type, shape and address of each.
        constants: those that are inputs of the session.
    """

    inputs: Sequence[tuple[DType, Shape, int]]
    outputs: Sequence[tuple[DType, Shape, int]]
    constants: Mapping[str, np.ndarray[Any, Any]]


class SessionCall:
    """The run of a session on bound memory, after the calls ``before``; keeps alive what is bound.

    Attributes:
        remark: what `Program.explain` shows.
        arena: bytes by which the arena grew when it first ran.
    """

    __slots__ = (
        "_before", "_kept", "_options", "_places", "_renewed", "_run", "_session", "_stream", "arena", "remark",
    )  # fmt: skip

    def __init__(
        self,
        stream: OrtStream,
        session: Session,
        places: Places,
        before: Sequence[Call],
        kept: Sequence[Any],
        remark: str,
        renewed: Callable[[object], Mapping[str, Any]],
    ) -> None:
        self._session, self._places, self._before, self._kept = session, places, before, kept
        self._stream, self._options = stream, stream.run_options
        self._renewed = renewed
        self._run: Call = partial(self._first, self._bound())
        self.remark, self.arena = remark, 0

    def __call__(self) -> None:
        for call in self._before:
            call()
        # An earlier run was ended by it. Whoever ends this one says so before setting it again.
        self._options.terminate = False
        if not self._stream.ending:
            self._run()

    def _first(self, run: Call) -> None:
        self.arena = RUNTIME.measured(run)
        self._run = run

    def _bound(self) -> Call:
        """A run of the session on its memory."""
        binding = self._session.bind(*self._places)
        return partial(self._session.native.run_with_iobinding, binding, self._options)

    @property
    def library_bytes(self) -> int:
        """Bytes that ONNX Runtime has taken: for repacked weights, and in its arena."""
        return self._session.repacked + self.arena

    def refresh(self, token: object) -> None:
        """Use weights that were written: ONNX Runtime packs them when a session is opened."""
        self._session.refresh(token, partial(self._renewed, token))
        self._run = self._bound()
