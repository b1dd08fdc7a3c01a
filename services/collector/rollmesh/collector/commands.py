"""`rollmesh collector delete|export|inspect|replay`: reads a collector, moves its consumers."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import message as protobuf_message

from rollmesh.collector.export import decoder, export, plain, summary_of
from rollmesh.mesh.directory import CollectorDirectory
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import LOCAL_ROUTER, ConfigError
from rollmesh.runtime.errors import NoCollectorError, RollmeshError
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.v1 import (
    collector_pb2 as pb,
    collector_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
)

if TYPE_CHECKING:
    import grpc

    from rollmesh.v1.collector_pb2_grpc import CollectorServiceAsyncStub as Stub

_TIMEOUT_S = 60.0
_PROBE_S = 5.0
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
        "--collector",
        default="",
        help="host:port, or several of one store, separated by commas; the router is then not "
        "asked",
    )
    identity.add_flags(parser)
    add_flags, work = TOOLS[name]
    add_flags(parser)
    options = parser.parse_args(argv)
    try:
        identity.present_files(options, environ)
        asyncio.run(_connected(work, options))
    except ConfigError as error:
        _say(f"rollmesh collector {name}: {error}", error=True)
        return 2
    except RollmeshError as error:
        _say(f"rollmesh collector {name}: {error.message}", error=True)
        return 1
    return 0


async def _connected(
    work: "Callable[[Stub, argparse.Namespace], Awaitable[None]]", options: argparse.Namespace
) -> None:
    """Runs a tool at a collector that answers. Any does, as they have one store."""
    collectors = CollectorDirectory(options.router, options.collector)
    try:
        await _find(collectors)
        async with collectors.one() as channel:
            with typed_errors():
                await work(collector_pb2_grpc.CollectorServiceStub(channel), options)
    finally:
        await collectors.aclose()


async def _find(collectors: CollectorDirectory) -> None:
    """Makes the first collector that answers the one in use."""
    try:
        await collectors.call(_probe)
    except RollmeshError as error:
        raise NoCollectorError(
            f"no collector answers: {error.message}; give the address of a router as --router, or "
            "that of a collector as --collector"
        ) from error


async def _probe(channel: "grpc.aio.Channel") -> None:
    stub: server_pb2_grpc.ServerServiceAsyncStub = server_pb2_grpc.ServerServiceStub(channel)
    with typed_errors():
        await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=_PROBE_S)


async def _export(stub: "Stub", options: argparse.Namespace) -> None:
    request = pb.ReadSessionsRequest(session_id=options.session)
    chosen = _chosen(_sessions(stub, request), options)
    sessions, rows = await export(chosen, options.to, decoder(options.tokenizer))
    _say(f"{sessions} sessions, {rows} trajectories: {options.to}")


async def _inspect(stub: "Stub", options: argparse.Namespace) -> None:
    selection = _selection(options)
    if selection and (options.session or not options.sessions):
        flag = f"--{next(iter(selection)).replace('_', '-')}"
        raise ConfigError(f"{flag} selects sessions; give --sessions, without --session")
    if options.session:
        request = pb.ReadSessionsRequest(session_id=options.session, without_arrays=True)
        async for session in _sessions(stub, request):
            _show(session)
        return
    if options.sessions:
        request = pb.ReadSessionsRequest(without_arrays=True)
        async for session in _chosen(_sessions(stub, request), options):
            _say(json.dumps(summary_of(session), ensure_ascii=False))
        return
    _show(await stub.GetStats(pb.GetStatsRequest(), timeout=_TIMEOUT_S))
    if options.consumers:
        await _show_consumers(stub)
    if options.groups:
        await _show_groups(stub)
    if options.filtered:
        await _show_filtered(stub, options.filtered)


async def _show_consumers(stub: "Stub") -> None:
    request = pb.ListConsumersRequest()
    while True:
        page = await stub.ListConsumers(request, timeout=_TIMEOUT_S)
        for consumer in page.consumers:
            _show(consumer)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _show_groups(stub: "Stub") -> None:
    request = pb.ListOpenGroupsRequest()
    while True:
        page = await stub.ListOpenGroups(request, timeout=_TIMEOUT_S)
        for group in page.groups:
            _show(group)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _show_filtered(stub: "Stub", consumer: str) -> None:
    request = pb.ListFilteredRequest(consumer=consumer)
    while True:
        page = await stub.ListFiltered(request, timeout=_TIMEOUT_S)
        for entry in page.entries:
            _show(entry)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _replay(stub: "Stub", options: argparse.Namespace) -> None:
    request = pb.SeekRequest(consumer=options.consumer, position=read_position(options.start))
    sought = await stub.Seek(request, timeout=_TIMEOUT_S)
    _say(f"{options.consumer}: {sought.again} units redelivered, {sought.skipped} skipped")


async def _delete(stub: "Stub", options: argparse.Namespace) -> None:
    request = pb.DeleteConsumerRequest(consumer=options.consumer)
    await stub.DeleteConsumer(request, timeout=_TIMEOUT_S)
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
    stub: "Stub", request: pb.ReadSessionsRequest
) -> AsyncIterator[session_pb2.SessionRecord]:
    async for response in read_stream(stub.ReadSessions(request)):
        if response.damaged_session_id:
            _say(f"session {response.damaged_session_id} is damaged; left out", error=True)
        else:
            yield response.session


async def _chosen(
    sessions: AsyncIterator[session_pb2.SessionRecord], options: argparse.Namespace
) -> AsyncIterator[session_pb2.SessionRecord]:
    """Yields the sessions that the flags select."""
    async for session in sessions:
        shown = summary_of(session)
        if all(shown[name] == value for name, value in _selection(options).items()):
            yield session


def _selection(options: argparse.Namespace) -> dict[str, str]:
    """Returns the selection flags that are given."""
    given = {name: getattr(options, name) for name in _SELECTED}
    return {name: value for name, value in given.items() if value}


def _show(message: protobuf_message.Message) -> None:
    """Prints a message as one line of JSON."""
    _say(json.dumps(plain(message), ensure_ascii=False))


def _say(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout)


def _export_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes stored sessions to a file, one row for each trajectory."
    parser.add_argument("--to", type=Path, required=True, help="FILE.jsonl or FILE.parquet")
    parser.add_argument("--session", default="", help="only the session of this id")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of the model; adds `text` and `sampled_texts`"
    )
    _selection_flags(parser)


def _selection_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-id", default="", help="only sessions of this run")
    parser.add_argument("--group-id", default="", help="only sessions of this group")
    parser.add_argument("--model", default="", help="only sessions of this model")
    outcomes, purposes = ("COMPLETED", "FAILED", "ABORTED"), ("TRAIN", "EVAL", "OTHER")
    parser.add_argument("--outcome", choices=outcomes, help="only sessions that ended so")
    parser.add_argument("--purpose", choices=purposes, help="only sessions of this purpose")


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints what is stored, and the units of each consumer, as lines of JSON."
    parser.add_argument("--session", default="", help="this session instead, without its arrays")
    parser.add_argument("--sessions", action="store_true", help="a line for each session instead")
    _selection_flags(parser)
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
    "export": (_export_flags, _export),
    "inspect": (_inspect_flags, _inspect),
    "replay": (_replay_flags, _replay),
}
"""The flags and the function of each tool, by tool name."""
