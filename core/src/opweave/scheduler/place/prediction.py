"""What a run is predicted to take: time (`Prediction`) and memory (`MemoryUse`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor

__all__ = ["MemoryUse", "Prediction"]


class MemoryUse(NamedTuple):
    """Bytes of a program on one device: what was planned, and what libraries say that they took for themselves."""

    temporaries: int
    weights: int
    states: int
    library: int = 0


class Prediction(NamedTuple):
    """The predicted time and memory of a run.

    Attributes:
        seconds: of one run: steps, transfers, inputs and results. Asynchronous devices, those with a thread of their
            own (``parallel=True``), and those of weights in shards work while others do; of what is computed at once
            the slowest counts.
        busy: device -> seconds of its steps.
        copies: seconds of transfers: between memories, of inputs from the host, of results to it.
        nodes: computed tensor -> seconds.
        splits: seconds of each split, copies before and after it included.
        memory: device -> bytes, planned as for a program but not allocated.
        short: device -> missing bytes, for devices whose memory does not suffice.
    """

    seconds: float
    busy: dict[str, float]
    copies: float
    nodes: Mapping[Tensor, float]
    splits: list[float]
    memory: dict[str, MemoryUse]
    short: dict[str, int]

    @property
    def interval(self) -> float:
        """Seconds between the ends of two runs that overlap (pipelining): those of the busiest device."""
        return max(self.busy.values(), default=0.0)
