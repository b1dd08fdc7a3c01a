"""The backends vllm-http and sglang with stand-ins for servers, which lie and fall silent."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.engine import EngineConfig, make_backend, read_generate, read_score
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

from rollmesh.engine import SglangAnswer

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

    generate_path = "/inference/v1/generate"
    name_path = "/weight_info"
    alive_path = "/health"
    resume_path = "/resume"

    def __init__(self) -> None:
        self.info = description()
        self.name = "default"
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        """Of the calls, None where there is none."""
        self.keys: set[str | None] = set()
        self.status: dict[str, int] = {}
        self.silent: set[str] = set()
        self.choice: dict[str, Any] = {}
        """Fields that replace those of an answer."""
        self.raw: bytes | None = None
        """What comes in place of an answer."""
        self.gone: list[str] = []
        """One entry for each client that left an answer."""
        self.holds = False
        """Whether an answer begins and does not go on."""
        self.held_at = 0
        """Index of its last token then."""
        self.url = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        self.bodies.append(await request.json() if request.can_read_body else None)
        self.keys.add(request.headers.get("authorization"))
        if path in self.silent:
            await asyncio.sleep(3600)
        if status := self.status.get(path):
            body = {"error": {"message": "Scale-out endpoints are disabled", "code": status}}
            return web.json_response(body, status=status)
        return await self._answered(request)

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        match request.path:
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
        params = body["sampling_params"]
        count = min(params.get("max_tokens", params.get("max_new_tokens")), len(IDS))
        if not body.get("stream"):
            return web.json_response(self._whole(body, count))
        response = web.StreamResponse()
        response.force_close()  # the next request has another connection, as after a restart
        await response.prepare(request)
        try:
            for at in range(count):
                part = self._part(body, at, count)
                await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                while self.holds and at == self.held_at and not self.gone:
                    await asyncio.sleep(0.01)
                    await response.write(b": keep-alive\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.gone.append("")
            raise
        return response

    def _whole(self, body: Any, count: int) -> dict[str, Any]:
        return self._answer(IDS[:count], ends=True)

    def _part(self, body: Any, at: int, count: int) -> dict[str, Any]:
        return self._answer(IDS[at : at + 1], ends=at + 1 == count, first=at)

    def _answer(self, ids: list[int], *, ends: bool, first: int = 0) -> dict[str, Any]:
        content = [{"token_id": one, "logprob": -0.5, "top_logprobs": []} for one in ids]
        spans = [{"version": self.name, "start": 0, "end": first + len(ids)}]
        choice = {
            "index": 0, "token_ids": ids, "logprobs": {"content": content}, "stop_reason": None,
            "finish_reason": "length" if ends else None, "weight_versions": spans if ends else None,
        }  # fmt: skip
        return {"choices": [choice | self.choice]}


class SglangStandIn(StandIn):
    """The routes of an SGLang server that a test changes. Its answers have the fields of 0.5.23."""

    generate_path = "/generate"
    name_path = alive_path = "/server_info"
    resume_path = "/continue_generation"

    def __init__(self) -> None:
        super().__init__()
        self.info = {
            "model_path": "nowhere", "max_req_input_len": 65, "device": "cuda", "dtype": "float32",
            "version": "0.5.23", "kv_cache_dtype": "auto", "quantization": None, "tp_size": 1,
            "pp_size": 1, "dp_size": 1, "ep_size": 1, "attention_backend": "fa3",
            "speculative_algorithm": None, "enable_memory_saver": False,
            "enable_weights_cpu_backup": False, "enable_deterministic_inference": False,
            "disaggregation_mode": "null",
        }  # fmt: skip
        self.model = {
            "is_generation": True, "has_image_understanding": False,
            "has_audio_understanding": False,
        }  # fmt: skip
        self.scales = False
        """Whether the temperature changes log-probabilities."""
        self.incremental = True

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        body = self.bodies[-1]
        match request.path:
            case "/server_info":
                state = {"weight_version": self.name, "effective_max_running_requests_per_dp": 8}
                return web.json_response(self.info | {"internal_states": [state]})
            case "/model_info":
                return web.json_response(self.model)
            case "/update_weight_version":
                self.name = body["new_version"]
            case "/generate":
                return await self._generate(request)
            case "/release_memory_occupation" | "/resume_memory_occupation":
                return web.json_response(None)
            case "/flush_cache":
                return web.Response(text="Cache flushed.")
        return web.json_response({"success": True})

    def _whole(self, body: Any, count: int) -> dict[str, Any]:
        return self.event(body, 0, count, ends=True)

    def _part(self, body: Any, at: int, count: int) -> dict[str, Any]:
        return self.event(body, at if self.incremental else 0, at + 1, ends=at + 1 == count)

    def event(self, body: Any, start: int, end: int, *, ends: bool) -> dict[str, Any]:
        ids = IDS[start:end]
        value = -0.5 / (body["sampling_params"]["temperature"] if self.scales else 1)
        meta: dict[str, Any] = {
            "completion_tokens": end, "prompt_tokens": len(body["input_ids"]), "cached_tokens": 1,
            "output_token_logprobs": [[value, one, None] for one in ids],
            "output_top_logprobs": [[[value, one, None]] for one in ids],
            "finish_reason": {"type": "length", "length": end} if ends else None,
        }  # fmt: skip
        if ends:
            meta["weight_versions"] = [{"version": self.name, "start": 0, "end": end}]
        return {"output_ids": ids, "meta_info": meta | self.choice}


@asynccontextmanager
async def served(stand_in: StandIn) -> AsyncIterator[StandIn]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stand_in.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stand_in.url = site.name.replace(":0", f":{runner.addresses[0][1]}")
    yield stand_in
    await runner.cleanup()


@pytest.fixture
async def vllm() -> AsyncIterator[StandIn]:
    async with served(StandIn()) as stand_in:
        yield stand_in


@pytest.fixture
async def sglang() -> AsyncIterator[SglangStandIn]:
    async with served(stand_in := SglangStandIn()):
        yield stand_in


@pytest.fixture(params=[StandIn, SglangStandIn])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[StandIn]:
    async with served(request.param()) as stand_in:
        yield stand_in


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
    vllm: StandIn, choice: dict[str, Any], says: str
) -> None:
    async with attached(vllm) as backend:
        vllm.choice = choice
        with pytest.raises(EngineFaultError, match=says):
            await sampled(backend, 0)
        vllm.choice = {}
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


async def test_an_id_outside_of_the_vocabulary_is_a_fault(vllm: StandIn) -> None:
    async with attached(vllm) as backend:
        entry = {"token_id": VOCABULARY, "logprob": -1.0, "top_logprobs": []}
        vllm.choice = {"token_ids": [VOCABULARY], "logprobs": {"content": [entry]}}
        with pytest.raises(EngineFaultError, match="is no id"):
            await sampled(backend)


async def test_a_number_that_json_has_no_word_for_is_kept_as_not_finite(vllm: StandIn) -> None:
    async with attached(vllm) as backend:
        entries = [{"token_id": one, "logprob": -9999.0, "top_logprobs": []} for one in IDS]
        vllm.choice = {"logprobs": {"content": entries}}
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
        server.silent = {server.name_path}
        with pytest.raises(EngineDeadError):
            await sampled(backend)
        await asyncio.wait_for(backend.died.wait(), 120)
        assert f"did not answer {server.name_path} in 3 s" in backend.death


async def test_leaving_an_answer_closes_its_connection(server: StandIn) -> None:
    async with attached(server) as backend:
        server.holds = True
        async with aclosing(backend.generate(asked(backend))) as messages:
            await anext(messages)
            assert backend.load().running == 1
        assert backend.load().running == 0
        await until(lambda: server.gone)


async def test_collected_tokens_of_a_server_that_stands_still_are_passed_on_in_time(
    server: StandIn,
) -> None:
    server.held_at = 1
    async with attached(server) as backend:
        server.holds = True
        request = dataclasses.replace(asked(backend, 8), collect_ms=100)
        async with asyncio.timeout(20), aclosing(backend.generate(request)) as messages:
            ids = [(await anext(messages)).token_ids_u32le for _ in range(2)]
            assert [np.frombuffer(one, "<u4").tolist() for one in ids] == [[11], [12]]
            server.holds = False
            last = await anext(messages)
        assert last.HasField("finish")


@pytest.mark.parametrize(
    ("path", "name", "value", "says"),
    [
        ("model_config", "logprobs_mode", "processed_logprobs", "--logprobs-mode"),
        ("model_config", "multimodal_config", {"limit": 1}, "takes images"),
        ("model_config", "max_model_len", 16, "max_context_tokens: is 32"),
    ],
)
async def test_a_server_that_does_not_fit_is_refused_by_the_setting(
    vllm: StandIn, path: str, name: str, value: Any, says: str
) -> None:
    vllm.info["vllm_config"][path][name] = value
    with pytest.raises(EngineStartError, match=says):
        async with attached(vllm, max_context_tokens=32):
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
    vllm: StandIn, path: str, status: int, says: str
) -> None:
    vllm.status = {path: status}
    with pytest.raises(EngineStartError, match=says):
        async with attached(vllm):
            pass


@pytest.mark.parametrize("name", ["step-seven", "rollmesh-0a1b2c3d-none"])
async def test_weights_whose_version_is_unknown_are_refused(server: StandIn, name: str) -> None:
    server.name = name
    with pytest.raises(EngineStartError, match="tells no policy version"):
        async with attached(server):
            pass


async def test_a_wish_beyond_the_server_is_refused_by_its_field(
    vllm: StandIn, tmp_path: Path
) -> None:
    async with attached(vllm) as backend:
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
        server.status = {server.generate_path: 500}
        with pytest.raises(RollmeshError, match="see its log") as caught:
            await sampled(backend)
        assert not isinstance(caught.value, EngineDeadError)
        server.status[server.alive_path] = 503
        with pytest.raises(EngineDeadError, match="model died"):
            await sampled(backend)


async def test_requests_that_a_pause_holds_are_aborted_here(server: StandIn) -> None:
    async with attached(server) as backend:
        await backend.pause(engine_pb2.PAUSE_MODE_KEEP)
        before = server.calls.count(server.generate_path)
        waiting = asyncio.ensure_future(sampled(backend))
        await until(lambda: backend.load().running == 1)
        await backend.abort(["r"])
        (message,) = await waiting
        assert message.finish.reason == sampling_pb2.FINISH_REASON_ABORT
        assert server.calls.count(server.generate_path) == before
        await backend.resume()
        assert len(await sampled(backend, 0)) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attach": "http://a", "backend": "scripted"}, "attach: is not for the backend scripted"),
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
        assert server.resume_path in server.calls


# What only SGLang does.


@pytest.mark.parametrize("incremental", [True, False])
async def test_messages_have_new_tokens_whether_events_have_all_or_not(
    sglang: SglangStandIn, incremental: bool
) -> None:
    sglang.incremental = incremental
    async with attached(sglang) as backend:
        messages = await sampled(backend)
        ids = [np.frombuffer(one.token_ids_u32le, "<u4").tolist() for one in messages]
        assert ids == [[one] for one in IDS]
        assert messages[-1].finish.cached_tokens == 1


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"completion_tokens": 4}, "4 ids are new of 3"),
        ({"completion_tokens": 2}, "do not cover"),
        ({"output_token_logprobs": []}, "3 ids are new of 3"),
        ({"output_token_logprobs": None}, "malformed"),
        ({"output_token_logprobs": [[-1.0, 99, None]] * 3}, "belongs to another id"),
        ({"output_token_logprobs": [["x", 11, None]] * 3}, "malformed"),
        ({"finish_reason": {"type": "error"}}, "malformed"),
        ({"finish_reason": None}, "without a finish reason"),
        ({"finish_reason": {"type": "stop", "matched": 12}}, "stop token"),
        ({"weight_versions": []}, "do not cover"),
        ({"weight_versions": [{"version": "other", "start": 0, "end": 3}]}, "sampled with weights"),
        ({"prompt_tokens": 1}, "received 1 prompt ids"),
    ],
)
async def test_an_answer_of_sglang_that_cannot_be_right_is_a_fault(
    sglang: SglangStandIn, meta: dict[str, Any], says: str
) -> None:
    async with attached(sglang) as backend:
        sglang.choice = meta
        with pytest.raises(EngineFaultError, match=says):
            await sampled(backend, 0)


async def test_a_log_probability_that_json_has_no_word_for_is_not_finite(
    sglang: SglangStandIn,
) -> None:
    async with attached(sglang) as backend:
        sglang.choice = {"output_token_logprobs": [[None, one, None] for one in IDS]}
        (message,) = await sampled(backend, 0)
        assert np.isnan(np.frombuffer(message.logprobs_f32le, "<f4")).all()


async def test_an_event_that_repeats_the_last_token_adds_none(sglang: SglangStandIn) -> None:
    """As an abort of a request in SGLang's queue does, with the log-probs of all tokens."""
    async with attached(sglang) as backend:
        answer = SglangAnswer(asked(backend, 0), VOCABULARY, lambda _: 0)
        body = {"input_ids": [5, 6], "sampling_params": {"temperature": 1.0}}
        for at in range(2):
            answer.add(sglang.event(body, at, at + 1, ends=False))
        last = sglang.event(body, 0, 2, ends=True)
        last["output_ids"] = last["output_ids"][-1:]
        del last["meta_info"]["prompt_tokens"]
        answer.add(last)
        (message,) = answer.messages(0)
        assert np.frombuffer(message.token_ids_u32le, "<u4").tolist() == IDS[:2]


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (lambda one: setattr(one, "scales", True), {}, "with SGLANG_RETURN_ORIGINAL_LOGPROB=1"),
        (lambda _: None, {"logprobs": "sampled"}, "without SGLANG_RETURN_ORIGINAL_LOGPROB=1"),
        (lambda one: one.choice.update(weight_versions=None), {}, "malformed|versions"),
        (lambda one: one.model.update(is_generation=False), {}, "generates alone"),
        (lambda one: one.model.update(has_image_understanding=True), {}, "takes images"),
        (lambda one: one.info.pop("dtype"), {}, "lacks 'dtype'; it is another release than 0.5.23"),
        (lambda _: None, {"max_context_tokens": 65}, "max_context_tokens: is 65, .* has 64"),
        (lambda _: None, {"weight_transfer": "nccl"}, "weight_transfer: is 'nccl'"),
    ],
)
async def test_an_sglang_server_that_does_not_fit_is_refused(
    sglang: SglangStandIn, change: Any, settings: dict[str, Any], says: str
) -> None:
    change(sglang)
    with pytest.raises(EngineStartError, match=says):
        async with attached(sglang, **settings):
            pass


