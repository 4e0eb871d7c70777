"""Tokens, proofs that one knows a token, and TLS contexts.

A token never goes over the wire: both sides prove by HMAC-SHA-256 over the other one's random number that they know it,
the server before the client relies on anything it says. Proofs are compared in constant time.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Final

from opweave.errors import Unavailable

__all__ = [
    "NONCE_BYTES",
    "check_token",
    "is_proof",
    "make_token",
    "new_nonce",
    "proof",
    "read_token",
    "tls_client",
    "tls_server",
]

NONCE_BYTES: Final = 32
_FEWEST: Final = 16


def make_token(path: str | os.PathLike[str]) -> None:
    """Write a new random token to a file that only its owner can read (mode 0600).

    Raises:
        FileExistsError: the file is there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token_bytes(32).hex() + "\n")


def read_token(path: str | os.PathLike[str]) -> bytes:
    """The token in a file.

    Raises:
        Unavailable: no such file, others than its owner may read it, or it holds fewer than 16 characters.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096)
    except OSError as error:
        remedy = f"make one: opweave serve-devices --make-token {path}"
        raise Unavailable(f"the token file {path} cannot be read: {error.strerror}", remedy=remedy) from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Unavailable(f"others than its owner may use the token file {path}", remedy=f"chmod 600 {path}")
    return check_token(token)


def check_token(token: str | bytes) -> bytes:
    """A token as bytes, without white space at its ends; raises `Unavailable` if it is none, or too short."""
    if not isinstance(token, (str, bytes)):
        raise Unavailable(f"a token is a text or bytes, not {type(token).__name__}", remedy="pass token_file=")
    raw = (token.encode(errors="surrogatepass") if isinstance(token, str) else token).strip()
    if len(raw) < _FEWEST:
        raise Unavailable(f"a token has at least {_FEWEST} characters, not {len(raw)}", remedy="make a random one")
    return raw


def new_nonce() -> bytes:
    """A random number that is used once."""
    return token_bytes(NONCE_BYTES)


def proof(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 (32 bytes) of ``parts``, each behind its length: shows that its maker knows ``key``."""
    made = hmac.new(key, digestmod=sha256)
    for part in parts:
        made.update(len(part).to_bytes(4, "little"))
        made.update(part)
    return made.digest()


def is_proof(given: bytes, key: bytes, *parts: bytes) -> bool:
    """Whether ``given`` is the `proof`; takes as long for a wrong one."""
    return hmac.compare_digest(given, proof(key, *parts))


def tls_server(cert: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """TLS 1.3 for a server; with ``client_ca``, clients need a certificate of that authority.

    Raises:
        Unavailable: a file cannot be read, or is none of its kind.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (cert, key, client_ca)))
        raise Unavailable(f"no TLS with {files}: {error}", remedy="give PEM files that this user can read") from error
    return context


def tls_client(ca: str | None = None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """TLS 1.3 for a client, which trusts certificates of ``ca`` (default: those the system trusts).

    Raises:
        Unavailable: a file cannot be read, or is none of its kind; a key without a certificate.
    """
    if cert is None and key is not None:
        raise Unavailable("a certificate and its key belong together", remedy="give the certificate of the key too")
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (ca, cert, key)))
        raise Unavailable(f"no TLS with {files}: {error}", remedy="give PEM files that this user can read") from error
    return context
