"""A cluster that asks for a token, and a `rollmesh ray` that does not show it."""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.cli import free_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, Path]]:
    """One node that asks for a token. Yields its address and the file of the token."""
    token = tmp_path_factory.mktemp("token") / "auth_token"
    token.write_text(secrets.token_hex(32))
    with closing(free_ports()) as ports:
        port = next(ports)
    ray = str(Path(sys.executable).with_name("ray"))
    command = (ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=1")
    process = await asyncio.create_subprocess_exec(
        *command,
        "--include-dashboard=false",
        "--disable-usage-stats",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(600):
            async for line in process.stdout:
                if b"Ray runtime started" in line:
                    break
        yield f"127.0.0.1:{port}", token
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({}, "set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "token"}, "~/.ray/auth_token is the cluster's token"),
    ],
    ids=["no mode", "another token"],
)
async def test_the_error_names_the_variable_of_the_token(
    cluster: tuple[str, Path], shown: dict[str, str], said: str, tmp_path: Path
) -> None:
    address, _ = cluster
    other = tmp_path / "auth_token"
    other.write_text(secrets.token_hex(32))
    own = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", "ray", "status", f"--address={address}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**own, **shown, "RAY_AUTH_TOKEN_PATH": str(other)},
    )
    async with asyncio.timeout(600):
        _, errors = await process.communicate()
    assert process.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    assert last.startswith("rollmesh ray: ")
    assert said in last
