"""An engine that is attached to a real vLLM or SGLang server: exact tokens, and what it notices."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    InvalidFieldError,
    RollmeshError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc, sampling_pb2
from tests import models
from tests.controls import RESUME, abort, pause
from tests.engine.engines import LONG, Engine, Result, engine_with, torch_logprobs
from tests.engine.gated_weights import LOAD
from tests.engine.servers import SglangServer, VllmServer, server_of
from tests.engine.vllm.test_transfer import install_plugin
from tests.mesh.protocols.test_openai import ask, streamed, user
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.processes import running
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.vllm,
]
GREEDY = {"temperature": 0.0}
INCREMENTAL = {"sglang": ("--incremental-streaming-output",)}
"""The conformance tests have a server without it."""


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with small logits, whose log-probs are exact to 1e-5 in float32."""
    return models.make_model_dir(tmp_path_factory.mktemp("exact"), spread=0.1)


@asynccontextmanager
async def engine_of(folder: Path, **flags: Any) -> AsyncIterator[Engine]:
    async with (
        running("engine", folder, **flags) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), folder)


async def after_three(engine: Engine, result: Result, act: Callable[[], Awaitable[object]]) -> None:
    """Takes a long answer, and acts after its third message."""
    async with aclosing(engine.stream(engine.request(LONG, 1))) as responses:
        async for response in responses:
            result.take(response)
            if result.messages == 3:
                await act()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wanted(vllm_home: Mesh, exact_model: Path) -> Result:
    """A greedy answer of the backend vllm."""
    async with engine_with(vllm_home.processes["engine"], exact_model) as engine:
        return await engine.generate(engine.request(60, 0, sampling=GREEDY, top_logprobs=3))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[VllmServer, pytest.param(SglangServer, marks=pytest.mark.long)],
)
async def server(
    request: pytest.FixtureRequest,
    wanted: Result,
    exact_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[VllmServer]:
    async with server_of(request.param, tmp_path_factory.mktemp("server")) as server:
        await server.start(exact_model, *INCREMENTAL.get(server.backend, ()))
        await server.until_healthy()
        yield server


async def test_tokens_and_log_probs_equal_the_ones_of_the_backend_vllm(
    server: VllmServer, wanted: Result, exact_model: Path, tmp_path: Path
) -> None:
    async with engine_of(tmp_path, attach=server.url) as engine:
        for chunk in (0, 1, 7):
            request = engine.request(60, chunk, sampling=GREEDY, top_logprobs=3)
            result = await engine.generate(request)
            assert result.ids == wanted.ids
            assert np.abs(np.subtract(result.logprobs, wanted.logprobs)).max() < 1e-5
            assert result.top_ids == wanted.top_ids
            tops = np.subtract(result.top_logprobs, wanted.top_logprobs)
            assert np.abs(tops).max() < 1e-5
            assert result.spans == [(0, 0, 60)]
        exact = torch_logprobs(exact_model, result.ids)
        assert np.abs(exact - result.logprobs).max() < 1e-5


async def test_a_seed_repeats_an_answer_and_unlikely_tokens_have_their_candidates(
    server: VllmServer, exact_model: Path, tmp_path: Path
) -> None:
    async with engine_of(tmp_path, attach=server.url) as engine:
        hot: dict[str, Any] = {"temperature": 1.5}
        if server.backend == "sglang":
            with pytest.raises(InvalidFieldError, match=r"sampling\.seed: needs"):
                await engine.generate(engine.request(5, 0, sampling=hot | {"seed": 7}))
        else:
            await repeats(engine, hot)
        sampled = await engine.generate(engine.request(40, 1, sampling=hot, top_logprobs=2))
        rows = models.torch_logprobs(exact_model, [5, 6, 7, 8] * 4 + sampled.ids)[15:-1]
        best = np.argsort(-rows, axis=1)[:, :2]
        assert not set(sampled.ids) <= set(best.ravel().tolist())
        assert sampled.top_ids == best.tolist()


async def repeats(engine: Engine, hot: dict[str, Any]) -> None:
    first, again, other = [
        await engine.generate(engine.request(40, 0, sampling=hot | {"seed": seed}))
        for seed in (7, 7, 8)
    ]
    assert first.ids == again.ids != other.ids


async def test_an_engine_attaches_again_and_keeps_the_version_of_the_weights(
    server: VllmServer, exact_model: Path, other_model_dir: Path, tmp_path: Path
) -> None:
    async with engine_of(tmp_path, attach=server.url) as engine:
        await engine.update(5, other_model_dir)
        ids = (await engine.generate(engine.request(20, 0, sampling=GREEDY))).ids
        await engine.process.kill()
    async with engine_of(tmp_path, attach=server.url) as engine:
        result = await engine.generate(engine.request(20, 0, sampling=GREEDY))
        assert (result.ids, result.spans) == (ids, [(5, 0, 20)])
        await engine.update(6, exact_model)


async def test_a_stop_in_a_pause_lets_the_server_go_on(server: VllmServer, tmp_path: Path) -> None:
    async with engine_of(tmp_path, attach=server.url) as engine:
        await engine.stub.ControlEngines(pause())
        assert await engine.process.terminate() == 0
    if server.backend == "sglang":  # it does not say that it is paused
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
        assert json.loads(await server.call("/generate", json.dumps(body).encode()))["output_ids"]
    else:
        assert json.loads(await server.call("/is_paused")) == {"is_paused": False}


@pytest.mark.long
async def test_a_stop_while_the_server_loads_weights_leaves_it_with_the_weights(
    exact_model: Path, other_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load takes longer than the grace period of the engine."""
    gate = tmp_path / LOAD
    monkeypatch.setenv("GATES", str(tmp_path))
    install_plugin(tmp_path / "plugin", monkeypatch, "tests.engine.gated_weights")
    async with server_of(VllmServer, tmp_path) as server:
        await server.start(exact_model)
        await server.until_healthy()
        async with engine_of(tmp_path, attach=server.url, grace_ms=500) as engine:
            gate.touch()
            data = (other_model_dir / "model.safetensors").read_bytes()
            update = asyncio.create_task(engine.update(7, data, keep_file=True, push_id="p"))
            await until(gate.with_suffix(".waits").exists)
            ended = asyncio.create_task(engine.process.terminate())
            await asyncio.sleep(2)
            assert not ended.done()
            gate.unlink()
            assert await ended == 0
            await asyncio.gather(update, return_exceptions=True)
        assert json.loads(await server.call("/is_paused")) == {"is_paused": False}
        async with engine_of(tmp_path, attach=server.url) as engine:
            result = await engine.generate(engine.request(20, 0))
            assert result.spans == [(7, 0, 20)]
            exact = torch_logprobs(other_model_dir, result.ids)
            assert np.abs(exact - result.logprobs).max() < 1e-4


async def test_a_pause_by_another_process_shows_as_silence(
    server: VllmServer, tmp_path: Path
) -> None:
    if server.backend == "sglang":
        pytest.skip("SGLang does not say that it is paused")
    async with engine_of(tmp_path, attach=server.url) as engine:
        is_silent = False
        while not is_silent:  # again, if the whole answer was sampled before the pause
            result = Result()
            async for response in engine.stream(engine.request(LONG, 1)):
                result.take(response)
                if result.messages == 3:
                    await server.call("/pause?mode=keep", b"")
                    await engine.until(lambda info: info.stuck_ms > 600 or not info.running)
                    is_silent = (await engine.info()).stuck_ms > 600
                    await server.call("/resume", b"")
            assert len(result.ids) == LONG


async def test_new_weights_in_a_pause_compute_the_rest_of_an_answer_and_its_prompt(
    server: VllmServer, exact_model: Path, other_model_dir: Path, tmp_path: Path
) -> None:
    if server.backend != "sglang":
        pytest.skip("SGLang has two ways to hold a request")
    async with engine_of(tmp_path, attach=server.url) as engine:
        before, result = (await engine.info()).policy_version, Result()

        async def act() -> None:
            await engine.stub.ControlEngines(pause())  # in place, before the one of the update
            await engine.update(before + 1, (other_model_dir / "model.safetensors").read_bytes())
            await engine.stub.ControlEngines(RESUME)

        await after_three(engine, result, act)
        (_, _, middle), (_, again, end) = result.spans
        assert 3 <= middle == again < end == LONG
        exact = torch_logprobs(other_model_dir, result.ids)[middle:]
        assert np.abs(exact - result.logprobs[middle:]).max() < 1e-4
        await engine.update(before + 2, exact_model)


async def test_an_abort_ends_an_answer_of_sglang_that_a_pause_holds(
    server: VllmServer, tmp_path: Path
) -> None:
    if server.backend != "sglang":
        pytest.skip("the conformance tests abort without a pause")
    async with engine_of(tmp_path, attach=server.url) as engine:
        request, result = engine.request(LONG, 1), Result()
        async with asyncio.timeout(120), aclosing(engine.stream(request)) as responses:
            async for response in responses:
                result.take(response)
                if result.messages == 3:
                    await engine.stub.ControlEngines(pause())
                    await engine.stub.ControlEngines(abort(request.generate.request_id))
        assert result.finish.reason == sampling_pb2.FINISH_REASON_ABORT
        assert result.spans[-1][2] == len(result.ids) == len(result.logprobs) < LONG
        await engine.stub.ControlEngines(RESUME)
        assert len((await engine.generate(engine.request(5, 0))).ids) == 5


async def test_weights_of_another_process_are_noticed_and_fence_the_engine(
    server: VllmServer, tmp_path: Path
) -> None:
    async with engine_of(tmp_path, attach=server.url) as engine:
        answers = list[Result]()

        async def rename() -> None:
            while True:  # again, if the whole answer was sampled before
                answers.append(Result())
                await after_three(engine, answers[-1], lambda: server.rename("77"))

        with pytest.raises((EngineFaultError, EngineDeadError)):
            await rename()
        assert len(answers[-1].ids) < LONG
        assert await engine.process.exit_code() != 0
        assert "restart the engine to attach again" in (tmp_path / "engine.log").read_text()
    async with engine_of(tmp_path / "again", attach=server.url) as engine:
        assert (await engine.generate(engine.request(5, 0))).spans == [(77, 0, 5)]


@pytest.mark.long
async def test_a_server_that_is_killed_ends_the_engine_and_the_next_one_waits_for_it(
    server: VllmServer, other_model_dir: Path, tmp_path: Path
) -> None:
    """It runs after the tests of the first server."""
    async with engine_of(tmp_path, attach=server.url) as engine:
        result = Result()
        with pytest.raises(EngineDeadError, match="was lost"):
            await after_three(engine, result, server.kill)
        assert 3 <= len(result.ids) < LONG
        assert await engine.process.exit_code() != 0
    await server.start(other_model_dir)  # restarted, with other weights
    async with engine_of(tmp_path / "again", attach=server.url) as engine:
        result = await engine.generate(engine.request(20, 0, sampling=GREEDY))
        assert result.spans == [(0, 0, 20)]
        exact = torch_logprobs(other_model_dir, result.ids)
        assert np.abs(exact - result.logprobs).max() < 1e-4
        with pytest.raises(RollmeshError, match="max_adapters"):
            await engine.load_adapter("math", 1, b"adapter")
    assert result.finish.reason == sampling_pb2.FINISH_REASON_LENGTH


@pytest.mark.long
async def test_a_mesh_brings_its_weights_to_a_server_that_was_restarted(
    server: VllmServer, exact_model: Path, other_model_dir: Path, tmp_path: Path
) -> None:
    """It runs last: the server was restarted with other weights, and is once more."""
    flags: dict[str, Any] = {"backend": "vllm", "attach": server.url}
    async with scripted_mesh(tmp_path, exact_model, **flags) as mesh, mesh.client() as client:
        await client.push_weights(exact_model, 1)
        async with client.session() as session:
            agent = mesh.openai(session)
            await ask(agent, user("one"), max_tokens=12)
            await server.kill()
            assert await mesh.processes["engine"].exit_code() != 0
            await server.start(other_model_dir)
            await mesh.start("engine", **flags)
            await streamed(agent, user("two"), max_tokens=12)
        result = await delivered(client, session)
    for trajectory in result.trajectories:
        assert {span.policy_version for span in trajectory.version_spans} == {1}
        rows = models.torch_logprobs(exact_model, trajectory.token_ids.tolist())
        for one in trajectory.segments:
            if one.sampled:
                at = np.arange(one.start, one.end)
                exact = rows[at - 1, trajectory.token_ids[at]]
                assert np.abs(exact - trajectory.logprobs[at]).max() < 1e-5
    assert len(result.trajectories) == 2
