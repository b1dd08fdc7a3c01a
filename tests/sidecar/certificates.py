"""Certificates for the sidecar's HTTPS."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_DAY = timedelta(days=1)
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@dataclass(frozen=True)
class Authority:
    """A CA, and a folder with the certificate of 127.0.0.1 that it issued last."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    ca: x509.Certificate

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        begun = (
            _builder("CA", "CA", key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_SIGNS, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )
        authority = cls(folder, key, begun.sign(key, hashes.SHA256()))
        authority.issue("one")
        return authority

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def key_file(self) -> Path:
        return self.folder / "key.pem"

    def issue(self, name: str) -> None:
        """Writes a certificate with this name, and its key, over the last ones."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        begun = _builder(name, "CA", key).add_extension(alternative, critical=False)
        begun = begun.add_extension(issuer, critical=False)
        written = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.key_file.touch(mode=0o600)
        self.key_file.write_bytes(written)
        signed = begun.sign(self.key, hashes.SHA256())
        self.certificate.write_bytes(signed.public_bytes(_PEM))

    def trust(self) -> ssl.SSLContext:
        """Settings of a client that trusts this CA only."""
        return ssl.create_default_context(cadata=self.ca.public_bytes(_PEM).decode())


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
