"""`SessionCall`: the run of a session on bound memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract import Arg, Call
from opweave.graph.layout import nbytes
from opweave_ort.limits import limit
from opweave_ort.runtime import RUNTIME

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave_ort.sessions import Session
    from opweave_ort.stream import OrtStream

__all__ = ["Places", "SessionCall"]

FED_BYTES: Final = limit("fed_bytes", 1 << 20, 1, 1 << 24)
"""Bytes of an input from which on copying takes longer than binding a session to another address: a run that reads
4 MiB then takes three quarters of the time. Smaller ones are copied."""

KEPT: Final = 8
"""How many bindings to latest addresses are kept."""


class Places(NamedTuple):
    """Where a session reads and writes.

    Attributes:
        inputs, outputs: type, shape and address of each.
        constants: those that are inputs of the session.
        copied: addresses of operands that are copied to an input before each run.
    """

    inputs: Sequence[tuple[DType, Shape, int]]
    outputs: Sequence[tuple[DType, Shape, int]]
    constants: Mapping[str, np.ndarray[Any, Any]]
    copied: Sequence[int]

    def showing(self, arg: Arg) -> list[int]:
        """The numbers of the inputs that are all of an operand; none where parts of it are read too."""
        start, end = arg.address, arg.address + arg.nbytes
        found = [i for i, (_, _, address) in enumerate(self.inputs) if start <= address < end]
        whole = all(
            address == start and nbytes(shape, dtype) == arg.nbytes
            for dtype, shape, address in [self.inputs[i] for i in found]
        )
        return found if whole and not any(start <= address < end for address in self.copied) else []

    def moved(self, addresses: Mapping[int, int]) -> Places:
        """The places with some inputs elsewhere, given by their numbers."""
        inputs = [(dtype, shape, addresses.get(i, own)) for i, (dtype, shape, own) in enumerate(self.inputs)]
        return self._replace(inputs=inputs)


class SessionCall:
    """The run of a session on bound memory, after the calls ``before``; keeps alive what is bound.

    Attributes:
        remark: what `Program.explain` shows.
        arena: bytes by which the arena grew when it first ran.
    """

    __slots__ = (
        "_addresses", "_before", "_has_run", "_kept", "_options", "_places", "_renewed", "_run", "_runs", "_session",
        "_stream", "arena", "remark",
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
        self._addresses: Final[dict[int, int]] = {}  # of inputs that may lie elsewhere in each run
        self._runs: Final[dict[tuple[int, ...], Call]] = {}  # these addresses -> a run there
        self._run: Call = partial(self._first, self._bound())
        self._has_run = False
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
        self._run, self._has_run = run, True

    def _bound(self) -> Call:
        """A run of the session with its inputs at their present addresses."""
        inputs, outputs, constants, _ = self._places.moved(self._addresses)
        binding = self._session.bind(inputs, outputs, constants)
        return partial(self._session.native.run_with_iobinding, binding, self._options)

    def _bind_and_run(self) -> None:
        if len(self._runs) >= KEPT:
            self._runs.clear()
        run = self._runs[tuple(self._addresses.values())] = self._bound()
        if self._has_run:
            self._run = run
            run()
        else:
            self._first(run)

    def reading(self, arg: Arg) -> Callable[[int], bool] | None:
        """See `OrtStream._bind_feed`."""
        inputs = self._places.showing(arg) if arg.nbytes >= FED_BYTES.value else []
        if not inputs:
            return None
        first, addresses, runs = inputs[0], self._addresses, self._runs
        addresses |= dict.fromkeys(inputs, arg.address)

        def read(address: int) -> bool:
            if address != addresses[first]:
                addresses.update(dict.fromkeys(inputs, address))
                self._run = runs.get(tuple(addresses.values()), self._bind_and_run)
            return True

        return read

    @property
    def library_bytes(self) -> int:
        """Bytes that ONNX Runtime has taken: for repacked weights, and in its arena."""
        return self._session.repacked + self.arena

    def refresh(self, token: object) -> None:
        """Use weights that were written: ONNX Runtime packs them when a session is opened."""
        self._session.refresh(token, partial(self._renewed, token))
        self._runs.clear()
        self._run = self._bound()
