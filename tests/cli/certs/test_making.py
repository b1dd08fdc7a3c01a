"""`rollmesh certs --keep`: certificates that hold are kept, others are made again."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="it makes the certificates")


def certs(folder: Path, *flags: str) -> dict[str, bytes]:
    """Runs the command; returns the files that are there then."""
    subprocess.run([sys.executable, "-m", "rollmesh.cli.certs", *flags, folder], check=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_certificates_that_hold_for_another_week_are_kept(tmp_path: Path) -> None:
    made = certs(tmp_path / "certs", "--keep")
    assert certs(tmp_path / "certs", "--keep") == made


def test_certificates_that_end_soon_or_are_missing_are_all_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    short = certs(folder, "--keep", "--days=6")
    made = certs(folder, "--keep")
    assert all(made[name] != short[name] for name in short)
    assert made.keys() == short.keys()
    (folder / "gateway.crt").unlink()
    again = certs(folder, "--keep")
    assert all(again[name] != made[name] for name in made)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_without_keep_nothing_is_overwritten(tmp_path: Path) -> None:
    made = certs(tmp_path / "certs")
    with pytest.raises(subprocess.CalledProcessError):
        certs(tmp_path / "certs")
    assert certs(tmp_path / "certs", "--keep") == made
