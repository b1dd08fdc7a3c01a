"""Engines that are paused, asleep, being updated or about to leave: turns wait or move."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollmesh.client import Client, Session, WeightsPushError
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.processes import running
from tests.waiting import until

SAID, REPLY = "What is 6 plus 7?", "The answer is 13, and I am sure of it."
LEASE_MS = 1000  # what a turn waits for a lease while an engine samples
TENSORS = {"w": np.zeros(1, np.float32)}


@asynccontextmanager
async def resting_mesh(
    folder: Path, model: Path, *, turn_timeout_ms: int = 600_000, **engine: Any
) -> AsyncIterator[Mesh]:
    """A mesh whose turns wait for a lease for a moment only."""
    gateway = {"lease_timeout_ms": LEASE_MS, "turn_timeout_ms": turn_timeout_ms}
    first = {"router": {"metrics_port": 0}, "gateway": gateway}
    async with scripted_mesh(folder, model, [(SAID, REPLY)], first=first, **engine) as mesh:
        yield mesh


async def ask(mesh: Mesh, session: Session, *, stream: bool) -> str:
    chat: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": SAID}]}
    create = mesh.openai(session).chat.completions.create
    if not stream:
        return str((await create(**chat)).choices[0].message.content)
    pieces = await create(**chat, stream=True)
    return "".join([piece.choices[0].delta.content or "" async for piece in pieces])


def asking(mesh: Mesh, one: Session, other: Session) -> list[asyncio.Future[str]]:
    """A turn in each of two sessions: the first answer is whole, the second streamed."""
    return [
        asyncio.ensure_future(ask(mesh, session, stream=stream))
        for session, stream in ((one, False), (other, True))
    ]


async def until_prolonged(mesh: Mesh, times: int = 2) -> None:
    """Waits until waits for a lease were longer than they may be while an engine samples."""

    async def look() -> bool:
        name = "rollmesh_router_prolonged_waits"
        return (await mesh.processes["router"].samples(name))[name] >= times

    await until(look)


async def until_known(client: Client, **load: bool) -> None:
    """Waits until the router knows the state of all engines."""

    async def look() -> bool:
        replicas = (await client.replicas()).replicas
        loads = [one.hello.load for one in replicas if one.hello.lease_capacity]
        return all(getattr(one, name) == load[name] for one in loads for name in load)

    await until(look)


@pytest.mark.parametrize("pushed", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_turns_wait_for_weights_that_a_sleep_dropped(
    tmp_path: Path, tokenizer_dir: Path, *, pushed: bool
) -> None:
    async with (
        resting_mesh(tmp_path, tokenizer_dir) as mesh,
        mesh.client() as client,
        client.session() as one,
        client.session() as other,
    ):
        if pushed:
            await client.push_weights(TENSORS, 1)
        await client.sleep_engines(2)
        await until_known(client, sleeping=True, weights_dropped=True)
        with pytest.raises(WeightsPushError, match="wake it up"):
            await client.push_weights(TENSORS, 2)
        turns = asking(mesh, one, other)
        await until_prolonged(mesh, 4)
        await client.wake_up_engines()
        await until_known(client, sleeping=False)
        if not pushed:  # the router has no weights to bring
            before = (await mesh.processes["router"].samples())["rollmesh_router_prolonged_waits"]
            await until_prolonged(mesh, int(before) + 4)
            assert not any(turn.done() for turn in turns)
            await client.push_weights(TENSORS, 3)
        assert await asyncio.gather(*turns) == [REPLY, REPLY]
        await until_known(client, weights_dropped=False)


async def until_they_have_tokens(client: Client, turns: int) -> None:
    """Waits until turns have been sampled for 1.5 seconds: three tokens at two a second."""
    seen: list[float] = []

    async def samples() -> bool:
        replicas = (await client.replicas()).replicas
        if sum(one.hello.load.running for one in replicas) == turns:
            seen.append(time.monotonic())
        return bool(seen) and seen[-1] - seen[0] >= 1.5

    await until(samples)


async def test_a_turn_that_sleep_interrupts_goes_on_when_the_engines_wake_up(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        resting_mesh(tmp_path, tokenizer_dir, tokens_per_second=2) as mesh,
        mesh.client() as client,
    ):
        async with client.session() as one, client.session() as other:
            turns = asking(mesh, one, other)
            await until_they_have_tokens(client, 2)
            await client.sleep_engines()
            await until_known(client, sleeping=True)
            assert not any(turn.done() for turn in turns)
            await client.wake_up_engines()
            assert await asyncio.gather(*turns) == [REPLY, REPLY]
        for session in (one, other):
            result = await delivered(client, session)
            assert result.trajectories[0].reasons == ("MIGRATED",)


async def test_an_engine_that_leaves_finishes_its_turns_and_new_ones_go_elsewhere(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            resting_mesh(tmp_path, tokenizer_dir, tokens_per_second=10)
        )
        client = await stack.enter_async_context(mesh.client())
        sessions = [await stack.enter_async_context(client.session()) for _ in range(4)]
        turns = asking(mesh, *sessions[:2])

        async def sampling() -> bool:
            replicas = (await client.replicas()).replicas
            return any(one.hello.load.running == 2 for one in replicas)

        await until(sampling)
        flags = {
            "backend": "scripted",
            "script": tmp_path / "script.json",
            "router": mesh.address("router"),
            "vocabulary_tokens": 400,
            "eos_id": 2,
        }
        await stack.enter_async_context(
            running("engine", tmp_path / "second", engine_id="second", **flags)
        )
        leaving = asyncio.ensure_future(mesh.processes["engine"].terminate())

        async def left() -> bool:
            replicas = (await client.replicas()).replicas
            return [one.hello.replica_id for one in replicas if one.hello.lease_capacity] == [
                "second"
            ]

        await until(left)
        assert await asyncio.gather(*asking(mesh, *sessions[2:])) == [REPLY, REPLY]
        assert await asyncio.gather(*turns) == [REPLY, REPLY]
        assert await leaving == 0


@pytest.mark.long
async def test_a_client_that_leaves_ends_its_wait_for_engines_that_sleep(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with resting_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with client.session() as session:
            await client.sleep_engines()
            await until_known(client, sleeping=True)
            turns = [
                asyncio.ensure_future(ask(mesh, session, stream=stream)) for stream in (False, True)
            ]
            await until_prolonged(mesh, 4)
            for turn in turns:
                turn.cancel()

            async def nobody_waits() -> bool:
                name = "rollmesh_router_queue_length"
                return (await mesh.processes["router"].samples(name))[name] == 0

            await until(nobody_waits)


@pytest.mark.long
async def test_a_sleep_beyond_the_turns_limit_is_an_error_that_names_it(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        resting_mesh(tmp_path, tokenizer_dir, turn_timeout_ms=4000) as mesh,
        mesh.client() as client,
        client.session() as one,
        client.session() as other,
    ):
        await client.sleep_engines()
        await until_known(client, sleeping=True)
        for late in await asyncio.gather(*asking(mesh, one, other), return_exceptions=True):
            assert isinstance(late, openai.InternalServerError)
            assert "it sleeps; wake it up" in str(late)
            assert late.code == "no_engine"
        await until_prolonged(mesh, 4)
        await mesh.processes["engine"].kill()  # no engine at all: no long wait
        for none in await asyncio.gather(*asking(mesh, one, other), return_exceptions=True):
            assert isinstance(none, openai.InternalServerError)
            assert "none of 0 engines" in str(none)
