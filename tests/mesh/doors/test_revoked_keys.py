"""An operator works on sessions by their ids in a locked mesh, and gets no key."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RoleRefusedError,
    SessionClosedError,
    SessionKeyWrongError,
    SessionUnknownError,
)
from tests.locks import Locks
from tests.meshes import Mesh, delivered, scripted_mesh

RULES = [("plain", "The answer is 42.")]
ASK: list[Any] = [{"role": "user", "content": "plain"}]


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    locks = Locks(tmp_path / "locks")
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES, locks=locks) as running:
        yield running


async def revoke(mesh: Mesh, role: str, *session_ids: str) -> tuple[int | None, str, str]:
    return await run(mesh, role, "sessions", "revoke-key", *session_ids)


async def run(mesh: Mesh, role: str, *words: str) -> tuple[int | None, str, str]:
    """Runs a tool with a role's token. Returns its exit code, output and errors."""
    assert mesh.locks is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", "gateway", *words),
        f"--router={mesh.address('router')}",
        f"--token-file={mesh.locks.token_file(role)}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_an_ended_key_is_refused_and_the_sessions_opener_continues(mesh: Mesh) -> None:
    async with mesh.client() as client, client.session() as session, client.session() as other:
        agent, ended = mesh.openai(session), session.api_key
        large = "x" * 100_000  # the sidecar checks the key of such a body only once a minute
        await agent.chat.completions.create(model="policy", messages=ASK, user=large)
        code, out, err = await revoke(mesh, "operator", session.session_id)
        assert (code, err) == (0, "")
        assert session.session_id in out
        assert "rmk-" not in out
        for user in ("x", large):
            with pytest.raises(openai.AuthenticationError) as refused:
                await agent.chat.completions.create(model="policy", messages=ASK, user=user)
            assert refused.value.code == "session_key_wrong"
        with pytest.raises(SessionKeyWrongError):
            await client.revoke_key(session)
        await mesh.restart("gateway")
        with pytest.raises(openai.AuthenticationError):
            await agent.chat.completions.create(model="policy", messages=ASK)
        await client.renew_key(session)
        assert ended not in (session.api_key, session.base_url)
        await mesh.openai(session).chat.completions.create(model="policy", messages=ASK)
        await mesh.openai(other).chat.completions.create(model="policy", messages=ASK)


@pytest.mark.long
async def test_a_session_whose_key_was_ended_is_read_and_delivered(mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session() as session:
            await mesh.openai(session).chat.completions.create(model="policy", messages=ASK)
            await revoke(mesh, "operator", session.session_id)
            assert len((await client.transcript(session)).turns) == 1
            await revoke(mesh, "operator", session.session_id)
            session.reward = 1.0
        result = await delivered(client, session)
        assert len(result.trajectories) == 1
        with pytest.raises(SessionClosedError):
            await client.renew_key(session)
        session.request_id = "another"
        with pytest.raises(SessionUnknownError):
            await client.renew_key(session)
        session.request_id = ""
        with pytest.raises(InvalidFieldError, match="request_id"):
            await client.renew_key(session)


@pytest.mark.long
async def test_the_command_says_of_which_sessions_it_ended_no_key(mesh: Mesh) -> None:
    assert mesh.locks is not None
    async with mesh.client() as client, client.session() as session, client.session() as closed:
        await client.close_session(closed)
        unknown = closed.session_id[:8] + "0" * 24
        code, out, err = await revoke(
            mesh, "operator", unknown, closed.session_id, session.session_id
        )
        assert code == 1
        assert f"{unknown}: session_id: there is no session" in err
        assert f"{closed.session_id}: " in err
        assert out == f"{session.session_id}: its key is ended\n"
        await client.renew_key(session)
        key = session.api_key
        for role in ("trainer", "sidecar"):
            code, out, err = await revoke(mesh, role, session.session_id)
            assert (code, out) == (1, "")
            assert role in err
        await client.renew_key(session)
        assert session.api_key == key
        operator = MeshAddresses(
            router=mesh.address("router"), token_file=str(mesh.locks.token_file("operator"))
        )
        async with Client(operator) as other:
            with pytest.raises(RoleRefusedError):
                await other.renew_key(session)


async def test_an_operator_lists_shows_and_ends_sessions(mesh: Mesh) -> None:
    async with mesh.client() as client:
        idle = await client.open_session(client.session_request())
        asked = await client.open_session(client.session_request(group_id="g"))
        await mesh.openai(asked).chat.completions.create(model="policy", messages=ASK)
        code, out, _ = await run(mesh, "operator", "sessions")
        listed = {one["session_id"]: one for one in map(json.loads, out.splitlines())}
        assert (code, set(listed)) == (0, {idle.session_id, asked.session_id})
        shown = listed[asked.session_id]
        assert (shown["turns"], shown["purpose"]) == (1, "TRAIN")
        code, out, _ = await run(mesh, "operator", "sessions", "list", "--group-id=g")
        assert [json.loads(one)["session_id"] for one in out.splitlines()] == [asked.session_id]
        code, out, _ = await run(mesh, "operator", "sessions", "show", asked.session_id)
        shown = json.loads(out)
        texts = [part["text"] for node in shown["nodes"] for part in node["messages"][0]["content"]]
        assert sorted(texts) == sorted(("plain", RULES[0][1]))
        for wrong in ("nan", "inf", "-1"):
            code, _, err = await run(mesh, "operator", "sessions", f"--idle-s={wrong}")
            assert (code, "--idle-s: give seconds" in err) == (2, True)
        for role in ("trainer", "sidecar"):
            code, out, err = await run(mesh, role, "sessions", "end", asked.session_id)
            assert (code, out) == (1, "")
            assert role in err
        code, out, _ = await run(mesh, "operator", "sessions", "end", asked.session_id)
        assert (code, out) == (0, f"{asked.session_id}: closed, 1 trajectories\n")
        result = await delivered(client, asked)
        assert result.metadata["closed_by"] == "operator"
        with pytest.raises(openai.APIStatusError, match="is closed"):
            await mesh.openai(asked).chat.completions.create(model="policy", messages=ASK)
