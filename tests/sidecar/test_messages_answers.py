"""What agents get, through the published SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import orjson
import pytest

from rollmesh.runtime import errors
from rollmesh.sidecar import SidecarConfig
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2
from tests.lazily import anthropic
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

ASK: Any = {
    "model": "any-name",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "What is 6 x 7?"}],
}
ARGUMENTS = '{"a": 6,  "b":7.0, "c": 1E2}'
CALLS = [call("call00Ab1", "calculator", ARGUMENTS), call("call01Ab1", "clock", "")]


@pytest.fixture
async def agent(base_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url, settings = f"{base_url}/sessions/{KEY}", {"api_key": "static", "max_retries": 0}
    async with anthropic.AsyncAnthropic(base_url=url, **settings) as client:
        yield client


def thought(text: str) -> gateway_pb2.StreamChatResponse:
    return gateway_pb2.StreamChatResponse(delta=gateway_pb2.ChatDelta(reasoning_content=text))


async def events_of(base_url: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream as they are on the wire."""
    async with httpx2.AsyncClient(timeout=60) as http:
        url = f"{base_url}/sessions/{KEY}/v1/messages"
        async with http.stream("POST", url, json=ASK | {"stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    return list(zip(names, (orjson.loads(line[5:]) for line in lines[1::2]), strict=True))


async def test_a_whole_answer_has_every_field_of_the_sdk(
    gateway: ScriptedGateway, agent: anthropic.AsyncAnthropic
) -> None:
    gateway.script = answering(done(" So. ", calls=CALLS, reasoning="\n I think. \n"))
    answer = await agent.messages.create(**ASK)
    assert (answer.id, answer.type, answer.role) == ("chatcmpl-answer-1", "message", "assistant")
    assert (answer.model, answer.stop_reason, answer.stop_sequence) == (
        "any-name",
        "tool_use",
        None,
    )
    thinking, said, *calls = (block.to_dict() for block in answer.content)
    assert thinking["thinking"] == "\n I think. \n"
    assert said == {"type": "text", "text": " So. "}
    assert [one["input"] for one in calls] == [{"a": 6, "b": 7.0, "c": 100.0}, {}]
    assert [one["id"] for one in calls] == ["call00Ab1", "call01Ab1"]
    assert answer.usage.to_dict() == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
    }


async def test_a_whole_answer_holds_the_arguments_as_they_were_sampled(
    gateway: ScriptedGateway, base_url: str
) -> None:
    gateway.script = answering(done(calls=[*CALLS, call("c", "f", "[1]"), call("d", "f", "{")]))
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{base_url}/sessions/{KEY}/v1/messages", json=ASK)
    assert f'"input":{ARGUMENTS}' in answer.text
    assert [one["input"] for one in answer.json()["content"][2:]] == [
        {"INVALID_JSON": "[1]"},
        {"INVALID_JSON": "{"},
    ]


async def test_a_stream_is_blocks_one_after_the_other(
    gateway: ScriptedGateway, base_url: str
) -> None:
    start = thought("I ")
    start.delta.prompt_tokens = 11
    gateway.script = answering(
        start, thought("think."), text("So"), text(" ."),
        call_piece(0, "", "call00Ab1", "calculator"), call_piece(0, '{"a": '), call_piece(0, "6}"),
        call_piece(1, "{}", "call01Ab1", "clock"), text("Done"), thought("Again"),
        done("So .Done", calls=CALLS, reasoning="I think.Again"),
    )  # fmt: skip
    events = await events_of(base_url)
    assert all(name == data["type"] for name, data in events)
    assert [name.removeprefix("content_block_") for name, _ in events] == [
        "message_start",
        "start", "delta", "delta", "delta", "stop",
        "start", "delta", "delta", "stop",
        "start", "delta", "delta", "stop",
        "start", "delta", "stop",
        "start", "delta", "stop",
        "start", "delta", "delta", "stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    message = events[0][1]["message"]
    assert (message["id"], message["content"]) == ("chatcmpl-answer-1", [])
    assert message["usage"]["input_tokens"] == 11
    blocks = [data["content_block"] for _, data in events if "content_block" in data]
    assert [block["type"] for block in blocks] == [
        "thinking", "text", "tool_use", "tool_use", "text", "thinking",
    ]  # fmt: skip
    assert (blocks[2]["name"], blocks[2]["input"]) == ("calculator", {})
    indices = [data["index"] for _, data in events if "index" in data]
    assert indices == sorted(indices)
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert deltas[:3] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["input_tokens"] == 8


@pytest.mark.parametrize("deltas", [True, False], ids=["deltas", "only the answer"])
async def test_a_stream_joined_is_the_whole_answer(
    gateway: ScriptedGateway, agent: anthropic.AsyncAnthropic, *, deltas: bool
) -> None:
    end = done("So.", calls=CALLS, reasoning="I think.")
    pieces = [
        thought("I think."), text("So."), call_piece(0, ARGUMENTS, "call00Ab1", "calculator"),
        call_piece(1, "", "call01Ab1", "clock"),
    ]  # fmt: skip
    gateway.script = answering(*(pieces if deltas else []), end)
    async with agent.messages.stream(**ASK) as stream:
        joined = await stream.get_final_message()
    whole = await agent.messages.create(**ASK)
    assert joined.to_dict() == whole.to_dict() | {"stop_details": None}  # the SDK's own


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(done("Hi"), "end_turn", id="end"),
        pytest.param(
            done("Hi", finish=sampling_pb2.FINISH_REASON_LENGTH), "max_tokens", id="length"
        ),
        pytest.param(done(calls=CALLS), "tool_use", id="calls"),
        pytest.param(
            done(calls=CALLS, finish=sampling_pb2.FINISH_REASON_LENGTH),
            "max_tokens",
            id="calls that were cut",
        ),
        pytest.param(done(), "end_turn", id="nothing"),
    ],
)
async def test_an_answer_says_why_it_ended(
    gateway: ScriptedGateway,
    agent: anthropic.AsyncAnthropic,
    answer: gateway_pb2.StreamChatResponse,
    reason: str,
) -> None:
    gateway.script = answering(answer)
    assert (await agent.messages.create(**ASK)).stop_reason == reason
    async with agent.messages.stream(**ASK) as stream:
        assert (await stream.get_final_message()).stop_reason == reason


