"""The backend vllm-http with a stand-in for `vllm serve`, which lies and falls silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.engine.config import EngineConfig
from rollmesh.engine.requests import read_generate, read_score
from rollmesh.engine.service import make_backend
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EngineStartError,
    InvalidFieldError,
    RollmeshError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.waiting import until

pytest.importorskip("aiohttp")
from aiohttp import web

VOCABULARY = 100
IDS = [11, 12, 13]


def description() -> dict[str, Any]:
    """What /server_info says, of the fields that are read."""
    return {
        "vllm_config": {
            "model_config": {
                "model": "nowhere", "max_model_len": 64, "dtype": "torch.float32",
                "max_logprobs": 20, "logprobs_mode": "raw_logprobs", "quantization": None,
                "enable_sleep_mode": False, "multimodal_config": None,
            },
            "parallel_config": {
                "worker_extension_cls": "", "data_parallel_size": 1, "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1, "enable_expert_parallel": False,
            },
            "scheduler_config": {"max_num_seqs": 8},
            "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
            "device_config": {"device": "cuda"},
            "speculative_config": None, "weight_transfer_config": None,
        },
        "vllm_env": {},
    }  # fmt: skip


class StandIn:
    """The routes of a vLLM server that a test changes."""

    def __init__(self) -> None:
        self.info = description()
        self.name = "default"
        self.calls: list[str] = []
        self.keys: set[str | None] = set()
        self.status: dict[str, int] = {}
        self.silent: set[str] = set()
        self.choice: dict[str, Any] = {}
        """Fields that replace those of an answer."""
        self.raw: bytes | None = None
        """What comes in place of an answer."""
        self.gone: list[str] = []
        """Ids of requests whose client left."""
        self.holds = False
        """Whether an answer begins and does not go on."""
        self.url = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        self.keys.add(request.headers.get("authorization"))
        if path in self.silent:
            await asyncio.sleep(3600)
        if status := self.status.get(path):
            body = {"error": {"message": "Scale-out endpoints are disabled", "code": status}}
            return web.json_response(body, status=status)
        match path:
            case "/server_info":
                return web.json_response(self.info)
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/weight_info":
                return web.json_response({"weight_version": self.name})
            case "/update_weight_version":
                self.name = (await request.json())["new_version"]
            case "/inference/v1/generate":
                return await self._generate(request)
        return web.json_response({"is_paused": False, "is_sleeping": False})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.raw is not None:
            return web.Response(body=self.raw)
        count = min(body["sampling_params"]["max_tokens"], len(IDS))
        if not body.get("stream"):
            return web.json_response(self._answer(IDS[:count], ends=True))
        response = web.StreamResponse()
        response.force_close()  # the next request has another connection, as after a restart
        await response.prepare(request)
        try:
            for at in range(count):
                part = self._answer(IDS[at : at + 1], ends=at + 1 == count, first=at)
                await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                while self.holds and not self.gone:
                    await asyncio.sleep(0.01)
                    await response.write(b": keep-alive\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.gone.append(body["request_id"])
            raise
        return response

    def _answer(self, ids: list[int], *, ends: bool, first: int = 0) -> dict[str, Any]:
        content = [{"token_id": one, "logprob": -0.5, "top_logprobs": []} for one in ids]
        spans = [{"version": self.name, "start": 0, "end": first + len(ids)}]
        choice = {
            "index": 0, "token_ids": ids, "logprobs": {"content": content}, "stop_reason": None,
            "finish_reason": "length" if ends else None, "weight_versions": spans if ends else None,
        }  # fmt: skip
        return {"choices": [choice | self.choice]}


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    stand_in = StandIn()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stand_in.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stand_in.url = site.name.replace(":0", f":{runner.addresses[0][1]}")
    yield stand_in
    await runner.cleanup()


@asynccontextmanager
async def attached(server: StandIn, **settings: Any) -> AsyncIterator[Any]:
    """A backend that has started, and is watched."""
    given = {"vocabulary_tokens": VOCABULARY, "attach_timeout_ms": 5000, **settings}
    backend: Any = make_backend(EngineConfig(attach=server.url, **given))
    watching: asyncio.Task[None] | None = None
    try:
        await backend.start()
        watching = asyncio.ensure_future(backend.watch())
        yield backend
    finally:
        if watching is not None:
            watching.cancel()
        await backend.stop()


def asked(backend: Any, chunk: int = 1, **fields: Any) -> Any:
    generate = engine_pb2.GenerateRequest(
        request_id="r", token_ids_u32le=np.array([5, 6], "<u4").tobytes(), **fields
    )
    generate.sampling.max_tokens = 3
    return read_generate(
        engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=chunk), backend.limits
    )


async def sampled(backend: Any, chunk: int = 1) -> list[engine_pb2.TokenChunk]:
    async with asyncio.timeout(20), aclosing(backend.generate(asked(backend, chunk))) as messages:
        return [one async for one in messages]


@pytest.mark.parametrize("chunk", [0, 1])
async def test_an_answer_has_the_server_s_tokens_and_the_engine_s_version(
    server: StandIn, chunk: int
) -> None:
    server.name = "7"
    async with attached(server) as backend:
        messages = await sampled(backend, chunk)
        ids = b"".join(one.token_ids_u32le for one in messages)
        assert np.frombuffer(ids, "<u4").tolist() == IDS
        assert {one.policy_version for one in messages} == {7}
        assert [(s.start, s.end) for s in messages[-1].finish.version_spans] == [(0, 3)]
        assert server.name.startswith("rollmesh-")


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"token_ids": [11, 12]}, "log-probs for 2 ids"),
        ({"token_ids": [99, 12, 13]}, "belongs to another id"),
        ({"token_ids": None}, "malformed"),
        ({"logprobs": None}, "0 log-probs for 3 ids"),
        ({"logprobs": {"content": [{"token_id": 11}] * 3}}, "another id|malformed"),
        ({"index": 1}, "cannot be right"),
        ({"finish_reason": "error"}, "malformed"),
        ({"finish_reason": None}, "without a finish reason"),
        ({"weight_versions": None}, "do not cover"),
        ({"finish_reason": "stop", "stop_reason": 12}, "stop token"),
    ],
)
async def test_an_answer_that_cannot_be_right_is_a_fault(
    server: StandIn, choice: dict[str, Any], says: str
) -> None:
    async with attached(server) as backend:
        server.choice = choice
        with pytest.raises(EngineFaultError, match=says):
            await sampled(backend, 0)
        server.choice = {}
        assert await sampled(backend, 0)


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize(
    "raw", [b"{", b"[" * 100_000, b"data: {\n\n", b"x" * 400_000, b"data: {}\n\n"]
)
async def test_bytes_that_are_no_answer_are_a_fault(
    server: StandIn, raw: bytes, chunk: int
) -> None:
    async with attached(server) as backend:
        server.raw = raw
        with pytest.raises(EngineFaultError):
            await sampled(backend, chunk)


async def test_an_id_outside_of_the_vocabulary_is_a_fault(server: StandIn) -> None:
    async with attached(server) as backend:
        entry = {"token_id": VOCABULARY, "logprob": -1.0, "top_logprobs": []}
        server.choice = {"token_ids": [VOCABULARY], "logprobs": {"content": [entry]}}
        with pytest.raises(EngineFaultError, match="is no id"):
            await sampled(backend)


async def test_a_number_that_json_has_no_word_for_is_kept_as_not_finite(server: StandIn) -> None:
    async with attached(server) as backend:
        entries = [{"token_id": one, "logprob": -9999.0, "top_logprobs": []} for one in IDS]
        server.choice = {"logprobs": {"content": entries}}
        (message,) = await sampled(backend, 0)
        assert np.isnan(np.frombuffer(message.logprobs_f32le, "<f4")).all()


@pytest.mark.parametrize("chunk", [0, 1])
async def test_tokens_of_a_restarted_server_never_leave_the_engine(
    server: StandIn, chunk: int
) -> None:
    async with attached(server) as backend:
        server.name = "default"  # as after a restart
        messages: list[Any] = []
        with pytest.raises((EngineDeadError, EngineFaultError)):
            messages += await sampled(backend, chunk)
        assert messages == []
        await asyncio.wait_for(backend.died.wait(), 20)
        assert "restart the engine to attach again" in backend.death
        with pytest.raises(EngineDeadError):
            await sampled(backend)


async def test_a_silent_server_ends_its_answers_and_the_engine(server: StandIn) -> None:
    async with attached(server, attach_timeout_ms=3000) as backend:
        server.holds = True
        server.silent = {"/weight_info"}
        with pytest.raises(EngineDeadError):
            await sampled(backend)
        await asyncio.wait_for(backend.died.wait(), 120)
        assert "did not answer /weight_info in 3 s" in backend.death


async def test_leaving_an_answer_closes_its_connection(server: StandIn) -> None:
    async with attached(server) as backend:
        server.holds = True
        async with aclosing(backend.generate(asked(backend))) as messages:
            await anext(messages)
            assert backend.load().running == 1
        assert backend.load().running == 0
        await until(lambda: server.gone)


@pytest.mark.parametrize(
    ("path", "name", "value", "says"),
    [
        ("model_config", "logprobs_mode", "processed_logprobs", "--logprobs-mode"),
        ("model_config", "multimodal_config", {"limit": 1}, "takes images"),
        ("model_config", "max_model_len", 16, "max_context_tokens: is 32"),
    ],
)
async def test_a_server_that_does_not_fit_is_refused_by_the_setting(
    server: StandIn, path: str, name: str, value: Any, says: str
) -> None:
    server.info["vllm_config"][path][name] = value
    with pytest.raises(EngineStartError, match=says):
        async with attached(server, max_context_tokens=32):
            pass


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/server_info", 404, "VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/generate", 403, "Scale-out endpoints are disabled"),
        ("/inference/v1/generate", 401, "401"),
    ],
)
async def test_a_server_without_the_routes_is_refused_with_the_remedy(
    server: StandIn, path: str, status: int, says: str
) -> None:
    server.status = {path: status}
    with pytest.raises(EngineStartError, match=says):
        async with attached(server):
            pass


@pytest.mark.parametrize("name", ["step-seven", "rollmesh-0a1b2c3d-none"])
async def test_weights_whose_version_is_unknown_are_refused(server: StandIn, name: str) -> None:
    server.name = name
    with pytest.raises(EngineStartError, match="tells no policy version"):
        async with attached(server):
            pass


async def test_what_the_server_cannot_do_is_refused_by_its_field(
    server: StandIn, tmp_path: Path
) -> None:
    async with attached(server) as backend:
        with pytest.raises(InvalidFieldError, match="header: the attached server takes no weights"):
            await backend.check_weights(tmp_path)
        with pytest.raises(InvalidFieldError, match="level: the attached server cannot sleep"):
            backend.check_sleep()
        with pytest.raises(InvalidFieldError, match="banned_token_ids: is not sent"):
            await anext(backend.generate(asked(backend, banned_token_ids=[5])))
        with pytest.raises(InvalidFieldError, match="--max-logprobs=21"):
            await anext(backend.generate(asked(backend, top_logprobs=20)))
        ids = np.array([5, 6], "<u4").tobytes()
        score = engine_pb2.ScoreTokensRequest(request_id="s", token_ids_u32le=ids, top_k=21)
        with pytest.raises(InvalidFieldError, match="top_k: needs a server"):
            await backend.score(read_score(score, backend.limits))


async def test_a_failed_request_is_told_from_a_dead_model(server: StandIn) -> None:
    async with attached(server) as backend:
        server.status = {"/inference/v1/generate": 500}
        with pytest.raises(RollmeshError, match="see its log") as caught:
            await sampled(backend)
        assert not isinstance(caught.value, EngineDeadError)
        server.status["/health"] = 503
        with pytest.raises(EngineDeadError, match="model died"):
            await sampled(backend)


async def test_requests_that_a_pause_holds_are_aborted_here(server: StandIn) -> None:
    async with attached(server) as backend:
        await backend.pause(engine_pb2.PAUSE_MODE_KEEP)
        before = server.calls.count("/inference/v1/generate")
        waiting = asyncio.ensure_future(sampled(backend))
        await until(lambda: backend.load().running == 1)
        await backend.abort(["r"])
        (message,) = await waiting
        assert message.finish.reason == sampling_pb2.FINISH_REASON_ABORT
        assert server.calls.count("/inference/v1/generate") == before
        await backend.resume()
        assert len(await sampled(backend, 0)) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attach": "http://a", "backend": "scripted"}, "attach: is not for the backend scripted"),
        ({"backend": "vllm-http"}, "attach: is empty"),
        ({"attach": "127.0.0.1:8000"}, "attach: is no URL"),
        ({"attach": "http://a", "max_adapters": 1}, "max_adapters: adapters are not loaded"),
        ({"attach": "http://a", "vllm": {"a": 1}}, "vllm: the attached server was started"),
        ({"attach": "http://a", "attach_key_file": "/no/file"}, "attach_key_file: .*cannot be"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_backend(EngineConfig(**settings))


async def test_a_fence_ends_the_answers_in_progress(server: StandIn) -> None:
    async with attached(server) as backend:
        server.holds = True
        messages: list[Any] = []

        async def take() -> None:
            async with aclosing(backend.generate(asked(backend))) as answer:
                async for one in answer:
                    messages.append(one)
                    server.name = "default"

        with pytest.raises(EngineDeadError, match="restart the engine to attach again"):
            await asyncio.wait_for(take(), 20)
        assert not backend.died.is_set()  # the caller is told before
        await asyncio.wait_for(backend.died.wait(), 20)
        assert len(messages) == 1


async def test_a_second_engine_on_one_server_ends_the_first(server: StandIn) -> None:
    async with attached(server) as first, attached(server) as second:
        await asyncio.wait_for(first.died.wait(), 20)
        assert "another process changed them" in first.death
        assert await sampled(second)


async def test_the_key_of_the_server_comes_from_a_file(server: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    async with attached(server, attach_key_file=str(file)):
        assert server.keys == {"Bearer secret"}


async def test_a_paused_server_is_resumed_by_the_engine_that_attaches(server: StandIn) -> None:
    async with attached(server):
        assert "/resume" in server.calls
