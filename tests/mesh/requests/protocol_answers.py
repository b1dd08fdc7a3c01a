"""Requests in Messages and Responses to a mesh and to vLLM, and whether both answer the same."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.mesh.requests.protocol_requests import LINES, MESSAGES, RESPONSES, Case

_CUT = "\ufffd"


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    said: list[tuple[str, ...]]
    """Thinking, texts and calls, in order. Arguments as JSON values."""
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


def check(case: Case, ours: Answer, theirs: Answer, *, stream: bool) -> None:
    both = (
        f"vLLM: {theirs.status} {theirs.prompt_tokens} {theirs.said} {theirs.body[:600]}\n"
        f"mesh: {ours.status} {ours.prompt_tokens} {ours.said} {ours.body[:600]}"
    )
    why = case.class_of(stream=stream)
    same = (ours.status, ours.said, ours.prompt_tokens) == (
        theirs.status, theirs.said, theirs.prompt_tokens
    )  # fmt: skip
    assert same != bool(why), both
    assert not case.kinds or sorted(case.kinds) == sorted(one[0] for one in ours.said), both
    if why == LINES:
        assert stripped(ours.said) == stripped(theirs.said), both


def stripped(said: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without line breaks around thinking and texts."""
    found = [(kind, *(one.strip("\n") for one in words)) for kind, *words in said]
    return [one for one in found if one != ("text", "")]
