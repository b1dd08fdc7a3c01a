"""Makes a CA, and a certificate for each role of a mesh."""

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rollmesh.runtime.access.certificates import role_uri
from rollmesh.runtime.access.roles import Role

SERVER_NAME = "rollmesh"
"""Name in the certificates of all services: clients check it as `--tls-server-name=rollmesh`."""
_ALWAYS = (SERVER_NAME, "localhost", "127.0.0.1", "::1")
_CLIENTS = (Role.OPERATOR, Role.TRAINER, Role.AGENT)
"""Roles that serve nothing: no service is taken in by their certificates."""
_SCORER = "scorer"
"""Serves and calls nobody, so its certificate shows no role."""
_CLOCK_SKEW = timedelta(minutes=5)


def make_certificates(hosts: Sequence[str], now: datetime, days: int) -> dict[str, bytes]:
    """Returns the files of a CA and of a certificate for each role, by name.

    The key of the CA is forgotten: nobody can make further certificates with it.

    Args:
        hosts: Further names and addresses of the services.
        now: The time, with its time zone.
        days: Validity, days.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rollmesh trial CA")])
    until = now + timedelta(days=days)
    ca = (
        _begun(name, name, key, now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = {"ca.crt": _pem(ca)}
    for one in (*Role, _SCORER):
        own = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rollmesh {one}")])
        issuer = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _begun(subject, name, own, now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_purposes(one)), critical=False)
            .add_extension(x509.SubjectAlternativeName(_names(one, hosts)), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        files |= {f"{one}.crt": _pem(certificate), f"{one}.key": _key_pem(own)}
    return files


def are_valid(folder: Path, then: datetime) -> bool:
    """Returns whether a folder has all certificates, and all are valid at a time to come."""
    files = [folder / f"{name}.crt" for name in ("ca", *Role, _SCORER)]
    if not all(file.is_file() for file in files):
        return False
    found = (x509.load_pem_x509_certificate(file.read_bytes()) for file in files)
    return all(then < one.not_valid_after_utc for one in found)


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _purposes(one: str) -> list[x509.ObjectIdentifier]:
    calls, serves = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    return [calls] if one in _CLIENTS else [calls, serves]


def _names(one: Role | str, hosts: Sequence[str]) -> list[x509.GeneralName]:
    role = [x509.UniformResourceIdentifier(role_uri(one))] if isinstance(one, Role) else []
    hosts = () if one in _CLIENTS else tuple(dict.fromkeys((*_ALWAYS, *hosts)))
    return [*role, *map(_name, hosts)]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
