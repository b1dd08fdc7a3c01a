"""Streams of Responses."""

from typing import Any

from rollmesh.conformance.asked import CALCULATE, CALL_TOKENS
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.responses.requests import FORCED, PATH, ask, request, stream, user
from rollmesh.conformance.server import Server, need, numbers

STREAMS = Family("responses.streams")
_ENDS = {"response.completed", "response.incomplete"}
Events = list[dict[str, Any]]


async def _events(server: Server, *items: Any, **fields: Any) -> Events:
    events = (await stream(server, *items, **fields)).datas()
    need(events, "the stream has no events")
    return events


def _of(events: Events, kind: str) -> Events:
    return [event for event in events if event.get("type") == kind]


@STREAMS.check(
    "A stream begins with response.created and ends with response.completed or incomplete.",
    "The SDK's stream helper, which raises RuntimeError, and Codex, which asks again.",
)
async def _order(server: Server) -> None:
    kinds = [event.get("type") for event in await _events(server, user())]
    need(kinds[0] == "response.created", f"the first event is {kinds[0]!r}")
    need(kinds[-1] in _ENDS, f"the last event is {kinds[-1]!r}")


@STREAMS.check(
    "The name of an event is its type, and sequence_number counts the events.",
    "Clients that read the event's name, and those that detect what is missing.",
)
async def _event_names(server: Server) -> None:
    streamed = await stream(server, user())
    events = streamed.datas()
    for event, data in zip(streamed.events, events, strict=False):
        need(
            event.event == data.get("type"), f"event {event.event!r} has type {data.get('type')!r}"
        )
    counted = [data.get("sequence_number") for data in events]
    need(counted == list(range(len(counted))), f"the sequence numbers are {counted!r:.200}")


@STREAMS.check(
    "Every item has output_item.added before its content and output_item.done after it.",
    "Codex, which takes its items from output_item.done: without it the turn is empty, silently.",
)
async def _items(server: Server) -> None:
    events = await _events(server, user())
    done = [event["item"].get("id") for event in _of(events, "response.output_item.done")]
    added = [event["item"].get("id") for event in _of(events, "response.output_item.added")]
    need(done, "there is no response.output_item.done")
    need(added == done, f"added are the items {added}, done are {done}")
    seen: set[Any] = set()
    for event in events:
        if event.get("type") == "response.output_item.added":
            seen.add(event["item"].get("id"))
        if (item_id := event.get("item_id")) is not None:
            need(item_id in seen, f"{event.get('type')} of {item_id!r} comes before its item")


@STREAMS.check(
    "The last event has the items of the stream: the same ids, the same text.",
    "openai-agents, which reads the last event only, and whoever echoes by id.",
)
async def _same_items(server: Server) -> None:
    events = await _events(server, user())
    done = [event["item"].get("id") for event in _of(events, "response.output_item.done")]
    output = events[-1]["response"].get("output") or []
    ids = [item.get("id") for item in output]
    need(ids == done, f"the stream has the items {done}, its last event {ids}")
    deltas = "".join(event["delta"] for event in _of(events, "response.output_text.delta"))
    parts = [part for item in output for part in item.get("content") or []]
    text = "".join(part["text"] for part in parts if part.get("type") == "output_text")
    need(deltas == text, f"the deltas say {deltas!r:.100}, the last event {text!r:.100}")


@STREAMS.check(
    "The last event counts the tokens.",
    "Codex, which compacts by these counts.",
)
async def _usage(server: Server) -> None:
    usage = (await _events(server, user()))[-1]["response"].get("usage")
    numbers(usage, "input_tokens", "output_tokens", "total_tokens")


@STREAMS.check(
    "A call is an item with its call_id and name; its deltas join to its arguments.",
    "Every agent that streams with tools.",
)
async def _function_call(server: Server) -> None:
    events = await _events(server, user(CALCULATE), **FORCED)
    items = [event["item"] for event in _of(events, "response.output_item.done")]
    calls = [item for item in items if item.get("type") == "function_call"]
    if not calls:
        raise NotSeenError(f"the model called no tool within {CALL_TOKENS} tokens")
    call = calls[0]
    need(call.get("name") == "calculator" and call.get("call_id"), f"the call is {call!r}")
    kind = "response.function_call_arguments.delta"
    pieces = [one["delta"] for one in _of(events, kind) if one.get("item_id") == call.get("id")]
    text = "".join(pieces)
    need(text == call.get("arguments"), f"deltas {text!r}, arguments {call.get('arguments')!r}")


@STREAMS.check(
    "A bad request that wants a stream is refused with its status, not within a stream.",
    "Codex and the SDKs: they read the status first, and retry a stream that breaks off.",
)
async def _refusal(server: Server) -> None:
    streamed = await stream(server, input=5)
    need(400 <= streamed.answer.status < 500, f"status {streamed.answer.status}")


@STREAMS.check(
    "A client that leaves in the middle of a stream may ask the same again.",
    "Codex, which reconnects up to five times.",
)
async def _client_leaves(server: Server) -> None:
    question = user("Leave after one piece. What is 6 times 7?")
    for _ in range(3):
        (await stream(server, question, at_most=1)).datas()
    await ask(server, question)
    (await server.stream(PATH, request(server, question, stream=True))).datas()
