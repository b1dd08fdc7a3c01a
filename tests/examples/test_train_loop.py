"""The loop that readers copy, on a mesh of real processes around a scripted engine."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples import train_loop
from rollmesh.client import Client, Session
from rollmesh.runtime.errors import SessionUnknownError
from tests.meshes import Mesh, scripted_mesh
from tests.waiting import until

_LIMIT_S = 240
_LOOP = Path(train_loop.__file__)


@pytest.fixture
async def small(tmp_path: Path, model_dir: Path) -> AsyncIterator[Mesh]:
    async with scripted_mesh(tmp_path / "mesh", model_dir) as mesh:
        yield mesh


async def acknowledged(client: Client) -> int:
    return sum(one.acknowledged for one in (await client.stats()).consumers)


async def test_the_loop_trains_beside_a_lost_seat_and_an_old_failed_group(
    small: Mesh,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened = 0
    open_session = Client.open_session

    async def refusing(self: Client, request: Any, **given: Any) -> Session:
        nonlocal opened
        opened += 1
        if opened in {3, 4}:  # concurrent seats, or one seat and its second try
            raise SessionUnknownError("no room")
        return await open_session(self, request, **given)

    async with small.client() as client:
        for index in range(2):
            with pytest.raises(ZeroDivisionError):
                async with client.session(group_id="old", sample_index=index, group_size=2):
                    raise ZeroDivisionError
        monkeypatch.setattr(Client, "open_session", refusing)
        monkeypatch.setattr("rollmesh.client.Retries.after", lambda *_: False)
        async with asyncio.timeout(_LIMIT_S):
            await train_loop.train(small.addresses, model_dir, tmp_path / "loop.pt", 1)
        said = capsys.readouterr().out
        assert "loss None" not in said
        assert re.search(r"seats lost [12]\b", said)
        assert await acknowledged(client) == 1 + train_loop.GROUPS
        assert await client.policy_version() == 1
        assert (await client.stats()).open_groups == 0


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(0, id="in the first step", marks=pytest.mark.long),
        pytest.param(1, id="after a step"),
    ],
)
async def test_a_killed_loop_continues_from_its_checkpoint(
    steps: int, small: Mesh, model_dir: Path, tmp_path: Path
) -> None:
    command = (
        *(sys.executable, str(_LOOP), "--steps", "2"),
        *("--mesh", json.dumps(asdict(small.addresses)), "--model", str(model_dir)),
        *("--checkpoint", str(tmp_path / "loop.pt")),
    )
    async with small.client() as client, asyncio.timeout(_LIMIT_S):
        first = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert first.stdout is not None
        await until((tmp_path / "loop.pt").exists, _LIMIT_S)
        for _ in range(steps):
            assert await first.stdout.readline()
        first.kill()
        await first.wait()
        second = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await second.communicate()
        assert second.returncode == 0
        assert [line.split()[1] for line in output.decode().splitlines()] == ["1", "2"][steps:]
        assert await client.policy_version() == 2
        (consumer,) = (await client.stats()).consumers
        # A group that the killed loop had begun and completed is trained as well.
        assert consumer.acknowledged >= 2 * train_loop.GROUPS
        assert (consumer.ready, consumer.leased) == (0, 0)
