"""Streams of chat completions."""

import asyncio
from typing import Any

from rollmesh.conformance.asked import CALCULATE, CALL_TOKENS
from rollmesh.conformance.chat.answers import FINISHES
from rollmesh.conformance.chat.requests import FORCED, ask, deltas, stream, user
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.server import Server, need

STREAMS = Family("chat.streams")
_MANY_TOKENS = 12


@STREAMS.check(
    "A stream has the type text/event-stream and ends with data: [DONE].",
    "Clients that read until [DONE]: they wait for it, or take the answer for a broken one.",
)
async def _done(server: Server) -> None:
    streamed = await stream(server)
    streamed.datas()
    need(streamed.events and streamed.events[-1].data == "[DONE]", "there is no [DONE] at the end")


@STREAMS.check(
    "Every chunk has object, created, model, and the same id.",
    "The OpenAI SDK's stream helper: it raises AssertionError without them.",
)
async def _chunk_fields(server: Server) -> None:
    chunks = (await stream(server)).datas()
    need(chunks, "the stream has no chunks")
    for name in ("id", "object", "created", "model"):
        values = {repr(chunk.get(name)) for chunk in chunks}
        need(len(values) == 1 and "None" not in values, f"{name} is {', '.join(sorted(values))}")
    need(chunks[0]["object"] == "chat.completion.chunk", f"object is {chunks[0]['object']!r}")


@STREAMS.check(
    "The first delta has the role.",
    "Hand-written accumulators: they build a message without a role and echo that.",
)
async def _first_role(server: Server) -> None:
    found = deltas((await stream(server)).datas())
    need(found and found[0].get("role") == "assistant", f"the first delta is {found[:1]!r}")


@STREAMS.check(
    "Exactly one chunk of a choice has a known finish_reason, and no delta comes after it.",
    "Clients that end at the finish_reason: they lose the rest, or never end.",
)
async def _finish(server: Server) -> None:
    chunks = (await stream(server)).datas()
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    finishes = [choice.get("finish_reason") for choice in choices]
    named = [one for one in finishes if one is not None]
    need(len(named) == 1 and named[0] in FINISHES, f"the finish reasons are {named}")
    need(finishes[-1] is not None, "deltas come after the finish_reason")


@STREAMS.check(
    "A stream counts no tokens unless it is asked to.",
    "Clients that read choices[0] of every chunk: the chunk with the counts has none.",
)
async def _usage_unasked(server: Server) -> None:
    forms: list[dict[str, Any]] = [{}, {"stream_options": None}]
    forms.append({"stream_options": {"include_usage": False}})
    for options in forms:
        chunks = (await stream(server, **options)).datas()
        need(not any(chunk.get("usage") for chunk in chunks), f"with {options} there is usage")
        need(all(chunk.get("choices") for chunk in chunks), f"with {options} a chunk has no choice")


@STREAMS.check(
    "With include_usage the last chunk has the counts, and its choices are empty.",
    "Agents that keep a budget while they stream: they count nothing.",
)
async def _usage_asked(server: Server) -> None:
    chunks = (await stream(server, stream_options={"include_usage": True})).datas()
    usage = chunks[-1].get("usage") if chunks else None
    need(isinstance(usage, dict), f"usage of the last chunk is {usage!r}")
    need(chunks[-1].get("choices") == [], "the chunk with the usage has choices")


@STREAMS.check(
    "A text arrives in pieces.",
    "Users who watch, and read timeouts: a pretended stream is silent while it is sampled.",
)
async def _pieces(server: Server) -> None:
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}}
    chunks = (await stream(server, **asked)).datas()
    tokens = ((chunks[-1].get("usage") or {}) if chunks else {}).get("completion_tokens") or 0
    pieces = [one for one in deltas(chunks) if one.get("content") or one.get("reasoning_content")]
    if tokens < _MANY_TOKENS:
        raise NotSeenError(f"the answer has {tokens} tokens; {_MANY_TOKENS} say something")
    need(len(pieces) > 1, f"{tokens} tokens came in {len(pieces)} pieces")


@STREAMS.check(
    "The first delta of a call has index, id, type and name; the arguments are joined text.",
    "Every agent that streams with tools: it cannot run a call whose name never came.",
)
async def _tool_call(server: Server) -> None:
    chunks = (await stream(server, user(CALCULATE), **FORCED)).datas()
    calls: dict[Any, list[dict[str, Any]]] = {}
    for delta in deltas(chunks):
        for call in delta.get("tool_calls") or []:
            calls.setdefault(call.get("index"), []).append(call)
    if not calls:
        raise NotSeenError(f"the model called no tool within {CALL_TOKENS} tokens")
    need(sorted(map(str, calls)) == [str(at) for at in range(len(calls))], f"indexes {list(calls)}")
    for parts in calls.values():
        first = parts[0]
        need(isinstance(first.get("id"), str) and first["id"], f"the first delta is {first!r}")
        need(first.get("type") == "function", f"the first delta is {first!r}")
        need((first.get("function") or {}).get("name") == "calculator", f"first delta {first!r}")
        ids = {part["id"] for part in parts if part.get("id")}
        need(len(ids) == 1, f"the deltas of one call have the ids {ids}")
        pieces = [(part.get("function") or {}).get("arguments") or "" for part in parts]
        need("".join(pieces), "the deltas of the call have no arguments")


@STREAMS.check(
    "A bad request that wants a stream is refused with its status, not within a stream.",
    "The SDKs: they raise the class by the status, and an error after 200 is never a 400.",
)
async def _refusal(server: Server) -> None:
    streamed = await stream(server, messages=[])
    need(400 <= streamed.answer.status < 500, f"status {streamed.answer.status}")
    need(not streamed.events, "the refusal is an event of a stream")


@STREAMS.check(
    "A client that leaves in the middle of a stream may ask the same again, in either form.",
    "Agents with a timeout, and Claude Code, which asks again for a complete answer.",
)
async def _client_leaves(server: Server) -> None:
    for _ in range(3):
        (await stream(server, user("Leave after one piece. What is 6 times 7?"), at_most=1)).datas()
    await ask(server, user("Leave after one piece. What is 6 times 7?"))
    (await stream(server, user("Leave after one piece. What is 6 times 7?"))).datas()


@STREAMS.check(
    "Several streams at the same time do not mix.",
    "Agents with sub-agents: one would read the other's answer.",
)
async def _at_once(server: Server) -> None:
    asks = [stream(server, user(f"Stream {at}. What is 6 times 7?")) for at in range(4)]
    found = [one.datas() for one in await asyncio.gather(*asks)]
    ids = [{chunk.get("id") for chunk in chunks} for chunks in found]
    need(all(len(one) == 1 for one in ids), f"the ids of the streams are {ids}")
    need(len(set().union(*ids)) == len(ids), f"the ids of the streams are {ids}")
