"""A Harbor environment without a container: a folder of this machine, for trusted tasks.

Harbor's server imports it. Paths of the environment lie in the folder. Commands and their variables
have them replaced, and the folder is in ROOT.
"""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_OWN = "app|logs|tests|solution|installed-agent|tmp/harbor-pi-agent"
_PATHS = re.compile(rf"(?<![\w/.])/(?=(?:{_OWN})(?:[/\s'\";)]|$))")


class FolderEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A folder with /app, /logs, /tests and /solution."""

    root: Path
    _tmux: Path

    @staticmethod
    def type() -> str:
        """Returns the name of the kind."""
        return "folder"

    @property
    def capabilities(self) -> Any:
        """Returns those that it has beyond the least."""
        return EnvironmentCapabilities()

    @classmethod
    def resource_capabilities(cls) -> None:
        """Limits no resources."""

    def _validate_definition(self) -> None:
        pass

    def _there(self, path: str | Path) -> Path:
        return self.root / str(path).lstrip("/")

    async def start(self, force_build: bool) -> None:
        """Makes the folder."""
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        self._tmux = Path(tempfile.mkdtemp(prefix="tmux-", dir="/tmp"))  # a socket's path is short
        for name in (
            "app",
            "root",
            "logs/agent",
            "logs/verifier",
            "logs/artifacts",
            "tests",
            "solution",
        ):
            self._there(name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        """Removes the folder."""
        if any(self._tmux.iterdir()):
            await self.exec("tmux kill-server")
        for folder in (self._tmux, self.root):
            shutil.rmtree(folder, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file into the folder."""
        self._there(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._there(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a folder into the folder."""
        shutil.copytree(source_dir, self._there(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file out of the folder."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._there(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies a folder out of the folder."""
        shutil.copytree(self._there(source_dir), target_dir, dirs_exist_ok=True)

    def _environ(self) -> dict[str, str]:
        """Returns the environment of a sandbox, which has a home and no modules of the server."""
        inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        own = {"ROOT": self.root, "HOME": self.root / "root", "TMUX_TMPDIR": self._tmux}
        return inherited | {name: str(path) for name, path in own.items()}

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Runs a command of bash in the folder."""
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            _PATHS.sub(f"{self.root}/", command),
            cwd=self._there(cwd or "/app"),
            env=self._environ()
            | {
                name: _PATHS.sub(f"{self.root}/", text)
                for name, text in {**self._persistent_env, **(env or {})}.items()
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(timeout_sec):
            out, errors = await process.communicate()
        return ExecResult(
            stdout=out.decode(), stderr=errors.decode(), return_code=process.returncode or 0
        )