async def test_a_temperature_at_which_vllm_does_not_sample_is_refused_with_sampled_log_probs(
    vllm: StandIn,
) -> None:
    for mode, refuses in (("raw", False), ("processed", True)):
        vllm.info["vllm_config"]["model_config"]["logprobs_mode"] = f"{mode}_logprobs"
        async with attached(vllm, logprobs="sampled" if refuses else "raw") as backend:
            request = asked(backend)
            request.generate.sampling.temperature = 0.001
            with pytest.raises(InvalidFieldError) if refuses else nullcontext():
                assert [one async for one in backend.generate(request)]


async def test_sampled_log_probs_refuse_truncation_and_seeds(sglang: SglangStandIn) -> None:
    sglang.scales = True
    async with attached(sglang, logprobs="sampled") as backend:
        for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("seed", 7)):
            request = asked(backend)
            setattr(request.generate.sampling, name, value)
            with pytest.raises(InvalidFieldError, match=rf"sampling\.{name}: "):
                await anext(backend.generate(request))
        request = asked(backend)
        request.generate.sampling.presence_penalty = 1.0
        assert [one async for one in backend.generate(request)]


async def test_pauses_and_aborts_leave_other_clients_alone(sglang: SglangStandIn) -> None:
    async with attached(sglang) as backend:
        sglang.holds = True
        messages = backend.generate(asked(backend))
        await anext(messages)
        rid = next(one["rid"] for one in reversed(sglang.bodies) if one and "rid" in one)
        before = len(sglang.calls)
        await backend.pause(engine_pb2.PAUSE_MODE_KEEP)
        await backend.abort(["r"])
        await backend.resume()
        await messages.aclose()
        done = list(zip(sglang.calls, sglang.bodies, strict=True))[before:]
        done = [one for one in done if one[0] != "/server_info"]
        assert done[:4] == [
            ("/pause_generation", {"mode": "in_place"}),
            ("/pause_generation", {"mode": "retract"}),
            ("/abort_request", {"rid": rid}),
            ("/continue_generation", {}),
        ]
        assert done[-1] == ("/abort_request", {"rid": rid})
        renames = [one for one in sglang.bodies if one and "new_version" in one]
        assert not any(one["abort_all_requests"] for one in renames)


async def test_no_id_of_a_request_begins_with_another(sglang: SglangStandIn) -> None:
    """SGLang aborts every request whose id begins with the given one."""
    async with attached(sglang) as backend:
        for id_ in ("r", "r1", "r1-1", "1-r"):
            request = asked(backend)
            request.generate.request_id = id_
            assert [one async for one in backend.generate(request)]
        ids = [one["rid"] for one in sglang.bodies if one and "rid" in one]
        assert not any(a != b and b.startswith(a) for a in ids for b in ids)


async def test_a_sleeping_sglang_server_says_so_by_the_name_of_its_weights(
    sglang: SglangStandIn,
) -> None:
    sglang.info["enable_memory_saver"] = True
    async with attached(sglang) as backend:
        await backend.sleep(1)
        assert sglang.bodies[sglang.calls.index("/release_memory_occupation")] == {
            "tags": ["kv_cache"]
        }
        assert sglang.name.endswith("-none")
        await backend.wake_up()
        assert sglang.name.endswith("-0")
        assert await sampled(backend)
