"""Makes tokens and writes files that only their owner may read."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from rollmesh.runtime.access.roles import Role
from rollmesh.runtime.access.tokens import new_tokens
from rollmesh.runtime.owner_only import make_folder

_TOKEN_BYTES = 32


def make_tokens(folder: Path) -> None:
    """Makes a token for each role: `ROLE.token` to present, `accepted/ROLE` for servers.

    Prometheus gets one too: `scraper.token` to present, `scrapers` for `metrics_token_file`.

    Raises:
        FileExistsError: The folder has one of the files; nothing is written then.
        OSError: A file cannot be written.
    """
    secret = {role: secrets.token_urlsafe(_TOKEN_BYTES) for role in Role}
    files = new_tokens(secret, secrets.token_urlsafe(_TOKEN_BYTES))
    write_private(folder, {name: text.encode() for name, text in files.items()})


def write_private(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes new files of mode 0600 into folders of mode 0700.

    Args:
        folder: Made if it is absent.
        files: Contents by paths in it.

    Raises:
        FileExistsError: One of the files exists; nothing is written then.
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
