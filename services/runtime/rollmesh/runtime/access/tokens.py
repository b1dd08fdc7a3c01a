"""Bearer tokens: accepted by servers and presented by callers.

A file has a token on each line. Empty lines and lines that begin with `#` do not count. Several may
be valid, so that they can be changed: add the new one to the accepted tokens, let callers present
it, then remove the old one.
"""

import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

from rollmesh.runtime.access.roles import ROLES, Role
from rollmesh.runtime.access.tls import Reloaded, read_secret
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.owner_only import make_folder

_log = logging.getLogger(__name__)
_TOKEN = re.compile(r"[\x21-\x7e]{32,512}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_TOKENS = 64


def digest_line(token: str) -> str:
    """Returns the line by which a server accepts a token without knowing it."""
    return f"sha256:{sha256(token.encode()).hexdigest()}"


def digest_of(token: str) -> bytes:
    """Returns the digest of a caller's token, which may have any characters."""
    return sha256(token.encode(errors="replace")).digest()


class AcceptedTokens:
    """The tokens that a server accepts, as digests. Each shows one role or several."""

    def __init__(self, folder: Path) -> None:
        """Reads the tokens.

        Args:
            folder: Has a file for each role that may call, under the role's name.

        Raises:
            ConfigError: A file cannot be read, is readable by others, or no role has a token.
        """
        self._folder = folder
        self._tokens: dict[Role, Reloaded[tuple[bytes, ...]]] | None = None
        self._roles = Reloaded(self._read, lambda: (folder,))
        if len(self._digests()) > _MOST_TOKENS:  # each call is compared with all
            raise ConfigError(f"tokens_dir: {folder} has more than {_MOST_TOKENS} tokens")
        if not self._digests():
            raise ConfigError(
                f"tokens_dir: {folder} has no token; `rollmesh tokens DIR` makes some"
            )

    def roles(self, token: str) -> frozenset[Role]:
        """Returns the roles that a token shows, none if it is not accepted."""
        return self.roles_of(digest_of(token))

    def roles_of(self, digest: bytes) -> frozenset[Role]:
        """Returns the roles that a token shows, by its digest."""
        # Every digest is compared, each in constant time: no answer tells how close a guess was.
        return frozenset(
            role for accepted, role in self._digests() if hmac.compare_digest(accepted, digest)
        )

    def _digests(self) -> list[tuple[bytes, Role]]:
        found = self._roles.get().items()
        return [(digest, role) for role, tokens in found for digest in tokens.get()]

    def _read(self) -> dict[Role, Reloaded[tuple[bytes, ...]]]:
        """Returns the tokens of each role, whose files are read again each by itself.

        A damaged file so holds up the tokens of its own role alone. A folder that is emptied, or
        removed, accepts no caller.
        """
        known = self._tokens
        found: dict[Role, Reloaded[tuple[bytes, ...]]] = {}
        for path in _entries(self._folder):
            role = ROLES.get(path.name)
            if role is None:
                names = ", ".join(Role)
                problem = f"tokens_dir: {path}: is not a role; name it one of {names}"
                if known is None:
                    raise ConfigError(problem)
                _log.error("token file skipped: %s", problem)
                continue
            found[role] = (known or {}).get(role) or Reloaded(
                partial(_digests, "tokens_dir", path),
                partial(tuple[Path], (path,)),
                last=None if known is None else (),
            )
        if known and not found:
            _log.error("tokens revoked: %s has no token, so every caller is refused", self._folder)
        self._tokens = found
        return found


class TokensOfFile:
    """The tokens of one file, as digests. Each opens the same."""

    def __init__(self, setting: str, path: Path) -> None:
        """Reads the tokens.

        Args:
            setting: Name of the setting in errors.
            path: The file, with a token or its digest on each line.

        Raises:
            ConfigError: The file cannot be read, is readable by others, or has no token.
        """
        self._setting, self._path = setting, path
        self._digests = Reloaded(self._read, lambda: (path,))
        if not self._digests.get():
            raise ConfigError(f"{setting}: {path} has no token")

    def has(self, token: str) -> bool:
        """Returns whether a token is one of them."""
        digest = digest_of(token)
        # Every digest is compared, each in constant time: no answer tells how close a guess was.
        same = [hmac.compare_digest(accepted, digest) for accepted in self._digests.get()]
        return any(same)

    def _read(self) -> tuple[bytes, ...]:
        """Returns the tokens: none once the file is emptied."""
        found = _digests(self._setting, self._path)
        if len(found) > _MOST_TOKENS:  # each request is compared with all
            raise ConfigError(f"{self._setting}: {self._path} has more than {_MOST_TOKENS} tokens")
        return found


class PresentedToken:
    """The token that a process presents to others: the first of its file."""

    def __init__(self, path: Path) -> None:
        """Reads the token.

        Raises:
            ConfigError: The file cannot be read, is readable by others, or has no token.
        """
        self._path = path
        self._token = Reloaded(self._read, lambda: (path,))

    def metadata(self) -> tuple[str, str]:
        """Returns the entry of a call's metadata that shows the token."""
        return self._token.get()

    def _read(self) -> tuple[str, str]:
        for number, line in _lines("token_file", self._path):
            if not _TOKEN.fullmatch(line) or _DIGEST.fullmatch(line):
                raise ConfigError(_malformed("token_file", self._path, number))
            return ("authorization", f"Bearer {line}")
        raise ConfigError(
            f"token_file: {self._path} has no token; `rollmesh tokens DIR` makes some"
        )


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Returns the bearer token of a call's metadata, or None without one."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


def _entries(folder: Path) -> list[Path]:
    """Returns the files of a folder. Kubernetes keeps its own beside them, with a dot."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"tokens_dir: {folder}: {error.strerror}") from error


def _digests(setting: str, path: Path) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for number, line in _lines(setting, path):
        if digest := _DIGEST.fullmatch(line):
            found.append(bytes.fromhex(digest[1]))
        elif _TOKEN.fullmatch(line):
            found.append(sha256(line.encode()).digest())
        else:
            raise ConfigError(_malformed(setting, path, number))
    return tuple(found)


def _lines(setting: str, path: Path) -> Iterator[tuple[int, str]]:
    text = read_secret(setting, path).decode("utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if (token := line.strip()) and not token.startswith("#"):
            yield number, token


def _malformed(setting: str, path: Path, number: int) -> str:
    return (
        f"{setting}: {path}, line {number}: is not a token; give 32 to 512 printable ASCII "
        "characters without spaces"
    )


# Makes tokens and writes files that only their owner may read.

_TOKEN_BYTES = 32


def make_tokens(folder: Path) -> None:
    """Makes a token for each role, and one for Prometheus.

    A process of a role presents `ROLE.token`, and servers accept the digest `accepted/ROLE`, so
    that no server holds a token that opens another. Prometheus presents `scraper.token`, and
    `metrics_token_file` takes its digest `scrapers`.

    Raises:
        FileExistsError: The folder has one of the files. Nothing is written then.
        OSError: A file cannot be written.
    """
    scraper = secrets.token_urlsafe(_TOKEN_BYTES)
    files = {"scraper.token": scraper, "scrapers": digest_line(scraper)}
    for role in Role:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        files |= {f"{role}.token": token, f"accepted/{role}": digest_line(token)}
    write_private(folder, {name: f"{line}\n".encode() for name, line in files.items()})


def write_private(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes new files of mode 0600 into folders of mode 0700.

    Raises:
        FileExistsError: One of the files exists. Nothing is written then.
        OSError: A file cannot be written.
    """
    for name in files:
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} exists and is not overwritten")
    for name, content in files.items():
        path = folder / name
        make_folder(path.parent)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
