"""Tools of operators: `rollmesh gateway sessions` and `rollmesh gateway dead-letters`.

They work on open sessions, their keys, and the sessions that were set aside.
"""

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from rollmesh.mesh import GatewayDirectory
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.access import identity
from rollmesh.runtime.codec import plain
from rollmesh.runtime.config import LOCAL_ROUTER
from rollmesh.runtime.errors import NoGatewayError, RollmeshError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_admin_pb2 as pb, gateway_pb2
from rollmesh.v1.gateway_admin_pb2_grpc import GatewayAdminServiceStub
from rollmesh.v1.gateway_pb2_grpc import GatewayServiceStub

_TIMEOUT_S = 60.0
_REPEATED_MS = 10_000
"""Time in which a gateway that was lost is looked for again, milliseconds."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0


async def _show(channel: grpc.aio.Channel, session_id: str) -> str:
    request = gateway_pb2.GetSessionRequest(session_id=session_id, with_messages=True)
    shown = gateway_pb2.GetSessionResponse()
    async for page in _pages(GatewayServiceStub(channel).GetSession, request):
        shown.MergeFrom(page)
    shown.ClearField("next_page_token")
    return json.dumps(plain(shown), ensure_ascii=False)


async def _end(channel: grpc.aio.Channel, session_id: str) -> str:
    request = pb.EndSessionRequest(session_id=session_id)
    done = await GatewayAdminServiceStub(channel).EndSession(request, timeout=_TIMEOUT_S)
    return f"{session_id}: closed, {len(done.trajectory_ids)} trajectories"


async def _revoke(repeat: str, channel: grpc.aio.Channel, session_id: str) -> str:
    request = pb.EndSessionKeyRequest(session_id=session_id, request_id=repeat)
    await GatewayAdminServiceStub(channel).EndSessionKey(request, timeout=_TIMEOUT_S)
    return f"{session_id}: its key is ended"


async def _retry(channel: grpc.aio.Channel, session_id: str) -> str:
    request = pb.RetryDeadLetterRequest(session_id=session_id)
    await GatewayAdminServiceStub(channel).RetryDeadLetter(request, timeout=_TIMEOUT_S)
    return f"{session_id}: served or delivered again"


async def _drop(channel: grpc.aio.Channel, session_id: str) -> str:
    request = pb.DropDeadLetterRequest(session_id=session_id)
    await GatewayAdminServiceStub(channel).DropDeadLetter(request, timeout=_TIMEOUT_S)
    return f"{session_id}: dropped"


async def _open_sessions(options: argparse.Namespace, channel: grpc.aio.Channel) -> Sequence[Any]:
    request = pb.ListSessionsRequest(
        run_id=options.run_id, group_id=options.group_id, idle_ms=int(options.idle_s * 1000)
    )
    pages = _pages(GatewayAdminServiceStub(channel).ListSessions, request)
    return [one async for page in pages for one in page.sessions]


async def _dead_letters(_: argparse.Namespace, channel: grpc.aio.Channel) -> Sequence[Any]:
    pages = _pages(GatewayAdminServiceStub(channel).ListDeadLetters, pb.ListDeadLettersRequest())
    return [one async for page in pages for one in page.dead_letters]


async def _pages(call: Callable[..., Awaitable[Any]], request: Any) -> AsyncIterator[Any]:
    while True:
        page = await call(request, timeout=_TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


_Work = Callable[[grpc.aio.Channel, str], Awaitable[str]]
_TOOLS: Mapping[str, tuple[Callable[..., Awaitable[Sequence[Any]]], Mapping[str, _Work]]] = {
    "sessions": (
        _open_sessions,
        {"show": _show, "end": _end, "revoke-key": partial(_revoke, uuid.uuid4().hex)},
    ),
    "dead-letters": (_dead_letters, {"retry": _retry, "drop": _drop}),
}
"""The lister of each tool, and its work on single sessions."""
TOOLS = tuple(_TOOLS)
"""The names of the tools."""


def run_tool(tool: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a tool and returns 0, 1 if a gateway returns an error, or 2 for an invalid flag."""
    list_all, works = _TOOLS[tool]
    parser = argparse.ArgumentParser(prog=f"rollmesh gateway {tool}", epilog=_EPILOG[tool])
    parser.add_argument("--router", default=LOCAL_ROUTER, help="host:port of the routers")
    parser.add_argument(
        "--gateway", default="", help="host:port of the only one; the router is then not asked"
    )
    parser.add_argument("work", nargs="?", default="list", choices=("list", *works))
    parser.add_argument("session_ids", nargs="*", metavar="SESSION_ID", help="for all but list")
    if tool == "sessions":
        parser.add_argument("--run-id", default="", help="list: only sessions of this run")
        parser.add_argument("--group-id", default="", help="list: only sessions of this group")
        parser.add_argument("--idle-s", type=float, default=0, help="list: only those idle so long")
    else:
        parser.add_argument("--all", action="store_true", help="retry, drop: every dead letter")
    identity.add_flags(parser)
    options = parser.parse_args(argv)
    takes_ids = options.work != "list" and not getattr(options, "all", False)
    if takes_ids != bool(options.session_ids):
        parser.error(f"{options.work}: {'give session ids' if takes_ids else 'give no session id'}")
    if not 0 <= getattr(options, "idle_s", 0) < 1e9:
        parser.error("--idle-s: give seconds, at least 0")
    work = partial(_run, options, partial(list_all, options), works.get(options.work))
    return identity.run_tool(parser.prog, options, environ, work)


_EPILOG = {
    "sessions": "`end` closes a session as aborted: it is delivered with the turns it has, and "
    "without a reward. `revoke-key` ends a key: agents that have it get 401, and the opener of the "
    "session gets its next key by opening it again under the same request id.",
    "dead-letters": "`retry` delivers a closed session again and reopens an open one. `drop` "
    "deletes everything that the journal has of a session.",
}


async def _run(
    options: argparse.Namespace,
    list_all: Callable[[grpc.aio.Channel], Awaitable[Sequence[Any]]],
    work: _Work | None,
) -> list[str]:
    """Lists at every gateway, or works on sessions. Returns the errors."""
    failed: list[str] = []
    session_ids = list(options.session_ids)
    async with aclosing(GatewayDirectory(options.router, options.gateway)) as gateways:
        if not session_ids:
            addresses = await gateways.addresses()
            if not addresses:
                raise NoGatewayError("no gateway is registered; give the address of one: --gateway")
            for address in addresses:
                try:
                    with typed_errors():
                        found = await list_all(gateways.channel(address))
                except RollmeshError as error:
                    failed.append(f"gateway {address}: {error.message}")
                    continue
                session_ids += [one.session_id for one in found]
                for one in found if work is None else ():
                    print(json.dumps(plain(one), ensure_ascii=False))
        for session_id in session_ids if work else ():
            assert work is not None
            try:
                print(await _where_served(gateways, session_id, work))
            except RollmeshError as error:
                failed.append(f"{session_id}: {error.message}")
    return failed


async def _where_served(gateways: GatewayDirectory, session_id: str, work: _Work) -> str:
    """Works on a session where it is served, also if another gateway takes it over now."""
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    until_ms = clock.monotonic_ms() + _REPEATED_MS
    while True:
        try:
            gateway = await gateways.of(session_id)
            with typed_errors():
                return await work(gateways.channel(gateway.route.address), session_id)
        except RollmeshError as error:
            is_moving = gateways.failed(session_id, error) or isinstance(error, NoGatewayError)
            if not is_moving or clock.monotonic_ms() >= until_ms:
                raise
        await asyncio.sleep(backoff.next_s())
