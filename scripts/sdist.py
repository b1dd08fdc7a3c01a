"""Takes one folder out of a source distribution that a lock pins, without building it.

`pip download` builds an sdist to learn its dependencies, and `pip install` its libraries. What is
wanted here are some of its files: python -m scripts.sdist LOCK FOLDER TARGET.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urldefrag, urljoin

import requests

_PIN = re.compile(r"(?m)^([\w.-]+)==(\S+) \\\n((?:\s+--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")
_INDEX = re.compile(r"--index-url <url>.*?\(default\s+([^\s)]+)\)", re.DOTALL)
_SCOPES = ("global", "install", ":env:")
"""Where pip's settings stand, the weakest first."""
_TIMEOUT_S, _PIECE = 60, 1 << 20


class SdistError(Exception):
    """The folder cannot be taken. The message says why."""


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def pinned(lock: str) -> tuple[str, str, set[str]]:
    """Returns the name, the version and the SHA-256 digests of the package that a lock pins.

    Raises:
        SdistError: It does not pin exactly one package.
    """
    pins = _PIN.findall(lock)
    if len(pins) != 1:
        raise SdistError(f"the lock pins {len(pins)} packages by their hashes; it must pin one")
    name, version, hashes = pins[0]
    return name, version, set(re.findall("[0-9a-f]{64}", hashes))


def unpack(archive: IO[bytes], folder: str, target: Path) -> int:
    """Writes the files of one folder of an sdist. Returns how many there are.

    Raises:
        SdistError: There are none.
    """
    count = 0
    with tarfile.open(fileobj=archive, mode="r:gz") as files:
        for member in files:
            path = PurePosixPath(member.name)
            if member.isfile() and PurePosixPath(*path.parts[1:-1]) == PurePosixPath(folder):
                content = files.extractfile(member)
                assert content is not None
                target.mkdir(parents=True, exist_ok=True)
                (target / path.name).write_bytes(content.read())
                count += 1
    if not count:
        raise SdistError(f"the sdist has no files in {folder}")
    return count


def take(lock: Path, folder: str, target: Path) -> int:
    """Downloads the sdist that a lock pins and takes its folder. Returns how many files it has.

    Raises:
        SdistError: The index does not have it, its digest is another one, or it has no such files.
        requests.RequestException: The index does not answer.
    """
    name, version, digests = pinned(lock.read_text())
    with requests.Session() as session, tempfile.TemporaryFile() as archive:
        url = _url_of(session, name, f"{name.replace('-', '_')}-{version}.tar.gz")
        digest = hashlib.sha256()
        with session.get(url, stream=True, timeout=_TIMEOUT_S) as answer:
            answer.raise_for_status()
            for piece in answer.iter_content(_PIECE):
                digest.update(piece)
                archive.write(piece)
        if digest.hexdigest() not in digests:
            raise SdistError(f"{name} {version} has another SHA-256: {digest.hexdigest()}")
        archive.seek(0)
        return unpack(archive, folder, target)


def _url_of(session: requests.Session, name: str, file: str) -> str:
    """Returns where pip's index has a file of a package."""
    session.headers["Accept"] = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
    settings = _pip_settings()
    session.verify = settings.get("cert", True)
    page = session.get(f"{settings['index-url'].rstrip('/')}/{name}/", timeout=_TIMEOUT_S)
    page.raise_for_status()
    for link in _links(page):
        if urldefrag(link).url.endswith(f"/{file}"):
            return urljoin(page.url, link)
    raise SdistError(f"pip's index has no {file}")


def _links(page: requests.Response) -> Iterator[str]:
    if "json" in page.headers.get("Content-Type", ""):
        yield from (one["url"] for one in page.json()["files"])
        return
    parser = _Links()
    parser.feed(page.text)
    yield from parser.found


def _pip_settings() -> dict[str, str]:
    """Returns what pip is configured with. Its help names the index where nothing else does."""
    settings: dict[str, str] = {}
    shown = _INDEX.search(_pip("install", "--help"))
    if shown is not None:
        settings["index-url"] = shown[1]
    found = re.findall(r"(?m)^(global|install|:env:)\.([\w-]+)='(.*)'$", _pip("config", "list"))
    found.sort(key=lambda one: _SCOPES.index(one[0]))
    settings |= {key: value for _, key, value in found}
    if "index-url" not in settings:
        raise SdistError("pip names no index; set PIP_INDEX_URL")
    return settings


def _pip(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SdistError(f"pip {words[0]} failed: {done.stderr[-300:]}")
    return done.stdout


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.sdist", description=__doc__)
    parser.add_argument("lock", type=Path, help="pins the package by its hash")
    parser.add_argument("folder", help="path inside the sdist, without its first part")
    parser.add_argument("target", type=Path, help="where the files are written")
    given = parser.parse_args()
    try:
        take(given.lock, given.folder, given.target)
    except (SdistError, requests.RequestException, tarfile.TarError) as error:
        print(f"scripts.sdist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
