"""Collectives over memory of this process: `Sum` adds parts; and `bind_collective`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.errors import raise_backend_failure
from opweave.runtime.stream import Stream
from opweave.runtime.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.contract.collectives import CollectiveKind, Collectives
    from opweave.contract.step import Arg, Call

__all__ = ["Sum", "bind_collective"]

Array = np.ndarray[Any, Any]

CHUNK: Final = 1 << 17
"""Bytes of a sum that are finished before the next ones are begun, so that they stay in the processor's cache while
more than two parts are added."""


def bind_collective(
    kind: CollectiveKind, provider: Collectives | None, stream: Stream, outs: Sequence[Arg], parts: Sequence[Arg]
) -> tuple[Call, bool]:
    """Prepare a collective of a backend, or a sum in memory of the host.

    Args:
        provider: the backend's procedure; ``None``: the host adds.
        stream, outs, parts: as of `Collectives.bind_collective`, with a bias as the last part.

    Returns:
        The call, and whether it is queued on ``stream``; if not, the calling thread does it.

    Raises:
        ExecutionError: the backend cannot prepare it.
    """
    if isinstance(stream, WorkerStream):
        call, _ = bind_collective(kind, provider, stream.inner, outs, parts)
        return partial(stream.call, call), True
    if provider is None:
        return Sum(outs[0].view, [part.view for part in parts]), False
    try:
        call = provider.bind_collective(kind, stream, outs, parts)
        return (partial(stream.submit_work, call), True) if stream.is_async else (call, False)
    except BaseException as error:
        raise_backend_failure(error, stream.device.name, f"preparing {kind}")


class Sum:
    """A call that adds arrays of one shape in order, half types in f32, which is rounded once.

    Args:
        out: gets the sum; overlaps none of the others.
        terms: two arrays or more of its shape and dtype.
    """

    __slots__ = ("_chunks", "_wide")

    def __init__(self, out: Array, terms: Sequence[Array]) -> None:
        wide = out.dtype.itemsize < 4 and not np.can_cast(out.dtype, np.int64)
        if all(array.flags.c_contiguous for array in (out, *terms)):
            out, terms = out.reshape(-1), [term.reshape(-1) for term in terms]
        rows = len(out) if len(terms) == 2 and not wide else max(1, CHUNK * len(out) // out.nbytes)
        self._chunks: Final = [
            (out[i : i + rows], [term[i : i + rows] for term in terms]) for i in range(0, len(out), rows)
        ]
        self._wide: Final = np.empty(out[:rows].shape, np.float32) if wide else None

    def __call__(self) -> None:
        with np.errstate(all="ignore"):
            for out, (first, second, *others) in self._chunks:
                if self._wide is None:
                    np.add(first, second, out=out)
                    for other in others:
                        np.add(out, other, out=out)
                    continue
                total = self._wide[: len(out)]
                total[...] = first
                for other in (second, *others):
                    np.add(total, other.astype(np.float32), out=total)
                out[...] = total
