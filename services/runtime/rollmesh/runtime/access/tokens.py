"""Bearer tokens: what a server accepts, and what a process presents.

A file has a token on each line; empty lines and lines that begin with `#` do not count. Several are
valid at a time, so that they can be changed: add the new one to what servers accept, let callers
present it, then remove the old one.
"""

import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from rollmesh.runtime.access.files import Reloaded, read_secret
from rollmesh.runtime.access.roles import Role, role_named
from rollmesh.runtime.config import ConfigError

_TOKEN = re.compile(r"[\x21-\x7e]{32,512}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_TOKENS = 64
_Digests = tuple[tuple[bytes, Role], ...]


def digest_line(token: str) -> str:
    """Returns the line by which a server accepts a token without knowing it."""
    return f"sha256:{sha256(token.encode()).hexdigest()}"


class AcceptedTokens:
    """The tokens that a server accepts, as digests; each shows one role or several."""

    def __init__(self, folder: Path) -> None:
        """Reads the tokens.

        Args:
            folder: Has a file for each role that may call, under the role's name.

        Raises:
            ConfigError: A file cannot be read, is readable by others, or no role has a token.
        """
        self._folder = folder
        self._digests = Reloaded(self._read, lambda: (folder, *_entries(folder)))

    def roles(self, token: str) -> frozenset[Role]:
        """Returns the roles that a token shows; none if it is not accepted."""
        digest = sha256(token.encode(errors="replace")).digest()
        # Every digest is compared, each in constant time: no answer tells how close a guess was.
        return frozenset(
            role for accepted, role in self._digests.get() if hmac.compare_digest(accepted, digest)
        )

    def _read(self) -> _Digests:
        found: list[tuple[bytes, Role]] = []
        for path in _entries(self._folder):
            role = role_named(path.name)
            if role is None:
                known = ", ".join(Role)
                raise ConfigError(f"tokens_dir: {path}: is not a role; name it one of {known}")
            found += ((digest, role) for digest in _digests("tokens_dir", path))
        if not found:
            raise ConfigError(
                f"tokens_dir: {self._folder} has no token; `rollmesh tokens DIR` makes some"
            )
        if len(found) > _MOST_TOKENS:  # each call is compared with all
            raise ConfigError(f"tokens_dir: {self._folder} has more than {_MOST_TOKENS} tokens")
        return tuple(found)


class TokensOfFile:
    """The tokens of one file, as digests; each opens the same."""

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

    def has(self, token: str) -> bool:
        """Returns whether a token is one of them."""
        digest = sha256(token.encode(errors="replace")).digest()
        # Every digest is compared, each in constant time: no answer tells how close a guess was.
        same = [hmac.compare_digest(accepted, digest) for accepted in self._digests.get()]
        return any(same)

    def _read(self) -> tuple[bytes, ...]:
        found = tuple(_digests(self._setting, self._path))
        if not found:
            raise ConfigError(f"{self._setting}: {self._path} has no token")
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
    """Returns the bearer token of a call's metadata; None without one."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


def new_tokens(secret: Mapping[Role, str], scraper: str) -> dict[str, str]:
    """Returns the files of a folder of tokens, by their paths in it.

    `ROLE.token` is what a process of a role presents, and `accepted/ROLE` the digest that servers
    accept, so that no server holds a token that opens another. `scraper.token` is what Prometheus
    presents, and `scrapers` its digest for `metrics_token_file`.

    Args:
        secret: A token for each role.
        scraper: A token for Prometheus.
    """
    files = {f"{role}.token": f"{token}\n" for role, token in secret.items()}
    files |= {"scraper.token": f"{scraper}\n", "scrapers": f"{digest_line(scraper)}\n"}
    return files | {f"accepted/{role}": f"{digest_line(secret[role])}\n" for role in secret}


def _entries(folder: Path) -> list[Path]:
    """Returns the files of a folder; Kubernetes keeps its own beside them, with a dot."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _digests(setting: str, path: Path) -> Iterator[bytes]:
    for number, line in _lines(setting, path):
        if digest := _DIGEST.fullmatch(line):
            yield bytes.fromhex(digest[1])
        elif _TOKEN.fullmatch(line):
            yield sha256(line.encode()).digest()
        else:
            raise ConfigError(_malformed(setting, path, number))


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
