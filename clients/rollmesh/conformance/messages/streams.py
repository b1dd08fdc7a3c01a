"""Streams of Messages."""

import json
from typing import Any

from rollmesh.conformance.asked import CALCULATE, CALL_TOKENS
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.messages.answers import STOPS
from rollmesh.conformance.messages.requests import FORCED, ask, stream, user
from rollmesh.conformance.server import FailedError, Server, need

STREAMS = Family("messages.streams")
_KINDS = {"text_delta": "text", "input_json_delta": "tool_use", "thinking_delta": "thinking"}
Events = list[dict[str, Any]]


async def _events(server: Server, *messages: dict[str, Any], **fields: Any) -> Events:
    """Returns the events of a stream, pings left out."""
    events = (await stream(server, *messages, **fields)).datas()
    found = [event for event in events if event.get("type") != "ping"]
    need(found, "the stream has no events")
    return found


@STREAMS.check(
    "A stream is message_start, blocks one after another, message_delta, message_stop.",
    "The SDK's stream helper, which raises, and Claude Code, which asks again without streaming.",
)
async def _order(server: Server) -> None:
    kinds = [event.get("type") for event in await _events(server)]
    need(kinds[0] == "message_start", f"the first event is {kinds[0]!r}")
    need(kinds[-2:] == ["message_delta", "message_stop"], f"the last events are {kinds[-2:]}")
    inside = False
    for kind in kinds[1:-2]:
        starts, ends = kind == "content_block_start", kind == "content_block_stop"
        need(starts or ends or kind == "content_block_delta", f"there is an event {kind!r}")
        need(starts != inside, f"{kind} comes {'within' if inside else 'outside'} a block")
        inside = not ends
    need(not inside, "the last block has no content_block_stop")


@STREAMS.check(
    "The name of an event is its type.",
    "The SDK, which ignores events without a name: the answer is empty, silently.",
)
async def _event_names(server: Server) -> None:
    streamed = await stream(server)
    for event, data in zip(streamed.events, streamed.datas(), strict=False):
        need(
            event.event == data.get("type"), f"event {event.event!r} has type {data.get('type')!r}"
        )


@STREAMS.check(
    "message_start has the message: its id, role, model and usage.",
    "Claude Code and the SDK's helper, which build the message from it.",
)
async def _start(server: Server) -> None:
    message = (await _events(server))[0].get("message") or {}
    for name, kind in (("id", str), ("role", str), ("model", str), ("usage", dict)):
        need(isinstance(message.get(name), kind), f"{name} is {message.get(name)!r}")
    need(type(message["usage"].get("input_tokens")) is int, f"usage is {message['usage']!r}")


@STREAMS.check(
    "Blocks are numbered from 0, and each has only deltas of its own type.",
    "Claude Code: a thinking_delta in a text block ends its turn.",
)
async def _blocks(server: Server) -> None:
    kinds: list[Any] = []
    for event in await _events(server):
        if event.get("type") == "content_block_start":
            need(event.get("index") == len(kinds), f"block {len(kinds)} has {event.get('index')!r}")
            kinds.append((event.get("content_block") or {}).get("type"))
        if event.get("type") == "content_block_delta":
            need(
                event.get("index") == len(kinds) - 1, f"a delta is of block {event.get('index')!r}"
            )
            delta = str((event.get("delta") or {}).get("type"))
            wanted = _KINDS.get(delta, kinds[-1])
            need(wanted == kinds[-1], f"a {delta} is in a block of type {kinds[-1]}")


@STREAMS.check(
    "message_delta has a known stop_reason and the output tokens.",
    "Claude Code, which takes an answer without a stop_reason for a broken one.",
)
async def _end(server: Server) -> None:
    (last,) = [one for one in await _events(server) if one.get("type") == "message_delta"][-1:]
    reason = (last.get("delta") or {}).get("stop_reason")
    need(reason in STOPS, f"stop_reason is {reason!r}")
    tokens = (last.get("usage") or {}).get("output_tokens")
    need(type(tokens) is int, f"output_tokens is {tokens!r}")


@STREAMS.check(
    "A call begins with its id, name and an empty input; its deltas join to JSON.",
    "Every agent that streams with tools.",
)
async def _tool_use(server: Server) -> None:
    events = await _events(server, user(CALCULATE), **FORCED)
    starts = [one for one in events if one.get("type") == "content_block_start"]
    calls = [one for one in starts if one["content_block"].get("type") == "tool_use"]
    reasons = [(one.get("delta") or {}).get("stop_reason") for one in events]
    if not calls or "max_tokens" in reasons:
        raise NotSeenError(f"the model completed no tool call within {CALL_TOKENS} tokens")
    block = calls[0]["content_block"]
    need(block.get("id") and block.get("name") == "calculator", f"the block is {block!r}")
    need(block.get("input") == {}, f"input begins with {block.get('input')!r}")
    own = [
        one["delta"] for one in events if one.get("index") == calls[0]["index"] and "delta" in one
    ]
    text = "".join(one.get("partial_json") or "" for one in own)
    try:
        value = json.loads(text)
    except ValueError:
        raise FailedError(f"the deltas join to {text!r:.200}") from None
    if not isinstance(value, dict):
        raise NotSeenError(f"the model called the tool with {text!r:.200}")


@STREAMS.check(
    "A bad request that wants a stream is refused with its status, not within a stream.",
    "The SDK, which raises the class by the status.",
)
async def _refusal(server: Server) -> None:
    streamed = await stream(server, messages=[])
    need(400 <= streamed.answer.status < 500, f"status {streamed.answer.status}")


@STREAMS.check(
    "A client that leaves in the middle of a stream may ask for the complete message.",
    "Claude Code, which does so at once after every stream that broke.",
)
async def _client_leaves(server: Server) -> None:
    question = user("Leave after one piece. What is 6 times 7?")
    for _ in range(3):
        (await stream(server, question, at_most=1)).datas()
    await ask(server, question)
