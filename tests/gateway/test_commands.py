"""`rollmesh gateway dead-letters` works on those of all gateways that the routers know."""

import asyncio
import json

import pytest

from rollmesh.gateway import run_tool
from tests.runtime.mesh.directories.test_gateways import gateway, naming_router
from tests.sidecar.scripted_gateway import ScriptedGateway, serving

LETTERS = ["00000001-a", "00000002-b", "00000002-c"]


async def run(*argv: str) -> int:
    return await asyncio.to_thread(run_tool, "dead-letters", argv, {})


async def test_dead_letters_are_found_at_whichever_gateway_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = ScriptedGateway(), ScriptedGateway()
    first.dead.add(LETTERS[0])
    second.dead.update(LETTERS[1:])
    async with (
        naming_router() as (router, address),
        serving(first) as one,
        serving(second) as other,
    ):
        flag = f"--router={address}"
        router.gateways = [gateway(1, one), gateway(2, other)]
        assert await run(flag) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["session_id"] for line in lines] == LETTERS
        assert await run(flag, "retry", LETTERS[1]) == 0
        assert (first.dead, second.dead) == ({LETTERS[0]}, {LETTERS[2]})
        assert await run(flag, "retry", LETTERS[1]) == 1  # it is none any more
        assert await run(f"--gateway={one}") == 0
        assert LETTERS[2] not in capsys.readouterr().out
        assert await run(flag, "drop", "--all") == 0
        assert not first.dead
        assert not second.dead


async def test_a_gateway_that_is_away_is_named_and_the_others_are_worked_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted = ScriptedGateway()
    scripted.dead.add(LETTERS[0])
    async with naming_router() as (router, address), serving(scripted) as one:
        assert await run(f"--router={address}") == 1
        assert "no gateway is registered" in capsys.readouterr().err
        away = "127.0.0.1:1"
        router.gateways = [gateway(0, away), gateway(1, one)]
        assert await run(f"--router={address}", "drop", "--all") == 1
        assert f"gateway {away}: " in capsys.readouterr().err
        assert not scripted.dead
