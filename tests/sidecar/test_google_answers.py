"""What agents get, through the published SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import orjson
import pytest

from rollmesh.runtime import errors
from rollmesh.sidecar import SidecarConfig, protocol_of, sealed_answer
from rollmesh.v1 import gateway_pb2, sampling_pb2
from tests.lazily import genai
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    answering,
    call,
    call_piece,
    done,
    failing,
    serving,
    sidecar_of,
    text,
    waiting,
)

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
ASK: Any = {"contents": [{"role": "user", "parts": [{"text": "What is 6 x 7?"}]}]}
SHOWN: Any = {"thinking_config": {"include_thoughts": True}}
ARGUMENTS = '{"a": 6,  "b":7.0, "c": 1E2}'
CALLS = [call("call00Ab1", "calculator", ARGUMENTS), call("call01Ab1", "clock", "")]
FULL = done(" So. ", calls=CALLS, reasoning="\n I think. \n")


@pytest.fixture
async def agent(base_url: str) -> AsyncIterator[Any]:
    options: Any = {"base_url": f"{base_url}/sessions/{KEY}"}
    async with genai.Client(api_key="static", http_options=options).aio as client:
        yield client


async def ask(agent: Any, **config: Any) -> list[Any]:
    answer = await agent.models.generate_content(model="any-name", config=config, **ASK)
    return [answer]


async def streamed(agent: Any, **config: Any) -> list[Any]:
    """The chunks of an answer."""
    stream = await agent.models.generate_content_stream(model="any-name", config=config, **ASK)
    return [chunk async for chunk in stream]


both = pytest.mark.parametrize("form", [ask, streamed])


async def test_googles_sdk_lists_the_models_and_finds_one_by_its_name(
    agent: Any, base_url: str
) -> None:
    (listed,) = [model async for model in await agent.models.list()]
    found = await agent.models.get(model="policy")
    assert listed == found
    assert (found.name, found.display_name) == ("models/policy", "policy")
    assert found.supported_actions == ["generateContent", "countTokens"]
    with pytest.raises(genai.errors.ClientError, match="does not exist"):
        await agent.models.get(model="another")
    async with httpx2.AsyncClient(base_url=base_url) as http:
        (same,) = (await http.get("/v1beta/models")).json()["models"]
        assert same == (await http.get("/v1beta/models/policy")).json()
        assert same["name"] == "models/policy"
        error = (await http.get("/v1beta/models/another")).json()["error"]
        assert (error["code"], error["status"]) == (404, "NOT_FOUND")


def url_of(base_url: str, method: str = "streamGenerateContent?alt=sse") -> str:
    return f"{base_url}/sessions/{KEY}/v1beta/models/any-name:{method}"


def parts(answer: list[Any]) -> list[dict[str, Any]]:
    return [
        part.model_dump(exclude_none=True)
        for chunk in answer
        for part in chunk.candidates[0].content.parts
    ]


def thought(said: str) -> gateway_pb2.StreamChatResponse:
    return gateway_pb2.StreamChatResponse(delta=gateway_pb2.ChatDelta(reasoning_content=said))


def signer(part: dict[str, Any]) -> str:
    """The answer that the signature of a part names."""
    return sealed_answer(KEY, part["thought_signature"].decode(), "\n I think. \n")


async def test_a_whole_answer_has_every_field_of_the_sdk(
    gateway: ScriptedGateway, agent: Any
) -> None:
    gateway.script = answering(FULL)
    (answer,) = await ask(agent, **SHOWN)
    assert (answer.response_id, answer.model_version) == ("chatcmpl-answer-1", "any-name")
    (candidate,) = answer.candidates
    assert (candidate.index, candidate.finish_reason, candidate.content.role) == (
        0,
        "STOP",
        "model",
    )
    thinking, said, *calls = parts([answer])
    assert thinking == {"text": "\n I think. \n", "thought": True}
    assert said == {"text": " So. "}
    assert [one["function_call"] for one in calls] == [
        {"id": "call00Ab1", "name": "calculator", "args": {"a": 6, "b": 7.0, "c": 100.0}},
        {"id": "call01Ab1", "name": "clock", "args": {}},
    ]
    assert [signer(one) for one in calls if "thought_signature" in one] == ["chatcmpl-answer-1"]
    assert answer.usage_metadata.model_dump(exclude_none=True) == {
        "prompt_token_count": 11,
        "cached_content_token_count": 3,
        "candidates_token_count": 5,
        "total_token_count": 16,
    }


async def test_a_whole_answer_holds_the_arguments_as_they_were_sampled(
    gateway: ScriptedGateway, base_url: str
) -> None:
    gateway.script = answering(done(calls=[*CALLS, call("c", "f", "[1]"), call("d", "f", "{")]))
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(url_of(base_url, "generateContent"), json=ASK)
    assert f'"args":{ARGUMENTS}' in answer.text
    found = answer.json()["candidates"][0]["content"]["parts"][2:]
    assert [one["functionCall"]["args"] for one in found] == [
        {"INVALID_JSON": "[1]"},
        {"INVALID_JSON": "{"},
    ]


async def test_text_is_streamed_as_it_comes_and_calls_come_whole_at_the_end(
    gateway: ScriptedGateway, agent: Any
) -> None:
    gateway.script = answering(
        thought("\n I "), thought("think. \n"), text("So"), text(" ."),
        call_piece(0, "", "call00Ab1", "calculator"), call_piece(0, ARGUMENTS),
        call_piece(1, "{}", "call01Ab1", "clock"), text("Done"),
        done("So .Done", calls=CALLS, reasoning="\n I think. \n"),
    )  # fmt: skip
    chunks = await streamed(agent, **SHOWN)
    assert [one.get("text") for one in parts(chunks)] == [
        "\n I ", "think. \n", "So", " .", "Done", None, None,
    ]  # fmt: skip
    assert [one.get("thought") for one in parts(chunks)][:3] == [True, True, None]
    first = parts(chunks)[5]
    assert first["function_call"]["args"] == {"a": 6, "b": 7.0, "c": 100.0}
    assert signer(first) == "chatcmpl-answer-1"
    assert [chunk.candidates[0].finish_reason for chunk in chunks] == [None] * 5 + ["STOP"]
    assert {chunk.response_id for chunk in chunks} == {"chatcmpl-answer-1"}
    assert chunks[-1].usage_metadata.total_token_count == 16


@pytest.mark.parametrize("deltas", [True, False], ids=["deltas", "only the answer"])
@pytest.mark.parametrize("config", [{}, SHOWN], ids=["thoughts hidden", "thoughts shown"])
async def test_a_stream_joined_is_the_whole_answer(
    gateway: ScriptedGateway, agent: Any, *, config: Any, deltas: bool
) -> None:
    pieces = [
        thought("\n I think. \n"), text(" So. "), call_piece(0, ARGUMENTS, "call00Ab1", "x"),
        call_piece(1, "", "call01Ab1", "clock"),
    ]  # fmt: skip
    gateway.script = answering(*(pieces if deltas else []), FULL)
    chunks = await streamed(agent, **config)
    (whole,) = await ask(agent, **config)
    assert parts(chunks) == parts([whole])
    assert chunks[-1].usage_metadata == whole.usage_metadata


@both
async def test_without_calls_the_signature_is_on_the_last_text(
    gateway: ScriptedGateway, agent: Any, form: Any
) -> None:
    gateway.script = answering(text("So."), done("So.", reasoning="\n I think. \n"))
    *_, last = parts(await form(agent))
    assert last["text"] == ("So." if form is ask else "")
    assert signer(last) == "chatcmpl-answer-1"
    gateway.script = answering(done(reasoning="\n I think. \n"))
    (only,) = parts(await form(agent))
    assert (only["text"], signer(only)) == ("", "chatcmpl-answer-1")
    gateway.script = answering(done())
    assert [one.get("text") for one in parts(await form(agent))] == [""]


@both
@pytest.mark.parametrize(
    ("finish", "reason"),
    [(sampling_pb2.FINISH_REASON_STOP, "STOP"), (sampling_pb2.FINISH_REASON_LENGTH, "MAX_TOKENS")],
)
async def test_an_answer_says_why_it_ended(
    gateway: ScriptedGateway, agent: Any, form: Any, finish: Any, reason: str
) -> None:
    gateway.script = answering(done("Hi", calls=CALLS, finish=finish))
    assert (await form(agent))[-1].candidates[0].finish_reason == reason


async def test_a_silent_stream_is_kept_alive_by_blank_lines(gateway: ScriptedGateway) -> None:
    async with serving(gateway) as address:
        async with sidecar_of(SidecarConfig(gateway=address, keep_alive_ms=20)) as base_url:
            blanks = 0
            async with httpx2.AsyncClient(timeout=60) as http:
                gateway.script = waiting(gateway.cancelled.wait, [], [])
                async with http.stream("POST", url_of(base_url), json=ASK) as answer:
                    async for line in answer.aiter_lines():
                        assert line == ""
                        blanks += 1
                        if blanks == 2:
                            break
            await gateway.cancelled.wait()  # the client has left


async def test_a_client_that_leaves_a_stream_ends_its_generation(
    gateway: ScriptedGateway, agent: Any
) -> None:
    gateway.script = waiting(gateway.cancelled.wait, [text("The a")], [])
    begun = asyncio.Event()

    async def take() -> None:
        stream = await agent.models.generate_content_stream(model="m", **ASK)
        async for chunk in stream:
            assert chunk.text == "The a"
            begun.set()

    taking = asyncio.create_task(take())
    await begun.wait()
    taking.cancel()
    await gateway.cancelled.wait()


@both
@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.SessionKeyWrongError("the key does not open this session"), 401, "UNAUTHENTICATED"),
        (errors.SessionUnknownError("session_id: is unknown"), 404, "NOT_FOUND"),
        (errors.SessionClosedError("the session is closed"), 409, "FAILED_PRECONDITION"),
        (errors.InvalidMessagesError("messages[1].role", "is not set"), 400, "INVALID_ARGUMENT"),
        (errors.EnginesBusyError("full", retry_delay_ms=2500), 429, "RESOURCE_EXHAUSTED"),
        (errors.NoEngineError("there is no engine"), 503, "UNAVAILABLE"),
        (errors.DeadlineError("too late"), 504, "DEADLINE_EXCEEDED"),
        (RuntimeError("a secret"), 500, "INTERNAL"),
    ],
)
async def test_every_error_is_a_status_of_google(
    gateway: ScriptedGateway, agent: Any, form: Any, error: Exception, code: int, status: str
) -> None:
    gateway.script = failing(error)
    with pytest.raises(genai.errors.APIError) as caught:
        await form(agent)
    found = caught.value
    assert isinstance(found, genai.errors.ClientError if code < 500 else genai.errors.ServerError)
    assert (found.code, found.status) == (code, status)
    assert "a secret" not in str(found)
    body = found.details["error"]
    details = {one["@type"].rpartition(".")[2]: one for one in body["details"]}
    assert body["code"] == code
    assert details["RequestInfo"]["requestId"] == gateway.request_ids[0]
    assert ("RetryInfo" in details) == (code in {429, 503})
    if code == 429:
        assert details["RetryInfo"]["retryDelay"] == "3s"
        assert details["ErrorInfo"]["reason"] == "ENGINES_BUSY"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.top_p", "generationConfig.topP"),
        ("choices", "generationConfig.candidateCount"),
        ("json_format", "generationConfig.responseJsonSchema"),
        ("messages[1].role", "messages[1].role"),
    ],
)
async def test_errors_of_the_gateway_name_the_fields_of_this_api(
    gateway: ScriptedGateway, agent: Any, field: str, name: str
) -> None:
    gateway.script = failing(errors.InvalidFieldError(field, "is wrong"))
    with pytest.raises(genai.errors.ClientError) as caught:
        await ask(agent)
    violation = {"field": name, "description": f"{name}: is wrong"}
    assert caught.value.message == violation["description"]
    assert caught.value.details["error"]["details"][-1]["fieldViolations"] == [violation]


async def test_a_stream_that_fails_ends_with_an_error_and_without_an_end(
    gateway: ScriptedGateway, agent: Any, base_url: str
) -> None:
    gateway.script = failing(errors.EngineLostError("the engine is gone"), text("The a"))
    with pytest.raises(genai.errors.ServerError, match="the engine is gone") as caught:
        await streamed(agent)
    assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
    for method, begin in (("?alt=sse", b"data: "), ("", b"[")):
        seen: list[bytes] = []
        with pytest.raises(httpx2.RemoteProtocolError):
            await read_into(seen, url_of(base_url, f"streamGenerateContent{method}"))
        said = b"".join(seen)
        assert said.startswith(begin)
        assert b"finishReason" not in said
        if not method:
            *_, error = orjson.loads(said + b"]")
            assert error["error"]["status"] == "UNAVAILABLE"


async def read_into(seen: list[bytes], url: str) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        async with http.stream("POST", url, json=ASK) as answer:
            async for part in answer.aiter_bytes():
                seen.append(part)  # noqa: PERF401 - what came before the error counts


async def test_tokens_are_counted_by_the_gateway(
    gateway: ScriptedGateway, agent: Any, base_url: str
) -> None:
    counted = await agent.models.count_tokens(model="m", **ASK)
    assert counted.total_tokens == 11
    system = {"parts": [{"text": "You count."}]}
    complete = {"generateContentRequest": {**ASK, "systemInstruction": system}}
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(url_of(base_url, "countTokens"), json=complete)
    assert answer.json() == {"totalTokens": 11}
    assert [len(one.messages) for one in gateway.requests] == [1, 2]


@pytest.mark.parametrize("version", ["v1", "v1beta"])
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        (f"?key={KEY}", {}),
        (f"?alt=sse&key={KEY}", {}),
        ("", {"x-goog-api-key": KEY}),
        ("", {"authorization": f"Bearer {KEY}", "x-goog-api-key": "placeholder"}),
        ("", {}),
        ("?key=placeholder", {}),
    ],
)
async def test_the_key_comes_in_a_header_or_in_the_query(
    gateway: ScriptedGateway, base_url: str, version: str, query: str, headers: dict[str, str]
) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        url = f"{base_url}/{version}/models/org/name:generateContent{query}"
        answer = await http.post(url, headers=headers, json=ASK)
    if KEY not in f"{query}{headers}":
        assert (answer.status_code, answer.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        return
    assert answer.json()["modelVersion"] == "org/name"
    assert [request.session_key for request in gateway.requests] == [KEY]


@pytest.mark.parametrize(
    ("path", "is_google"),
    [
        ("/v1beta/models/m:generateContent", True),
        ("http://host:8000/v1beta/models?alt=sse", True),
        (f"/sessions/{KEY}/v1beta/models/m:embedContent", True),
        (f"/sessions/{KEY}/v1/models/org/m:countTokens?key=x", True),
        ("/v1/models/m", False),
        ("/v1/messages", False),
        ("/v1/chat/completions?path=/v1beta/", False),
    ],
)
def test_a_path_says_in_which_form_its_errors_are(path: str, *, is_google: bool) -> None:
    assert (protocol_of(path).name == "generate_content") == is_google