async def test_a_silent_stream_is_kept_alive_by_pings(gateway: ScriptedGateway) -> None:
    async with serving(gateway) as address:
        async with sidecar_of(SidecarConfig(gateway=address, keep_alive_ms=20)) as base_url:
            pings = 0
            async with httpx2.AsyncClient(timeout=60) as http:
                gateway.script = waiting(gateway.cancelled.wait, [], [])
                url = f"{base_url}/sessions/{KEY}/v1/messages"
                async with http.stream("POST", url, json=ASK | {"stream": True}) as answer:
                    async for line in answer.aiter_lines():
                        assert line in {"event: ping", 'data: {"type":"ping"}', ""}
                        pings += line == "event: ping"
                        if pings == 2:
                            break
            await gateway.cancelled.wait()  # the client has left


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("error", "kind", "status", "name"),
    [
        pytest.param(
            errors.SessionKeyWrongError("the key does not open this session"),
            "AuthenticationError", 401, "authentication_error", id="wrong key",
        ),
        pytest.param(
            errors.SessionUnknownError("session_id: is unknown"),
            "NotFoundError", 404, "not_found_error", id="unknown session",
        ),
        pytest.param(
            errors.SessionClosedError("the session is closed"),
            "ConflictError", 409, "invalid_request_error", id="closed session",
        ),
        pytest.param(
            errors.InvalidMessagesError("messages[1].role", "is not set"),
            "BadRequestError", 400, "invalid_request_error", id="messages",
        ),
        pytest.param(
            errors.EnginesBusyError("all engines are full", retry_delay_ms=2500),
            "RateLimitError", 429, "rate_limit_error", id="busy",
        ),
        pytest.param(
            errors.OverloadedError("too much", retry_delay_ms=2500),
            "OverloadedError", 529, "overloaded_error", id="overloaded",
        ),
        pytest.param(
            errors.NoEngineError("there is no engine"),
            "ServiceUnavailableError", 503, "api_error", id="no engine",
        ),
        pytest.param(
            errors.DeadlineError("too late"),
            "DeadlineExceededError", 504, "timeout_error", id="deadline",
        ),
        pytest.param(
            RuntimeError("a secret"),
            "InternalServerError", 500, "api_error", id="unexpected",
        ),
    ],
)  # fmt: skip
async def test_every_error_has_its_class_status_and_type(
    gateway: ScriptedGateway,
    agent: anthropic.AsyncAnthropic,
    *,
    error: Exception,
    kind: str,
    status: int,
    name: str,
    stream: bool,
) -> None:
    gateway.script = failing(error)
    with pytest.raises(getattr(anthropic, kind)) as caught:
        await agent.messages.create(**ASK, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.request_id == gateway.request_ids[0]
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", name)
    assert body["request_id"] == gateway.request_ids[0]
    assert "a secret" not in body["error"]["message"]
    headers = caught.value.response.headers
    assert ("retry-after" in headers) == (status in {429, 503, 529})
    assert (headers.get("x-should-retry") == "false") == (status in {401, 404, 409})


async def test_a_stream_that_fails_ends_with_an_error_and_without_an_end(
    gateway: ScriptedGateway, agent: anthropic.AsyncAnthropic, base_url: str
) -> None:
    gateway.script = failing(errors.EngineLostError("the engine is gone"), text("The a"))
    with pytest.raises(anthropic.APIStatusError, match="the engine is gone") as caught:
        async with agent.messages.stream(**ASK) as stream:
            await stream.get_final_message()
    assert caught.value.type == "api_error"
    seen: list[bytes] = []
    with pytest.raises(httpx2.RemoteProtocolError):
        await read_into(seen, base_url)
    assert b"event: error\ndata: " in b"".join(seen)
    assert b"message_stop" not in b"".join(seen)


async def read_into(seen: list[bytes], base_url: str) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        url = f"{base_url}/sessions/{KEY}/v1/messages"
        async with http.stream("POST", url, json=ASK | {"stream": True}) as answer:
            async for part in answer.aiter_bytes():
                seen.append(part)  # noqa: PERF401 - what came before the error counts


async def test_retries_are_marked_for_the_gateway(gateway: ScriptedGateway, base_url: str) -> None:
    gateway.script = failing(errors.NoEngineError("none", retry_delay_ms=1))
    settings: Any = {"api_key": "static", "max_retries": 1}
    async with anthropic.AsyncAnthropic(base_url=f"{base_url}/sessions/{KEY}", **settings) as agent:
        with pytest.raises(anthropic.ServiceUnavailableError):
            await agent.messages.create(**ASK)
    assert [request.retry_count for request in gateway.requests] == [0, 1]
    assert all(request.max_tokens_must_fit for request in gateway.requests)


async def test_tokens_are_counted_by_the_gateway(
    gateway: ScriptedGateway, agent: anthropic.AsyncAnthropic
) -> None:
    asked = {name: value for name, value in ASK.items() if name != "max_tokens"}
    counted = await agent.messages.count_tokens(**asked, system="You count.")
    assert counted.input_tokens == 11
    assert len(gateway.requests[0].messages) == 2
    gateway.failures = [errors.SessionClosedError("the session is closed")]
    with pytest.raises(anthropic.ConflictError):
        await agent.messages.count_tokens(**asked)


async def test_the_key_and_the_lineage_come_from_the_headers_that_claude_code_sends(
    gateway: ScriptedGateway, base_url: str
) -> None:
    headers = {"x-api-key": KEY, "x-claude-code-agent-id": "0a" * 8}
    async with httpx2.AsyncClient(timeout=60) as http:
        url = f"{base_url}/v1/messages?beta=true"
        assert (await http.post(url, headers=headers, json=ASK)).status_code == 200
        assert (await http.head(f"{base_url}/")).status_code == 404  # how it begins
    (request,) = gateway.requests
    assert (request.session_key, request.lineage) == (
        KEY,
        trajectory_pb2.LINEAGE_SUB_AGENT,
    )
