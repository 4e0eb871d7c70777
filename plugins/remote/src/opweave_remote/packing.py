"""`Packing`: whether large uploads over a connection are compressed, by measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Final, NamedTuple

from opweave.concurrency import Lock
from opweave.errors import Unavailable
from opweave_remote.codecs import CODECS, WIDTHS, pack, unpack
from opweave_remote.link import Link
from opweave_remote.wire import Kind

__all__ = ["LARGE", "PART", "Packer", "Packing", "as_sent"]

LARGE: Final = 1 << 20
"""Bytes from which on an upload is large: it goes over the links for those, and may be compressed."""

PART: Final = 1 << 22
"""Bytes of a message of a large transfer: few enough that both links carry some, and that parts are compressed while
others are sent."""

_PROBES: Final = (1 << 16, 1 << 18, 1 << 20)
_LONG: Final = 5e-3
"""Seconds that a probe has to take to be measured well; it also has to take twice as long as a round trip."""
_REPEATS: Final = 4
"""Further probes of the longest size, as far as they take less than `_REPEATED` seconds together."""
_REPEATED: Final = 0.05
_GOOD_FOR: Final = 60.0
"""Seconds after which the connection is measured again."""
_SAMPLES: Final = 4
_SAMPLE: Final = 1 << 14
_WORTH: Final = 0.95
"""Compressing pays if it takes at most so much of the time that sending as it is takes."""


class Packer(NamedTuple):
    """How an upload is compressed: by the codec of a connection, as numbers of ``width`` bytes."""

    packing: Packing
    width: int

    @property
    def codec(self) -> str:
        """The codec's name."""
        return self.packing.codec

    def __call__(self, data: memoryview) -> memoryview | None:
        """A part of the upload, compressed; ``None``: that does not make it smaller."""
        packed = pack(CODECS[self.codec], self.width, data)
        if len(packed) >= len(data):
            return None
        self.packing.raw += len(data)
        self.packing.packed += len(packed)
        return memoryview(packed)


def as_sent(packer: Packer | None, piece: memoryview) -> tuple[memoryview, tuple[int, str, int] | tuple[()]]:
    """What is sent of a part of an upload, and what the message has to say of it: size, codec and bytes of a number
    where it is compressed, nothing where it is sent as it is."""
    packed = None if packer is None else packer(piece)
    if packer is None or packed is None:
        return piece, ()
    return packed, (len(piece), packer.codec, packer.width)


class Packing:
    """Decides for each large upload of a connection whether it is compressed, and how.

    Sending 1 byte as it is takes ``1 / rate`` seconds, where the rate is what the links for large transfers were
    measured to carry. Compressed it takes ``1 / speed of compressing + ratio / rate + 1 / speed of decompressing``,
    where a sample of the upload shows the speeds and the ratio, also those of its bytes grouped as numbers. That
    parts are compressed while others are sent is not counted; it only makes compressing faster still.

    Args:
        links: gives the links for large transfers.
        names: of the codecs that the server knows.

    Attributes:
        codec: the best one that both sides know, ``""``: none.
        raw, packed: bytes that were compressed so far, before and after.
    """

    def __init__(self, links: Callable[[], Sequence[Link]], names: Sequence[str]) -> None:
        self.codec: Final = next((name for name in CODECS if name in names), "")
        self.raw = self.packed = 0
        self._links: Final = links
        self._lock: Final = Lock()
        self._rate = 0.0
        self._measured = float("-inf")

    def rate(self) -> float:
        """Bytes per second that the links for large transfers carry to the server, all together, measured at most once
        a minute; raises as `Connection.open_link`."""
        with self._lock:  # two at a time would measure half
            if monotonic() - self._measured > _GOOD_FOR:
                self._measure()
            return self._rate

    def _measure(self) -> None:
        links = self._links()
        trip = min(_probe(links, 0) for _ in range(3))
        size, took = 0, 0.0
        for size in _PROBES:
            took = _probe(links, size)
            if took > max(_LONG, 2 * trip):
                break
        # Other load makes probes longer, never shorter. Shorter sizes say little, as they hardly exceed a trip.
        until = perf_counter() + _REPEATED
        for _ in range(_REPEATS):
            if perf_counter() + took > until:
                break
            took, trip = min(took, _probe(links, size)), min(trip, _probe(links, 0))
        self._rate, self._measured = size * len(links) / max(took - trip, 1e-6), monotonic()

    def chosen(self, data: memoryview) -> Packer | None:
        """How an upload is compressed, ``None``: not at all, which includes all below `LARGE`."""
        if not self.codec or len(data) < LARGE:
            return None
        try:
            rate = self.rate()
        except Unavailable:  # the client has as many connections as it may
            return None
        if rate > CODECS[self.codec].fastest:
            return None
        step = len(data) // _SAMPLES // 16 * 16  # samples begin where numbers do
        sample = b"".join([data[i * step : i * step + _SAMPLE] for i in range(_SAMPLES)])
        costs = {width: _cost(self.codec, width, sample, rate) for width in WIDTHS}
        best = min(costs, key=costs.__getitem__)
        return Packer(self, best) if costs[best] < _WORTH / rate else None


def _probe(links: Sequence[Link], size: int) -> float:
    """Seconds that it takes to send ``size`` bytes over each of the links, and to receive an answer."""
    data = memoryview(bytes(size))
    start = perf_counter()
    replies = [link.ask(Kind.PROBE, data=data) for link in links]
    for reply in replies:
        reply.link.flush()
    for reply in replies:
        reply.result()
    return perf_counter() - start


def _cost(name: str, width: int, sample: bytes, rate: float) -> float:
    """Seconds for one byte of an upload of which this is a sample, compressed, by a connection of this rate."""
    start = perf_counter()
    packed = pack(CODECS[name], width, memoryview(sample))
    unpack(name, width, memoryview(packed), len(sample))
    return (perf_counter() - start + len(packed) / rate) / len(sample)
