"""Files with secrets: who may read them, and reading them again when they change."""

import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from rollmesh.runtime import clock
from rollmesh.runtime.config import ConfigError

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")
_Mark: TypeAlias = tuple[tuple[str, int, int, int], ...]
_LOOK_MS = 1_000
"""Time between looks at the files, milliseconds."""
_MOST_BYTES = 1024 * 1024


def read_file(setting: str, path: Path) -> bytes:
    """Returns the content of a file.

    Args:
        setting: Name of the setting in errors.
        path: The file.

    Raises:
        ConfigError: It cannot be read, or is larger than 1 MiB.
    """
    return _read(setting, path, lambda _: None)


def read_secret(setting: str, path: Path) -> bytes:
    """Returns the content of a file that nobody else may read.

    Its owner must be this process's user, with no permissions for others (0600), or root; group
    may then read it (0440), as Kubernetes mounts secrets. PostgreSQL has the same rule for keys.

    Args:
        setting: Name of the setting in errors.
        path: The file.

    Raises:
        ConfigError: It cannot be read, others may read it, or it is larger than 1 MiB.
    """
    return _read(setting, path, lambda found: _check_mode(setting, path, found))


def _read(setting: str, path: Path, check: Callable[[os.stat_result], None]) -> bytes:
    try:
        with path.open("rb") as file:
            check(os.fstat(file.fileno()))
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{setting}: {path} is larger than {_MOST_BYTES} bytes")
    return content


def _check_mode(setting: str, path: Path, found: os.stat_result) -> None:
    own = os.geteuid()
    if found.st_uid not in {own, 0}:
        raise ConfigError(
            f"{setting}: {path} belongs to user {found.st_uid}; give it to user {own} or to root"
        )
    others = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
    if found.st_uid == own:
        others |= stat.S_IRGRP
    if found.st_mode & others:
        raise ConfigError(
            f"{setting}: {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may read or "
            f"write it; run: chmod {'0600' if found.st_uid == own else '0640'} {path}"
        )


class Reloaded(Generic[_Value]):
    """A value that is read from files, and read again when one of them has changed.

    If it cannot be read again, the last value holds and the log says why.
    """

    def __init__(self, read: Callable[[], _Value], files: Callable[[], Iterable[Path]]) -> None:
        """Reads the value.

        Args:
            read: Reads it.
            files: Returns the files that it is read from; a folder stands for its list of names.

        Raises:
            ConfigError: It cannot be read.
        """
        self._read = read
        self._files = files
        self._mark = _mark(files())
        self._value = read()
        self._looked_ms = clock.monotonic_ms()
        self.revision = 0
        """Number of times that it has changed."""

    def get(self) -> _Value:
        """Returns the value; looks at most once a second whether a file has changed."""
        now_ms = clock.monotonic_ms()
        if now_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms = now_ms
            self._look()
        return self._value

    def _look(self) -> None:
        mark = _mark(self._files())
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._value = self._read()
        except ConfigError as error:
            _log.error("not read again; the last value holds: %s", error)
            return
        self.revision += 1
        _log.info("read again: %s", ", ".join(sorted({name for name, *_ in mark})))


def _mark(files: Iterable[Path]) -> _Mark:
    """Returns what tells a version of files from another; an absent file has none."""
    found: list[tuple[str, int, int, int]] = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))
