"""What agents get when a request is refused or fails, through the published SDK."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from rollmesh.runtime import errors
from rollmesh.sidecar import SidecarConfig
from tests.sidecar.scripted_gateway import (
    KEY,
    SESSION,
    ScriptedGateway,
    answering,
    failing,
    hanging,
    serving,
    sidecar_of,
    text,
    waiting,
)

ASK: list[Any] = [{"role": "user", "content": "What is 6 x 7?"}]
TOO_LONG = (
    "This model's maximum context length is 8192 tokens. However, your messages resulted in "
    "9000 tokens. Please reduce the length of the messages."
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("error", "kind", "status", "code", "param"),
    [
        pytest.param(
            errors.SessionUnknownError("session_id: is unknown"),
            openai.NotFoundError, 404, "session_unknown", None, id="unknown session",
        ),
        pytest.param(
            errors.SessionClosedError("the session is closed"),
            openai.ConflictError, 409, "session_closed", None, id="closed session",
        ),
        pytest.param(
            errors.SessionKeyWrongError("the key does not open this session"),
            openai.AuthenticationError, 401, "session_key_wrong", None, id="wrong key",
        ),
        pytest.param(
            errors.InvalidMessagesError("messages[1].role", "is not set"),
            openai.BadRequestError, 400, "invalid_messages", "messages[1].role", id="messages",
        ),
        pytest.param(
            errors.InvalidSamplingError("sampling.max_tokens", "is 0"),
            openai.BadRequestError, 400, "invalid_sampling", "max_tokens", id="sampling",
        ),
        pytest.param(
            errors.ContextLengthExceededError("messages", TOO_LONG),
            openai.BadRequestError, 400, "context_length_exceeded", "messages", id="too long",
        ),
        pytest.param(
            errors.EnginesBusyError("all engines are full", retry_delay_ms=2500),
            openai.RateLimitError, 429, "engines_busy", None, id="busy",
        ),
        pytest.param(
            errors.NoEngineError("there is no engine"),
            openai.InternalServerError, 503, "no_engine", None, id="no engine",
        ),
        pytest.param(
            errors.GenerationAbortedError("aborted"),
            openai.InternalServerError, 503, "generation_aborted", None, id="aborted",
        ),
        pytest.param(
            errors.DeadlineError("too late"),
            openai.InternalServerError, 504, "deadline", None, id="deadline",
        ),
        pytest.param(
            errors.RoleRefusedError("an engine"),
            openai.InternalServerError, 503, "role_refused", None, id="the sidecar's role",
        ),
        pytest.param(
            errors.CallerUnknownError("no token"),
            openai.InternalServerError, 503, "caller_unknown", None, id="the sidecar's token",
        ),
        pytest.param(
            RuntimeError("a secret"),
            openai.InternalServerError, 500, "internal", None, id="unexpected",
        ),
    ],
)  # fmt: skip
async def test_every_error_has_its_status_type_code_and_param(  # noqa: PLR0913 - a table's columns
    gateway: ScriptedGateway,
    client: AsyncOpenAI,
    *,
    error: Exception,
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    gateway.script = failing(error)
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(model="m", messages=ASK, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.param == param
    assert caught.value.request_id == gateway.request_ids[0]
    assert "a secret" not in caught.value.message


async def test_backpressure_says_when_to_come_back_and_a_conflict_that_it_is_useless(
    gateway: ScriptedGateway, base_url: str
) -> None:
    path = f"{base_url}/sessions/{KEY}/v1/chat/completions"
    body = {"messages": ASK}
    async with httpx2.AsyncClient(timeout=60) as http:
        gateway.script = failing(errors.EnginesBusyError("full", retry_delay_ms=2500))
        assert (await http.post(path, json=body)).headers["retry-after"] == "3"
        gateway.script = failing(errors.EngineLostError("lost"))
        assert (await http.post(path, json=body)).headers["retry-after"] == "1"
        gateway.script = failing(errors.EnginesBusyError("full", retry_delay_ms=999_000))
        assert (await http.post(path, json=body)).headers["retry-after"] == "120"
        gateway.script = failing(errors.SessionClosedError("closed"))
        assert (await http.post(path, json=body)).headers["x-should-retry"] == "false"


async def test_the_sdks_retries_carry_their_count(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = failing(errors.NoEngineError("none yet", retry_delay_ms=1))
    patient = client.with_options(max_retries=1)
    with pytest.raises(openai.InternalServerError):
        await patient.chat.completions.create(
            model="m", messages=ASK, extra_headers={"Idempotency-Key": "once"}
        )
    assert [request.retry_count for request in gateway.requests] == [0, 1]
    assert {request.idempotency_key for request in gateway.requests} == {"once"}
    first, second = gateway.requests
    assert first.call_id != second.call_id
    second.retry_count, second.call_id = 0, first.call_id
    assert first == second


class Hasty(httpx2.AsyncHTTPTransport):
    """Times out as soon as the gateway has the request, however long that takes."""

    def __init__(self, reached: asyncio.Event) -> None:
        super().__init__()
        self._reached = reached

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        asking = asyncio.ensure_future(super().handle_async_request(request))
        await self._reached.wait()
        self._reached.clear()
        asking.cancel()
        await asyncio.wait([asking])
        raise httpx2.ReadTimeout("as the test wants it", request=request)


async def test_a_client_timeout_ends_the_call_and_the_retry_says_so(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script, reached = hanging()
    async with httpx2.AsyncClient(transport=Hasty(reached), timeout=60) as http:
        hasty = client.with_options(max_retries=1, http_client=http)
        with pytest.raises(openai.APITimeoutError):
            await hasty.chat.completions.create(model="m", messages=ASK)
    assert [request.retry_count for request in gateway.requests] == [0, 1]
    async with asyncio.timeout(60):
        await gateway.cancelled.wait()


@pytest.mark.parametrize(
    ("before", "body"),
    [
        pytest.param([text("half")], {"stream": True}, id="in the middle of a stream"),
        pytest.param([], {"stream": True}, id="before the first delta"),
        pytest.param([], {}, id="while a whole answer is made"),
        pytest.param([], {"n": 3}, id="while several choices are made"),
    ],
)
async def test_a_client_that_leaves_cancels_the_gateways_call_at_once(
    gateway: ScriptedGateway, base_url: str, before: list[Any], body: dict[str, Any]
) -> None:
    gateway.script, reached = hanging(*before)
    path = f"{base_url}/sessions/{KEY}/v1/chat/completions"
    async with (
        asyncio.timeout(60),
        httpx2.AsyncClient(timeout=60) as http,
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(http.post(path, json={"messages": ASK, **body}))
        await reached.wait()
        asked.cancel()
    async with asyncio.timeout(60):
        await gateway.cancelled.wait()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_fails_makes_the_sdk_raise(
    gateway: ScriptedGateway, client: AsyncOpenAI, n: int
) -> None:
    gateway.script = failing(errors.EngineLostError("the engine is gone"), text("half an ans"))
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True, n=n)
    with pytest.raises(openai.APIError, match="the engine is gone") as caught:
        [chunk async for chunk in stream]
    assert caught.value.code == "engine_lost"


async def test_a_stream_that_fails_is_cut_off_without_a_proper_end(
    gateway: ScriptedGateway, base_url: str
) -> None:
    gateway.script = failing(errors.EngineLostError("the engine is gone"), text("half an ans"))
    body = {"messages": ASK, "stream": True}
    path = f"{base_url}/sessions/{KEY}/v1/chat/completions"
    lines: list[str] = []
    async with (
        httpx2.AsyncClient(timeout=60) as http,
        http.stream("POST", path, json=body) as answer,
    ):
        with pytest.raises(httpx2.RemoteProtocolError):  # noqa: PT012 - the lines before count
            async for line in answer.aiter_lines():
                lines.append(line)  # noqa: PERF401 - extend would lose them
    assert "data: [DONE]" not in lines
    assert [line for line in lines if line][-1].startswith('data: {"error":')


async def test_a_turn_over_its_time_limit_ends_with_504(gateway: ScriptedGateway) -> None:
    gateway.script = waiting(asyncio.Event().wait, [], [])
    async with serving(gateway) as address:
        config = SidecarConfig(gateway=address, turn_timeout_ms=100)
        async with sidecar_of(config) as url, httpx2.AsyncClient(timeout=60) as http:
            path = f"{url}/sessions/{KEY}/v1/chat/completions"
            answer = await http.post(path, json={"messages": ASK})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_gateway_that_is_down_is_503_with_a_delay() -> None:
    config = SidecarConfig(gateway="127.0.0.1:1")
    async with sidecar_of(config) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        asked = await http.post(f"/sessions/{KEY}/v1/chat/completions", json={"messages": ASK})
        health = await http.get("/healthz")
    assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
    assert health.status_code == 503


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        pytest.param("/v1", {"authorization": f"Bearer {KEY}"}, (SESSION, KEY), id="key names it"),
        pytest.param("/v1", {"AUTHORIZATION": f"bearer {KEY}"}, (SESSION, KEY), id="any case"),
        pytest.param("/v1", {"X-Api-Key": KEY}, (SESSION, KEY), id="x-api-key"),
        pytest.param("/v1", {"authorization": "Bearer static"}, None, id="static key, no path"),
        pytest.param("/v1", {}, None, id="no key, no path"),
        pytest.param("/v1", {"authorization": "Bearer rmk-"}, ("", "rmk-"), id="half a key"),
        pytest.param(f"/sessions/{KEY}/v1", {}, (SESSION, KEY), id="key in the path"),
        pytest.param(
            f"/sessions/{KEY}/v1",
            {"authorization": "Bearer static"},
            (SESSION, KEY),
            id="key in the path, some token",
        ),
        pytest.param(
            f"/sessions/{KEY}/v1",
            {"authorization": f"Bearer {KEY}"},
            (SESSION, KEY),
            id="key in the path and as token",
        ),
        pytest.param(
            f"/sessions/{KEY}/v1",
            {"authorization": "Bearer rmk-abc-other"},
            None,
            id="keys of two sessions",
        ),
        pytest.param("/sessions/abc/v1", {}, None, id="id in the path"),
        pytest.param(
            "/sessions/abc/v1", {"authorization": "Bearer static"}, None, id="id, some token"
        ),
        pytest.param(
            "/sessions/abc/v1", {"authorization": f"Bearer {KEY}"}, ("abc", KEY), id="id, key"
        ),
    ],
)
async def test_a_session_is_named_by_path_or_by_key(
    gateway: ScriptedGateway,
    base_url: str,
    path: str,
    headers: dict[str, str],
    expected: tuple[str, str] | None,
) -> None:
    async with httpx2.AsyncClient(base_url=base_url, timeout=60) as http:
        answer = await http.post(
            f"{path}/chat/completions", json={"messages": ASK}, headers=headers
        )
    if expected is None:
        assert (answer.status_code, gateway.requests) == (401, [])
    else:
        asked = gateway.requests[0]
        assert (asked.session_id, asked.session_key) == expected


@pytest.mark.parametrize("more", [{"n": "n" * 100_000}, {"messages": [{"role": "r" * 100_000}]}])
async def test_an_error_repeats_little_of_the_request(base_url: str, more: dict[str, Any]) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        path = f"{base_url}/sessions/{KEY}/v1/chat/completions"
        answer = await http.post(path, json={"messages": ASK, **more})
    assert answer.status_code == 400
    assert len(answer.content) < 2000


@pytest.mark.parametrize("model", ["m" * 257, 5, ["m"]])
async def test_a_model_that_is_no_name_is_refused(
    gateway: ScriptedGateway, base_url: str, model: Any
) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        path = f"{base_url}/sessions/{KEY}/v1/chat/completions"
        answer = await http.post(path, json={"messages": ASK, "model": model})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert gateway.requests == []


@pytest.mark.parametrize("before", [[], [text("half an ans")]], ids=["nothing", "a beginning"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_without_an_end_is_an_error(
    gateway: ScriptedGateway, client: AsyncOpenAI, before: list[Any], *, stream: bool
) -> None:
    gateway.script = answering(*before)

    async def take() -> None:
        answer: Any = await client.chat.completions.create(
            model="policy", messages=ASK, stream=stream
        )
        async for _ in answer:
            pass

    with pytest.raises(openai.APIError, match="without its final message"):
        await take()
