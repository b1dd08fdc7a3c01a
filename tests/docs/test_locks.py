"""Locks that no other test installs can be installed from nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

_MAKEFILE = (ROOT / "Makefile").read_text()
_PEERS = sorted((ROOT / "requirements").glob("bench-*.txt"))


def test_every_lock_is_installed_without_resolving_it_again() -> None:
    """A lock is complete: pip refuses an extra of a dependency that a lock cannot pin."""
    installs = re.findall(r"\$\(PIP\)(.*) -r requirements/([\w-]+)\.txt", _MAKEFILE)
    assert len(installs) > 10
    loose = [name for flags, name in installs if "--no-deps --require-hashes" not in flags]
    assert loose == []


@pytest.mark.long
@pytest.mark.parametrize("lock", _PEERS, ids=lambda lock: lock.stem)
def test_the_peers_of_a_benchmark_are_installed_whole(lock: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    python = tmp_path / "env" / "bin" / "python"
    install = ("install", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    for words in ((*install, "-r", lock), ("check",)):
        done = subprocess.run(
            [python, "-m", "pip", *words], capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
