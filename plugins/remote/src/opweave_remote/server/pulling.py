"""Bytes from server to server, without a detour over the client.

The client asks the server that has the bytes for a grant and passes it to the one that wants them, which connects and
proves that it knows the grant's secret. A grant is good for one reading of one range.
"""

from __future__ import annotations

import ssl
from typing import Final

from opweave.contract import Buffer
from opweave.errors import DeviceLostError, FormatError, Unavailable
from opweave_remote.dialing import in_time, look_up, reach
from opweave_remote.greeting import greet
from opweave_remote.server.transfers import receive_into
from opweave_remote.tls import TlsSocket
from opweave_remote.wire import MAX_BEFORE_PROOF, Kind
from opweave_remote.wires import STREAM, Address, Wire, tuned

__all__ = ["NAMED", "Puller"]

NAMED: Final = 32
"""Bytes of a grant that name it: the session, and the grant in it. The secret follows."""

_TIMEOUT: Final = 30.0


class Puller:
    """Fetches bytes from other servers.

    Args:
        context: TLS with the authorities whose servers are trusted; ``None``: only servers on loopback, without TLS.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context: Final = context
        self.uses_tls: Final = context is not None

    def pull(self, buffer: Buffer, offset: int, where: str, grant: bytes, size: int) -> None:
        """Write ``size`` bytes that ``grant`` gives at ``where`` to a buffer, whose range was checked.

        Raises:
            FormatError: ``where`` is not an address, ``grant`` is cut off, or other bytes come than were granted.
            Unavailable: the other server may not be connected to, or does not know the grant.
            DeviceLostError: it cannot be reached, or ended the connection.
        """
        address = Address.parse(where)
        if len(grant) <= NAMED:
            raise FormatError("a grant is cut off")
        if self._context is None and not address.is_loopback:
            raise Unavailable(f"this server trusts no other ones, so not {address} either",
                              remedy="start it with --peer-ca")  # fmt: skip
        try:
            with reach(look_up(address), _TIMEOUT) as sock:
                tuned(sock).sendall(STREAM)
                with in_time(sock, _TIMEOUT):
                    over = sock if self._context is None else TlsSocket(sock, self._context, address.host)
                    wire = Wire(over, MAX_BEFORE_PROOF, 0)
                    greet(wire, "pull", grant[:NAMED], grant[NAMED:])
                wire.reader.max_data = size
                frame = wire.expect(Kind.DATA)
                if frame.size != size:
                    raise FormatError(f"{address} sends {frame.size:,} bytes where {size:,} were granted")
                receive_into(wire, buffer, offset, size)
        except (OSError, EOFError) as error:
            raise DeviceLostError(f"{address}, which has the bytes to copy, cannot be reached: {error}") from error
