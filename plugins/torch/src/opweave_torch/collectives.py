"""`NcclCollectives`: values exchanged between NVIDIA cards (with ROCm: AMD's) by the functions of ``torch.cuda.nccl``.

One process drives all cards, so that one call serves them all. It runs on a queue of its own for each card, beside what
the cards compute: these queues wait for the stream that the call is work of, and that stream waits for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from opweave.contract import CollectiveSupport

if TYPE_CHECKING:
    from opweave.contract import Arg, Call, Device, Stream
    from opweave.contract.collectives import CollectiveKind
    from opweave.graph.dtypes import DType

__all__ = ["NcclCollectives"]

DTYPES: Final = ("f32", "f64", "f16", "i8", "u8", "i32", "i64")
"""The dtypes that NCCL adds up in every version that torch is built with; see `BF16` too."""

BF16: Final = (2, 10)
"""The version of NCCL from which on it adds bf16."""


class NcclCollectives:
    """All-reduce, all-gather and reduce-scatter. NCCL chooses the order of additions by the topology and the size; all
    cards get the same bits."""

    def __init__(self) -> None:
        self._usable: Final[dict[tuple[Device, ...], bool]] = {}
        self._queues: Final[dict[Device, Any]] = {}

    def collective_support(
        self, kind: CollectiveKind, devices: Sequence[Device], dtype: DType, size: int
    ) -> CollectiveSupport | None:
        """Between cards of CUDA or ROCm, where torch was built with NCCL."""
        if any(getattr(device, "target", None) is None or device.target.type != "cuda" for device in devices):  # type: ignore[attr-defined]
            return None
        key = tuple(devices)
        if key not in self._usable:
            self._usable[key] = _is_available(devices)
        if not self._usable[key] or (kind == "reduce_scatter" and size % len(devices)):
            return None
        from torch.cuda import nccl

        known = dtype.name in DTYPES or (dtype.name == "bf16" and tuple(nccl.version()[:2]) >= BF16)
        return CollectiveSupport("any", together=True) if known else None

    def bind_collective(self, kind: CollectiveKind, stream: Stream, outs: Sequence[Arg], parts: Sequence[Arg]) -> Call:
        """One call for all cards, as work of ``stream``."""
        from torch.cuda import nccl

        from opweave_torch.memory import tensor
        from opweave_torch.native import inference_mode

        exchange: Any = getattr(nccl, kind)
        with inference_mode():
            given, results = ([tensor(arg).view(-1) for arg in args] for args in (parts, outs))
        queues = [self._queue(arg.buffer.device) for arg in parts if arg.buffer is not None]
        leader: Any = stream.queue  # type: ignore[attr-defined]  # of a `QueueStream`

        def call() -> None:
            begun = leader.record_event()
            for queue in queues:
                queue.wait_event(begun)
            with inference_mode():
                exchange(given, results, streams=queues)
            for queue in queues:
                leader.wait_event(queue.record_event())

        return call

    def _queue(self, device: Any) -> Any:
        """The queue on which a card exchanges values."""
        if device not in self._queues:
            self._queues[device] = device.api.Stream(device.target)
        return self._queues[device]


def _is_available(devices: Sequence[Device]) -> bool:
    """Whether torch has NCCL for these cards; it has not if one is named twice."""
    import torch
    from torch.cuda import nccl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch was built without it
        return bool(nccl.is_available([torch.empty(0, device=device.target) for device in devices]))  # type: ignore[attr-defined]
