"""Certificates and keys: read together, checked, and read again when they change."""

import logging
import os
import ssl
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from rollmesh.runtime import clock
from rollmesh.runtime.config import ConfigError

# Secret files: permission checks and reloading.

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")
_Mark: TypeAlias = tuple[tuple[str, int, int, int, int], ...]
_LOOK_MS = 1_000
"""Time between looks at the files, milliseconds."""
_MOST_BYTES = 1024 * 1024


def read_file(setting: str, path: Path, *, is_secret: bool = False) -> bytes:
    """Returns the content of a file.

    Raises:
        ConfigError: It cannot be read, or is larger than 1 MiB.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}") from error
    own = os.geteuid()
    if is_secret and found.st_uid not in {own, 0}:
        raise ConfigError(
            f"{setting}: {path} belongs to user {found.st_uid}; give it to user {own} or to root"
        )
    others = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
    if found.st_uid == own:
        others |= stat.S_IRGRP
    if is_secret and found.st_mode & others:
        raise ConfigError(
            f"{setting}: {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may read or "
            f"write it; run: chmod {'0600' if found.st_uid == own else '0640'} {path}"
        )
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{setting}: {path} is larger than {_MOST_BYTES} bytes")
    return content


def read_secret(setting: str, path: Path) -> bytes:
    """Returns the content of a private file.

    Its owner must be this process's user, with no permissions for others (0600), or root, and then
    the group may read it (0440), as Kubernetes mounts secrets. PostgreSQL has the same rule for
    keys.

    Raises:
        ConfigError: It cannot be read, others may read it, or it is larger than 1 MiB.
    """
    return read_file(setting, path, is_secret=True)


class Reloaded(Generic[_Value]):
    """A value that is read from files, and read again when one of them has changed.

    If it cannot be read again, the last value holds, the log says why, and every look tries again:
    the cause may be outside the files.
    """

    def __init__(
        self,
        read: Callable[[], _Value],
        files: Callable[[], Iterable[Path]],
        last: _Value | None = None,
    ) -> None:
        """Reads the value.

        Args:
            read: Reads it.
            files: Returns the files that it is read from. A folder stands for its list of names.
            last: Holds if it cannot be read now. None makes that an error.

        Raises:
            ConfigError: It cannot be read.
        """
        self._read = read
        self._files = files
        self._problem = ""
        self._looked_ms = clock.monotonic_ms()
        self.revision = 0
        """Number of times that it has changed."""
        self._mark: _Mark | None = None
        if last is None:
            self._mark = _mark(files())
            self._value = read()
        else:
            self._value = last
            self._look()

    def get(self) -> _Value:
        """Returns the value, and looks at most once a second whether a file has changed."""
        now_ms = clock.monotonic_ms()
        if now_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms = now_ms
            self._look()
        return self._value

    def _look(self) -> None:
        mark = _mark(self._files())
        if mark == self._mark:
            return
        try:
            self._value = self._read()
        except ConfigError as error:
            self._mark = None
            if str(error) != self._problem:
                _log.error("reload failed, keeping the previous value: %s", error)
            self._problem = str(error)
            return
        self._mark, self._problem = mark, ""
        self.revision += 1
        _log.info("reloaded: %s", ", ".join(sorted({name for name, *_ in mark})))


def _mark(files: Iterable[Path]) -> _Mark:
    """Returns a mark that changes with the files. An absent file has none.

    The time of the last change of the inode covers the mode and the owner.
    """
    found: list[tuple[str, int, int, int, int]] = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue
        times = status.st_mtime_ns, status.st_ctime_ns
        found.append((str(path), status.st_ino, *times, status.st_size))
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the files, as PEM, or None for a file that is not given."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


class TlsFiles:
    """The certificate of a process, its key, and the CA by which it knows others."""

    def __init__(self, ca: str, certificate: str, key: str) -> None:
        """Reads the files. An empty path means that there is none.

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
            OSError: The files do not fit. They are being changed.
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
