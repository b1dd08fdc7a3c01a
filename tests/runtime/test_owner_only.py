"""Files for the owner alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.runtime import make_file, make_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _permissive() -> Iterator[None]:
    former = os.umask(0)
    yield
    os.umask(former)


def test_missing_folders_are_made_for_the_owner_and_others_keep_their_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    make_folder(shared / "a" / "b")
    make_folder(shared)
    assert [mode(one) for one in (shared, shared / "a", shared / "a" / "b")] == [
        0o755,
        0o700,
        0o700,
    ]


def test_new_and_existing_files_are_for_the_owner_alone(
    tmp_path: Path,
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"kept")
    for path in (new, old):
        make_file(path)
        assert mode(path) == 0o600
    assert (new.read_bytes(), old.read_bytes()) == (b"", b"kept")
