"""An engine that answers what cannot be right, beside one that works."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.runtime.codec import pack_ids, pack_logprobs
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.router.engines import Answers, NotingEngine, noting_engine
from tests.waiting import until

Info: TypeAlias = engine_pb2.GetInfoResponse
SAID, REPLY = "What is 6 plus 7?", "It is 13."


def answer(request: engine_pb2.GenerateRequest, logprob: float) -> engine_pb2.TokenChunk:
    """One message with one id."""
    response = engine_pb2.TokenChunk(
        token_ids_u32le=pack_ids(np.array([7], np.uint32)),
        logprobs_f32le=pack_logprobs(np.array([logprob], np.float32)),
    )
    response.finish.reason = sampling_pb2.FINISH_REASON_STOP
    response.finish.prompt_crc32 = zlib.crc32(request.token_ids_u32le)
    response.finish.version_spans.add(start=0, end=1)
    return response


async def certain(request: engine_pb2.GenerateRequest) -> Answers:
    yield answer(request, 0.5)


async def future(request: engine_pb2.GenerateRequest) -> Answers:
    response = answer(request, -0.5)
    response.policy_version = response.finish.version_spans[0].policy_version = 8
    yield response


async def nothing(request: engine_pb2.GenerateRequest) -> Answers:
    await asyncio.Event().wait()
    yield answer(request, -0.5)


@asynccontextmanager
async def lying_mesh(folder: Path, model: Path) -> AsyncIterator[Mesh]:
    first = {"gateway": {"stall_timeout_ms": 1000}}
    async with scripted_mesh(folder, model, [(SAID, REPLY)], first=first) as mesh:
        yield mesh


async def ask(mesh: Mesh, *, stream: bool, **fields: Any) -> str:
    """Has one turn in a session of its own."""
    messages = [{"role": "user", "content": SAID}]
    chat: dict[str, Any] = {"model": "policy", "messages": messages, **fields}
    async with mesh.client() as client, client.session() as session:
        create = mesh.openai(session).chat.completions.create
        if not stream:
            return str((await create(**chat)).choices[0].message.content)
        pieces = await create(**chat, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])


@asynccontextmanager
async def liar(mesh: Mesh) -> AsyncIterator[NotingEngine]:
    """An engine that is leased next, because it has no session."""
    chat: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": SAID}]}
    async with mesh.client() as client, client.session() as held:
        await mesh.openai(held).chat.completions.create(**chat)
        async with noting_engine(mesh.addresses.router, "liar") as engine:
            yield engine


async def replica(mesh: Mesh, name: str) -> router_pb2.Replica:
    async with mesh.client() as client:
        found = (await client.replicas()).replicas
    return next(one for one in found if one.hello.replica_id == name)


async def is_free(mesh: Mesh, name: str) -> bool:
    return not (await replica(mesh, name)).leases


async def in_service(mesh: Mesh, name: str) -> bool:
    return not (await replica(mesh, name)).HasField("exclusion")


async def why_excluded(mesh: Mesh, name: str) -> str:
    exclusion = (await replica(mesh, name)).exclusion
    assert exclusion.reason in {
        router_pb2.EXCLUSION_REASON_UNSPECIFIED,
        router_pb2.EXCLUSION_REASON_FAULT,
    }
    return exclusion.explanation


async def test_a_wrong_answer_reaches_nobody_and_its_engine_is_out_of_service(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    stuck = engine_pb2.GetInfoResponse(running=1, holds_request=True, stuck_ms=1000)
    idle = engine_pb2.GetInfoResponse(running=1)
    lies: list[tuple[Callable[[engine_pb2.GenerateRequest], Answers], bool, str, Info]] = [
        (certain, False, "above 0", idle),
        (certain, True, "above 0", idle),
        (future, False, "offered up to 1", idle),
        (future, True, "offered up to 1", idle),
        (nothing, True, "does not have the request", idle),
        (nothing, False, "does not have the request", idle),
        (nothing, True, "has not finished a step", stuck),
        (nothing, False, "has not finished a step", stuck),
    ]
    async with lying_mesh(tmp_path, tokenizer_dir) as mesh:
        async with mesh.client() as client:
            await client.push_weights({"w": np.zeros(1, np.float32)}, 1)
        for lie, stream, why, info in lies:
            async with liar(mesh) as engine:
                await engine.until_taken(1)
                await until(lambda: in_service(mesh, "liar"))  # it registered anew
                engine.answers, engine.info = lie, info
                assert await ask(mesh, stream=stream) == REPLY
                excluded = await until(lambda: why_excluded(mesh, "liar"))
            assert "out of service" in excluded
            assert why in excluded


@pytest.mark.long
async def test_an_engine_that_is_slow_and_says_so_is_waited_for(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with lying_mesh(tmp_path, tokenizer_dir) as mesh:
        for stream in (False, True):
            async with liar(mesh) as engine:
                engine.info = engine_pb2.GetInfoResponse(holds_request=True, stuck_ms=999)

                async def slow(request: engine_pb2.GenerateRequest) -> Answers:
                    while engine.asked < 3:
                        engine.changed.clear()
                        await engine.changed.wait()
                    yield answer(request, -0.5)

                engine.answers = slow
                assert await ask(mesh, stream=stream) != REPLY  # it is the slow one's
                assert engine.asked >= 3
                await until(lambda: is_free(mesh, "liar"))
                assert not await why_excluded(mesh, "liar")


async def test_a_stop_string_of_an_engine_that_lies_ends_no_answer(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    ids = Tokenizer(tokenizer_dir).encode("Nothing is right here")

    async def enough(request: engine_pb2.GenerateRequest) -> Answers:
        yield engine_pb2.TokenChunk(
            token_ids_u32le=pack_ids(ids),
            logprobs_f32le=pack_logprobs(np.full(len(ids), -0.5, np.float32)),
            policy_version=0,
        )
        yield answer(request, 0.5)

    async with lying_mesh(tmp_path, tokenizer_dir) as mesh, liar(mesh) as engine:
        engine.answers = enough
        assert await ask(mesh, stream=False, stop=["is"]) == "It "
        assert "above 0" in await until(lambda: why_excluded(mesh, "liar"))


async def test_a_token_without_a_finite_log_prob_is_kept_and_not_trained(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    ids = Tokenizer(tokenizer_dir).encode("Nothing is right here")
    logprobs = np.full(len(ids), -0.5, np.float32)
    logprobs[1], logprobs[2] = np.nan, -np.inf

    async def broken(request: engine_pb2.GenerateRequest) -> Answers:
        whole = answer(request, -0.5)
        whole.token_ids_u32le, whole.logprobs_f32le = pack_ids(ids), pack_logprobs(logprobs)
        whole.finish.version_spans[0].end = len(ids)
        yield whole

    first = {"gateway": {"metrics_port": 0}}
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, [(SAID, REPLY)], first=first) as mesh,
        liar(mesh) as engine,
        mesh.client() as client,
    ):
        engine.answers = broken
        async with client.session() as session:
            answered = await mesh.openai(session).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": SAID}], logprobs=True
            )
        shown = answered.choices[0].logprobs
        assert shown is not None
        assert [one.logprob for one in shown.content or ()][:4] == [-0.5, -9999.0, -9999.0, -0.5]
        (trajectory,) = (await delivered(client, session)).trajectories
        samples = await mesh.processes["gateway"].samples()
        assert not await why_excluded(mesh, "liar")
    sampled = slice(trajectory.prompt_tokens, trajectory.prompt_tokens + len(ids))
    assert trajectory.token_ids[sampled].tolist() == ids.tolist()
    assert trajectory.loss_mask[sampled].tolist() == np.isfinite(logprobs).tolist()
    kept = np.where(np.isfinite(logprobs), logprobs, 0).tolist()
    assert trajectory.logprobs[sampled].tolist() == kept
    assert trajectory.reasons == ("LOGPROB_NOT_FINITE",)
    assert samples['rollmesh_gateway_not_finite_logprobs_total{engine="liar"}'] == 2
