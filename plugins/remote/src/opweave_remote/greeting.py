"""`greet`: how servers, and processes beside them, prove to a server that they may use one of its sessions."""

from __future__ import annotations

from opweave.errors import Unavailable
from opweave_remote.failures import decode_error
from opweave_remote.security import is_proof, new_nonce, proof
from opweave_remote.wire import MAX_VERSION, MIN_VERSION, Kind
from opweave_remote.wires import Wire

__all__ = ["greet"]


def greet(wire: Wire, role: str, name: bytes, secret: bytes) -> None:
    """Prove to a server that this side knows a secret, and have it prove the same.

    Args:
        wire: was just connected.
        role: of the connection: ``"bulk"`` or ``"pull"``.
        name: what is known by the secret: a session, or a grant of one.

    Raises:
        Unavailable: the server speaks other versions, or does not know the secret.
        LifetimeError: the server has no such session.
    """
    least, most, nonce, _ = wire.expect(Kind.CHALLENGE).args
    if not least <= MAX_VERSION or not most >= MIN_VERSION:
        raise Unavailable("the other server speaks other versions of the protocol")
    own = new_nonce()
    shown = proof(secret, b"client", nonce, own, role.encode(), name)
    wire.say(Kind.HELLO, min(most, MAX_VERSION), role, name, own, shown)
    frame = wire.expect(Kind.WELCOME, Kind.REFUSED)
    if frame.kind is Kind.REFUSED:
        raise decode_error(frame.args[0]).error
    if not is_proof(frame.args[0], secret, b"server", own, nonce):
        raise Unavailable("the other server does not know the secret")
