"""Bytes of messages to and from buffers: straight, where the process reaches their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opweave.contract import Buffer
from opweave.contract.transfers import BOUNCE_BYTES
from opweave.errors import FormatError
from opweave_remote.codecs import unpack
from opweave_remote.wire import Kind, encode_again
from opweave_remote.wires import Wire

if TYPE_CHECKING:
    from opweave_remote.server.session import Session

__all__ = ["data_of", "receive_into", "receive_packed"]


def receive_into(wire: Wire, buffer: Buffer, offset: int, size: int) -> None:
    """Take ``size`` bytes of data from the wire into a buffer: straight into its memory, where the process reaches it.
    The range was checked."""
    if not size:
        return
    if buffer.is_host:
        wire.reader.into(buffer.host_bytes(offset, size))
        return
    scratch = np.empty(min(size, BOUNCE_BYTES), np.uint8).data
    for at in range(0, size, len(scratch)):
        piece = scratch[: size - at]
        wire.reader.into(piece)
        buffer.upload(offset + at, piece)


def receive_packed(session: Session, wire: Wire, size: int, codec: str, width: int, packed: int) -> memoryview:
    """Take ``packed`` bytes of data from the wire, which hold ``size`` bytes.

    Raises:
        FormatError: they are more than a message may hold, or do not hold so many bytes.
    """
    if size > session.limits.data:
        wire.reader.skip(packed)
        raise FormatError(f"{size:,} bytes are too many for one message")
    data = np.empty(packed, np.uint8).data
    wire.reader.into(data)
    raw = unpack(codec, width, data, size)
    session.metrics.add("packed_bytes_total", packed)
    session.metrics.add("unpacked_bytes_total", size)
    return raw


def data_of(ticket: int, buffer: Buffer, offset: int, size: int) -> list[bytes | memoryview]:
    """The bytes of a buffer as the answer to a message: its own memory, where the process reaches it."""
    data = buffer.host_bytes(offset, size) if buffer.is_host else buffer.read(offset, size).data
    return [encode_again(Kind.DATA, ticket, size=size), data]
