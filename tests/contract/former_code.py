"""Services and trainers of an earlier commit, run beside those of today.

The commit is the one that moved the contract's baseline last: its code knows the contract that
`former` makes stubs of. ROLLMESH_UPGRADE_FROM names another. Its code runs with the libraries of
today's environment, so what is compared is our code alone.
"""

import asyncio
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import ServiceProcess

COMMIT = os.environ.get("ROLLMESH_UPGRADE_FROM", "")
_BASELINE = "protos/baseline.txtpb"
_CODE = ("clients", "services", "protos/gen")


@dataclass(frozen=True)
class FormerCode:
    """The code of a commit, in a folder."""

    commit: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Python imports this code and none of today's."""
        folders = (self.folder / "protos/gen", *(self.folder / "services").iterdir())
        path = os.pathsep.join(map(str, (*folders, self.folder / "clients")))
        return {**os.environ, "PYTHONPATH": path}

    @asynccontextmanager
    async def running(
        self, service: str, folder: Path, flags: Mapping[str, object]
    ) -> AsyncIterator[ServiceProcess]:
        """Runs a service until the block ends."""
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        log = folder / f"former-{service}.log"
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"rollmesh.{service}", *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=self.environment,
                cwd=folder,
                start_new_session=True,
            )
        running = ServiceProcess(process, log)
        try:
            await running.wait_ready()
            yield running
        finally:
            await running.kill()


def former_code(folder: Path, of: str = COMMIT) -> FormerCode:
    """Unpacks the earlier commit. The test is skipped where the history does not reach it."""
    commit = of or _git("log", "-1", "--format=%H", "--", _BASELINE).decode().strip()
    if not of and _git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("a shallow clone does not know the commit of the contract's baseline")
    with tarfile.open(fileobj=BytesIO(_git("archive", commit, *_CODE))) as archive:
        archive.extractall(folder, filter="data")
    return FormerCode(commit, folder)


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(
            ("git", *arguments), cwd=ROOT, capture_output=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git knows no earlier commit here: {error}")
