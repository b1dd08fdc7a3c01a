"""Messages and Responses: a mesh around the real model, and vLLM's own endpoints with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.mesh.requests.protocol_requests import (
    CLASSES,
    MESSAGES,
    OF_MESSAGES,
    OF_RESPONSES,
    RESPONSES,
    Case,
)
from tests.mesh.requests.serve import Servers
from tests.paths import ROOT

_CUT = "\ufffd"

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    said: list[tuple[str, ...]]
    """Thinking, texts and calls, in order; arguments as JSON values."""
    prompt_tokens: int
    body: str


def plain(text: str) -> str:
    """A text whose end is not cut within a character: vLLM leaves out half a character."""
    return text.rstrip(_CUT)


def arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def of_message(body: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for block in body["content"]:
        match block["type"]:
            case "text":
                found.append(("text", plain(block["text"])))
            case "thinking":
                found.append(("thinking", plain(block["thinking"])))
            case kind:
                given = block["input"]
                text = given if isinstance(given, str) else json.dumps(given)
                found.append((kind, block["name"], arguments(text)))
    return [one for one in found if one != ("text", "")]


def of_response(body: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for item in body["output"]:
        match item["type"]:
            case "message":
                texts = [part["text"] for part in item["content"]]
                found.append(("text", plain("".join(texts))))
            case "reasoning":
                texts = [part["text"] for part in item["content"] or []]
                found.append(("thinking", plain("".join(texts))))
            case kind:
                found.append((kind, item["name"], arguments(item["arguments"])))
    return [one for one in found if one != ("text", "")]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


_GROWING = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream are."""
    blocks: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                usage = event["message"]["usage"]
            case "content_block_start":
                blocks[event["index"]] = {"partial_json": "", **event["content_block"]}
            case "content_block_delta" if key := _GROWING.get(event["delta"]["type"]):
                blocks[event["index"]][key] += event["delta"][key]
            case "message_delta":
                usage = usage | {name: count for name, count in event["usage"].items() if count}
            case _:
                pass
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = block["partial_json"] or "{}"
    return {"content": list(blocks.values()), "usage": usage}


async def ask_messages(client: httpx2.AsyncClient, fields: Mapping[str, Any]) -> Answer:
    asked = {name: value for name, value in {**MESSAGES, **fields}.items() if value is not None}
    answer = await client.post("/messages", json=asked)
    if answer.status_code != 200:
        return Answer(answer.status_code, [], 0, answer.text)
    body = joined_message(events_of(answer.text)) if asked.get("stream") else answer.json()
    usage = body["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    return Answer(200, of_message(body), usage.get("input_tokens", 0) + cached, answer.text)


async def ask_responses(client: httpx2.AsyncClient, fields: Mapping[str, Any]) -> Answer:
    asked = {name: value for name, value in {**RESPONSES, **fields}.items() if value is not None}
    answer = await client.post("/responses", json=asked)
    if answer.status_code != 200:
        return Answer(answer.status_code, [], 0, answer.text)
    body = answer.json() if not asked.get("stream") else events_of(answer.text)[-1]["response"]
    return Answer(200, of_response(body), body["usage"]["input_tokens"], answer.text)


def check(case: Case, ours: Answer, theirs: Answer) -> None:
    both = (
        f"vLLM: {theirs.status} {theirs.prompt_tokens} {theirs.said} {theirs.body[:600]}\n"
        f"mesh: {ours.status} {ours.prompt_tokens} {ours.said} {ours.body[:600]}"
    )
    same = (ours.status, ours.said, ours.prompt_tokens) == (
        theirs.status, theirs.said, theirs.prompt_tokens
    )  # fmt: skip
    assert same != bool(case.why), both


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", OF_MESSAGES)
async def test_messages_are_answered_as_by_vllm_or_the_difference_has_a_name(
    servers: Servers, name: str, *, stream: bool
) -> None:
    case, more = OF_MESSAGES[name], {"stream": True} if stream else {}
    ours = await ask_messages(servers.mesh, {**case.fields, **more})
    check(case, ours, await ask_messages(servers.vllm, {**case.fields, **more}))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", OF_RESPONSES)
async def test_responses_are_answered_as_by_vllm_or_the_difference_has_a_name(
    servers: Servers, name: str, *, stream: bool
) -> None:
    case, more = OF_RESPONSES[name], {"stream": True} if stream else {}
    ours = await ask_responses(servers.mesh, {**case.fields, **more})
    check(case, ours, await ask_responses(servers.vllm, {**case.fields, **more}))


def test_every_class_of_differences_is_seen_and_explained() -> None:
    cases = (*OF_MESSAGES.values(), *OF_RESPONSES.values())
    assert {case.why for case in cases if case.why} == set(CLASSES)
    page = (ROOT / "docs" / "messages.md").read_text()
    assert [name for name in CLASSES if f"- **{name}**:" not in page] == []
