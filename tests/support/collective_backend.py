"""A backend of devices with separate memories that exchanges values between them itself, for all at once or each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opweave.contract import Arg, Backend, Call, CollectiveSupport, Device, Stream
from opweave.contract.collectives import CollectiveKind
from opweave.graph.dtypes import DType
from tests.support.devices import BASIC, Separate


class ExchangingBackend(Backend):
    """Devices ``x:0``, ``x:1``, ...; notes each collective that it prepares and makes.

    Args:
        count: how many devices.
        order, together: what it says of all collectives.
        fault: called with the kind, the results and the parts after each collective.
    """

    name = "x"

    def __init__(
        self,
        count: int = 2,
        order: Any = "shards",
        together: bool = True,
        fault: Callable[[str, list[Any], list[Any]], None] = lambda kind, outs, parts: None,
    ) -> None:
        self.members = [Separate(f"x:{i}", BASIC) for i in range(count)]
        for i, member in enumerate(self.members):
            member.backend, member.id = self, f"{i}"
        self.order, self.together, self.fault = order, together, fault
        self.asked: list[tuple[str, str, int]] = []
        self.made: list[str] = []

    def devices(self) -> Sequence[Device]:
        return self.members

    def collective_support(
        self, kind: CollectiveKind, devices: Sequence[Device], dtype: DType, size: int
    ) -> CollectiveSupport | None:
        self.asked.append((kind, dtype.name, size))
        return None if self.order is None else CollectiveSupport(self.order, self.together)

    def bind_collective(self, kind: CollectiveKind, stream: Stream, outs: Sequence[Arg], parts: Sequence[Arg]) -> Call:
        results, given = [out.view for out in outs], [part.view for part in parts]

        def call() -> None:
            self.made.append(kind)
            if kind == "all_gather":
                axis = next(a for a, n in enumerate(results[0].shape) if n != given[0].shape[a])
                wholes = [np.concatenate(given, axis)] * len(results)
            else:
                total = given[0].astype(np.float32) if given[0].dtype.itemsize < 4 else given[0].copy()
                for other in given[1:]:
                    total = total + other.astype(total.dtype)
                wholes = [total] * len(results)
                if kind == "reduce_scatter" and self.together:
                    wholes = np.split(total.reshape(-1), len(results))
            for out, whole in zip(results, wholes, strict=True):
                out[...] = whole.reshape(out.shape).astype(out.dtype)
            self.fault(kind, results, given)

        return call
