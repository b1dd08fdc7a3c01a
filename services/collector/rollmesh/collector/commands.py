"""`rollmesh collector delete|inspect|replay`: reads a collector, moves its consumers."""

import argparse
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from google.protobuf import message as protobuf_message

from rollmesh.collector import log
from rollmesh.mesh import CollectorDirectory
from rollmesh.runtime import line_of, why, words_of
from rollmesh.runtime.access import identity
from rollmesh.runtime.codec import plain, summary_of
from rollmesh.runtime.config import LOCAL_ROUTER, ConfigError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2

_TIMEOUT_S = 60.0
_LAST_MS = 2**63 - 1
_SELECTED = ("run_id", "group_id", "model", "outcome", "purpose")
"""The flags that select sessions, by the names of `summary_of`."""
_ENDS = {"earliest": pb.LOG_END_EARLIEST, "latest": pb.LOG_END_LATEST}


def run_tool(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a tool and returns the exit code: 0, 1 for a collector error, 2 for an invalid flag."""
    parser = argparse.ArgumentParser(prog=f"rollmesh collector {name}")
    parser.add_argument(
        "--router", default=LOCAL_ROUTER, help="host:port of the routers, which know collectors"
    )
    parser.add_argument(
        "--collector", default="", help="host:port, or several with commas; no router is asked then"
    )
    identity.add_flags(parser)
    add_flags, work = TOOLS[name]
    add_flags(parser)
    options = parser.parse_args(argv)
    return identity.run_tool(parser.prog, options, environ, partial(_connected, work, options))


async def _connected(work: Callable[..., Awaitable[None]], options: argparse.Namespace) -> None:
    """Runs a tool at a collector that answers. Any does, as they have one store."""
    collectors = CollectorDirectory(options.router, options.collector)
    try:
        await collectors.find()
        await work(collectors, options)
    finally:
        await collectors.aclose()


async def _ask(collectors: CollectorDirectory, method: str, request: Any) -> Any:
    async with collectors.one() as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        with typed_errors():
            return await getattr(stub, method)(request, timeout=_TIMEOUT_S)


async def _inspect(collectors: CollectorDirectory, options: argparse.Namespace) -> None:
    selection = {name: value for name in _SELECTED if (value := getattr(options, name))}
    if selection and (options.session or not options.sessions):
        flag = f"--{next(iter(selection)).replace('_', '-')}"
        raise ConfigError(f"{flag} selects sessions; give --sessions, without --session")
    if options.session:
        request = pb.ReadSessionsRequest(session_id=options.session, without_arrays=True)
        found = [session async for session in _sessions(collectors, request)]
        if not options.words and any(one.messages for one in found):  # texts are in the arrays
            request.without_arrays = False
            found = [session async for session in _sessions(collectors, request)]
        for session in found:
            lines = [words_of(line_of(session)), *why(session)] if options.words else []
            _say("\n".join(lines) or json.dumps(_shown(session), ensure_ascii=False))
        return
    if options.sessions:
        request = pb.ReadSessionsRequest(without_arrays=True)
        async with aclosing(_chosen(_sessions(collectors, request), selection)) as chosen:
            async for session in chosen:
                told = words_of(line_of(session)) if options.words else ""
                _say(told or json.dumps(summary_of(session), ensure_ascii=False))
        return
    _show(await _ask(collectors, "GetStats", pb.GetStatsRequest()))
    if options.consumers:
        await _show_pages(collectors, "ListConsumers", pb.ListConsumersRequest())
    if options.groups:
        await _show_pages(collectors, "ListGroups", pb.ListGroupsRequest(state=pb.GROUP_STATE_OPEN))
    if options.filtered:
        wanted = pb.ListFilteredRequest(consumer=options.filtered)
        await _show_pages(collectors, "ListFiltered", wanted)


def _shown(session: session_pb2.SessionRecord) -> dict[str, Any]:
    """Returns a session as plain values, with its messages and without its arrays. Changes it."""
    texts = {
        name: [json.loads(one.data or b"[]") for one in found]
        for name, found in (("messages", session.messages), ("contexts", session.contexts))
    }
    log.split(session)
    values = plain(session)
    for node, messages in zip(values.get("messages", ()), texts["messages"], strict=True):
        node["messages"] = messages
    return values | {name: found for name, found in texts.items() if name == "contexts" and found}


async def _show_pages(collectors: CollectorDirectory, method: str, request: Any) -> None:
    while True:
        page = await _ask(collectors, method, request)
        for field, entries in page.ListFields():
            for entry in entries if field.is_repeated else ():
                _show(entry)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _replay(collectors: CollectorDirectory, options: argparse.Namespace) -> None:
    request = pb.SeekRequest(consumer=options.consumer, position=read_position(options.start))
    sought = await _ask(collectors, "Seek", request)
    _say(f"{options.consumer}: {sought.again} units redelivered, {sought.skipped} skipped")


async def _delete(collectors: CollectorDirectory, options: argparse.Namespace) -> None:
    await _ask(collectors, "DeleteConsumer", pb.DeleteConsumerRequest(consumer=options.consumer))
    _say(f"{options.consumer}: deleted")


def read_position(text: str) -> pb.Position:
    """Parses `earliest`, `latest`, a time in milliseconds since 1970 UTC, or `id:DELIVERY_ID`.

    Raises:
        ConfigError: The text has none of these forms.
    """
    if text in _ENDS:
        return pb.Position(end=_ENDS[text])
    if text.startswith("id:"):
        return pb.Position(delivery_id=text.removeprefix("id:"))
    if text.isdecimal() and int(text) <= _LAST_MS:
        return pb.Position(unix_ms=int(text))
    raise ConfigError(
        f"from: {text!r}: give earliest, latest, milliseconds since 1970, or id:DELIVERY_ID"
    )


async def _sessions(
    collectors: CollectorDirectory, request: pb.ReadSessionsRequest
) -> AsyncGenerator[session_pb2.SessionRecord]:
    async with aclosing(collectors.stored_sessions(request)) as responses:
        async for response in responses:
            if response.damaged_session_id:
                _say(f"session {response.damaged_session_id} is damaged; left out", error=True)
            else:
                yield response.session


async def _chosen(
    sessions: AsyncGenerator[session_pb2.SessionRecord],
    selection: Mapping[str, str],
) -> AsyncGenerator[session_pb2.SessionRecord]:
    async with aclosing(sessions):
        async for session in sessions:
            summary = summary_of(session)
            if all(summary[name] == value for name, value in selection.items()):
                yield session


def _show(message: protobuf_message.Message) -> None:
    _say(json.dumps(plain(message), ensure_ascii=False))


def _say(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout)


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints what is stored, and the units of each consumer, as lines of JSON."
    parser.add_argument("--session", default="", help="this session instead, without its arrays")
    parser.add_argument("--sessions", action="store_true", help="a line for each session instead")
    parser.add_argument(
        "--words", action="store_true", help="sessions as `rollmesh tail` tells them; one with why"
    )
    parser.add_argument("--run-id", default="", help="only sessions of this run")
    parser.add_argument("--group-id", default="", help="only sessions of this group")
    parser.add_argument("--model", default="", help="only sessions of this model")
    outcomes, purposes = ("COMPLETED", "FAILED", "ABORTED", "LOST"), ("TRAIN", "EVAL", "OTHER")
    parser.add_argument("--outcome", choices=outcomes, help="only sessions that ended so")
    parser.add_argument("--purpose", choices=purposes, help="only sessions of this purpose")
    parser.add_argument("--consumers", action="store_true", help="also the settings of consumers")
    parser.add_argument("--groups", action="store_true", help="also groups that wait for sessions")
    parser.add_argument("--filtered", default="", help="also what this consumer did not get")


def _replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Moves a consumer; units from there on are redelivered."
    parser.add_argument("--consumer", required=True, help="its name")
    parser.add_argument(
        "--from",
        dest="start",
        required=True,
        help="earliest, latest, milliseconds since 1970 UTC, or id:DELIVERY_ID",
    )


def _delete_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Deletes a consumer, which then retains no sessions."
    parser.add_argument("--consumer", required=True, help="its name")


TOOLS = {
    "delete": (_delete_flags, _delete),
    "inspect": (_inspect_flags, _inspect),
    "replay": (_replay_flags, _replay),
}
"""The flags and the function of each tool, by tool name."""
