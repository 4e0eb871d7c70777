"""`Authority`: issues the certificates of the servers of one `Cluster`."""

from __future__ import annotations

import datetime
import ipaddress
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority"]

_VALID: Final = datetime.timedelta(days=365)
_EARLIER: Final = datetime.timedelta(days=1)  # clocks of machines differ
_NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "opweave-ray")])


class Authority:
    """A new certificate authority, whose key stays in this process. Its certificates are valid for a year.

    Attributes:
        pem: its own certificate.
    """

    def __init__(self) -> None:
        self._key: Final = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(_NAME, self._key.public_key())
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.pem: Final = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    @staticmethod
    def _builder(name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            _NAME, name, key, x509.random_serial_number(), now - _EARLIER, now + _VALID
        )  # fmt: skip

    def issue(self, host: str) -> tuple[bytes, bytes]:
        """A certificate for a server at this address or name, and its private key, both as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        made = self._builder(name, key.public_key())
        made = made.add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), private


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
