"""One session that cannot be read or sent is its own fault: the gateway serves all others."""

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Session
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.meshes import Mesh, scripted_mesh
from tests.processes import run_to_end

ASK: list[Any] = [{"role": "user", "content": "hello"}]


async def say(mesh: Mesh, session: Session, messages: list[Any]) -> Any:
    return await mesh.openai(session).chat.completions.create(model="policy", messages=messages)


def write(mesh: Mesh, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(mesh.folder / "gateway" / "journal.sqlite")) as db, db:
        assert db.execute(statement, values).rowcount


async def dead_letters(mesh: Mesh, *arguments: str) -> str:
    command = [sys.executable, "-m", "rollmesh.gateway", "dead-letters"]
    flags = [f"--router={mesh.processes['router'].address}", *arguments]
    output, _ = await run_to_end(*command, *flags, cwd=Path.cwd(), env=None, limit_s=60)
    return output


@pytest.mark.long
async def test_a_damaged_row_is_set_aside_by_name_and_can_be_mended(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        whole, damaged, lost = [
            await client.open_session(client.session_request()) for _ in range(3)
        ]
        answers = [await say(mesh, session, ASK) for session in (whole, damaged, lost)]
        await mesh.processes["gateway"].kill()
        damage = "UPDATE nodes SET messages = ? || messages WHERE session_id = ?"
        write(mesh, damage, "?", damaged.session_id)
        write(mesh, "UPDATE sessions SET spec = 'x' WHERE session_id = ?", lost.session_id)
        gateway = await mesh.start("gateway", metrics_port=0)

        more = [*ASK, answers[0].choices[0].message, *ASK]
        assert (await say(mesh, whole, more)).usage.completion_tokens
        with pytest.raises(Exception, match=f"{damaged.session_id} cannot be read"):
            await say(mesh, damaged, ASK)
        listed = await dead_letters(mesh)
        assert listed.count("DAMAGED") == 2
        assert {damaged.session_id in listed, lost.session_id in listed} == {True}
        assert (await gateway.samples())["rollmesh_gateway_dead_letters"] == 2
        async with open_channel(gateway.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            info = await stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest(), timeout=60)
        assert (info.dead_letters, info.live_sessions) == (2, 1)

        mend = "UPDATE nodes SET messages = substr(messages, 2) WHERE session_id = ?"
        await mesh.processes["gateway"].terminate()
        write(mesh, mend, damaged.session_id)
        await mesh.start("gateway")
        await dead_letters(mesh, "retry", damaged.session_id)
        more = [*ASK, answers[1].choices[0].message, *ASK]
        assert (await say(mesh, damaged, more)).usage.completion_tokens
        await dead_letters(mesh, "drop", lost.session_id)
        assert not await dead_letters(mesh)


async def test_a_closed_session_that_makes_no_record_ends_nothing(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        await mesh.processes["collector"].kill()
        wrong, right = [await client.open_session(client.session_request()) for _ in range(2)]
        for session in (wrong, right):
            await say(mesh, session, ASK)
            await client.close_session(session)
        await mesh.processes["gateway"].kill()
        write(
            mesh,
            "UPDATE nodes SET logprobs = substr(logprobs, 5)"
            " WHERE session_id = ? AND sample IS NOT NULL",
            wrong.session_id,
        )
        await mesh.start("collector")
        await mesh.start("gateway")
        async with client.subscribe("audit", unit="session") as found, asyncio.timeout(60):
            assert (await anext(found)).sessions[0].session_id == right.session_id
        assert wrong.session_id in await dead_letters(mesh)


async def test_two_sizes_under_one_group_are_refused_where_the_second_is_opened(
    mesh: Mesh,
) -> None:
    async with mesh.client() as client:
        await client.open_session(gateway_pb2.CreateSessionRequest(group_id="g", group_size=2))
        await mesh.restart("gateway")
        for size in (0, 3):
            with pytest.raises(
                InvalidFieldError, match=r"group_size: .* and group 'g' of run '' has"
            ):
                await client.open_session(
                    gateway_pb2.CreateSessionRequest(group_id="g", group_size=size)
                )
