"""Certificates and keys: read together, checked, and read again when they change."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.access.files import Reloaded, read_file, read_secret
from rollmesh.runtime.config import ConfigError


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the files, as PEM; None for a file that is not given."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


class TlsFiles:
    """The certificate of a process, its key, and the CA by which it knows others."""

    def __init__(self, ca: str, certificate: str, key: str) -> None:
        """Reads the files; an empty path means that there is none.

        Raises:
            ConfigError: One of them cannot be read or is no PEM, the key does not belong to the
                certificate, or others may read it.
        """
        if bool(certificate) != bool(key):
            missing = "tls_key_file" if certificate else "tls_certificate_file"
            raise ConfigError(f"{missing}: is missing; a certificate and its key go together")
        self._ca = Path(ca) if ca else None
        self._certificate = Path(certificate) if certificate else None
        self._key = Path(key) if key else None
        self._pems = Reloaded(self._read, self._files)

    @property
    def revision(self) -> int:
        """Number of times that the files have changed."""
        self._pems.get()
        return self._pems.revision

    def get(self) -> Pems:
        """Returns the contents of the files as they are, or as they were when they last fitted."""
        return self._pems.get()

    def load_into(self, context: ssl.SSLContext) -> None:
        """Makes a context show the certificate as it is in the files, which must be given.

        Raises:
            OSError: The files do not fit; they are being changed.
        """
        assert self._certificate is not None
        context.load_cert_chain(self._certificate, self._key)

    def _files(self) -> list[Path]:
        return [path for path in (self._ca, self._certificate, self._key) if path is not None]

    def _read(self) -> Pems:
        if self._key is not None:
            read_secret("tls_key_file", self._key)  # refuses the mode before anything uses it
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self._certificate is not None:
            try:
                context.load_cert_chain(self._certificate, self._key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"tls_certificate_file: {self._certificate} with {self._key}: {error}"
                ) from error
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"tls_ca_file: {self._ca}: {error}") from error
        return Pems(
            read_file("tls_ca_file", self._ca) if self._ca else None,
            read_file("tls_certificate_file", self._certificate) if self._certificate else None,
            read_secret("tls_key_file", self._key) if self._key else None,
        )
