"""A folder of a source distribution is taken by its pinned digest, and nothing is built."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.paths import ROOT

FILE = "some_package-1.2.tar.gz"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        """Says nothing."""

    def guess_type(self, path: object) -> str:
        is_json = Path(str(path)).read_bytes().startswith(b"{")
        return "application/vnd.pypi.simple.v1+json" if is_json else "text/html"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder and the URL of a package index with one sdist, whose build would fail."""
    folder = tmp_path / "index"
    (folder / "simple" / "some-package").mkdir(parents=True)
    with tarfile.open(folder / FILE, "w:gz") as archive:
        for name, text in (("setup.py", "1 / 0"), ("a/b/one.jinja", "1"), ("a/b/c/two.jinja", "2")):
            member = tarfile.TarInfo(f"some_package-1.2/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    page = folder / "simple" / "some-package" / "index.html"
    page.write_text(f'<a href="../../{FILE}#sha256=00">{FILE}</a><a href="other.whl">other</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()


def take(
    tmp_path: Path, index: tuple[Path, str], digest: str, folder: str = "a/b"
) -> "subprocess.CompletedProcess[str]":
    lock = tmp_path / "lock.txt"
    lock.write_text(f"# a lock\nsome-package==1.2 \\\n    --hash=sha256:{digest}\n    # via us\n")
    words = ["-m", "scripts.sdist", str(lock), folder, str(tmp_path / "taken")]
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={"PIP_INDEX_URL": index[1], "PIP_CONFIG_FILE": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def digest_of(index: tuple[Path, str]) -> str:
    return hashlib.sha256((index[0] / FILE).read_bytes()).hexdigest()


@pytest.mark.parametrize("form", ["html", "json"])
def test_the_files_of_one_folder_are_written(
    tmp_path: Path, index: tuple[Path, str], form: str
) -> None:
    if form == "json":
        page = index[0] / "simple" / "some-package" / "index.html"
        page.write_text(json.dumps({"files": [{"filename": FILE, "url": f"/{FILE}"}]}))
    done = take(tmp_path, index, digest_of(index))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "taken").rglob("*")] == ["one.jinja"]


def test_another_digest_is_refused_and_nothing_is_written(
    tmp_path: Path, index: tuple[Path, str]
) -> None:
    done = take(tmp_path, index, "0" * 64)
    assert done.returncode == 1
    assert "another SHA-256" in done.stderr
    assert not (tmp_path / "taken").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, index: tuple[Path, str]) -> None:
    done = take(tmp_path, index, digest_of(index), "a/z")
    assert done.returncode == 1
    assert "no files in a/z" in done.stderr
