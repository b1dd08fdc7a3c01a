"""An authority that certifies hosts, made on the spot.

Its certificates lack the key identifiers that clients in Python 3.13 ask for, and gRPC does not.
"""

import ssl
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


class Authority:
    """A certificate authority whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(folder)[-64:])])

    @cached_property
    def certificate(self) -> Path:
        """The file by which clients trust it."""
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        made = self._certified(self._name, self._key, datetime.now(UTC) + _DAY).add_extension(
            constraints, critical=True
        )
        file = self._folder / "authority.pem"
        file.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))
        return file

    def server(self, name: str, *, expired: bool = False) -> ssl.SSLContext:
        """Returns the context of a server with a certificate for `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = datetime.now(UTC) + (-_DAY if expired else _DAY)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._certified(subject, key, end).add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file = self._folder / f"{name}.pem"
        file.write_bytes(private + _pem(made.sign(self._key, hashes.SHA256())))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context

    def _certified(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - 3 * _DAY)
            .not_valid_after(end)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    encoded: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return encoded
