"""`RemoteMemory`: the handle of a buffer on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opweave.contract import Usage
    from opweave_remote.connection import Connection

__all__ = ["RemoteMemory"]


class RemoteMemory:
    """Memory on a server.

    Attributes:
        connection: to the server.
        number: of the buffer there.
        size: bytes.
        usage: what it was allocated for.
    """

    __slots__ = ("connection", "number", "size", "usage")

    def __init__(self, connection: Connection, number: int, size: int, usage: Usage) -> None:
        self.connection: Final = connection
        self.number: Final = number
        self.size: Final = size
        self.usage: Final = usage
