"""Tools of operators: `rollmesh gateway dead-letters` and `rollmesh gateway revoke-key`.

The first manages the sessions that running gateways have set aside, the second ends the keys of
open ones.
"""

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from google.protobuf import json_format

from rollmesh.mesh.directory import GatewayDirectory
from rollmesh.runtime import clock
from rollmesh.runtime.access import identity
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.config import LOCAL_ROUTER, ConfigError
from rollmesh.runtime.errors import NoGatewayError, RollmeshError
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import gateway_pb2 as pb

if TYPE_CHECKING:
    from rollmesh.v1.gateway_pb2_grpc import GatewayServiceAsyncStub as Stub

DEAD_LETTERS = "dead-letters"
REVOKE_KEY = "revoke-key"
_TIMEOUT_S = 60.0
_REPEATED_MS = 10_000
"""Time in which a gateway that was lost is looked for again, milliseconds."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0


def run_dead_letters(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the tool and returns 0, 1 if a gateway returns an error, or 2 for an invalid flag."""
    parser = argparse.ArgumentParser(prog=f"rollmesh gateway {DEAD_LETTERS}")
    _add_addresses(parser)
    parser.add_argument("work", nargs="?", default="list", choices=("list", "retry", "drop"))
    parser.add_argument("session_ids", nargs="*", help="retry, drop: which; with --all, all")
    parser.add_argument("--all", action="store_true", help="retry, drop: every dead letter")
    identity.add_flags(parser)
    options = parser.parse_args(argv)
    if options.work != "list" and options.all == bool(options.session_ids):
        parser.error(f"{options.work}: give session ids, or --all")
    return _run(DEAD_LETTERS, _connected, options, environ)


def run_revoke_key(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the tool and returns 0, 1 if a gateway returns an error, or 2 for an invalid flag."""
    parser = argparse.ArgumentParser(
        prog=f"rollmesh gateway {REVOKE_KEY}",
        description="Ends the keys of open sessions. Agents that have them get 401; whoever opened "
        "a session gets its next key by opening it again under the same request id.",
    )
    _add_addresses(parser)
    parser.add_argument("session_ids", nargs="+", metavar="SESSION_ID")
    identity.add_flags(parser)
    return _run(REVOKE_KEY, _revoked, parser.parse_args(argv), environ)


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router", default=LOCAL_ROUTER, help="host:port of the routers, which know gateways"
    )
    parser.add_argument(
        "--gateway", default="", help="host:port of the only one; the router is then not asked"
    )


def _run(
    tool: str,
    work: Callable[[argparse.Namespace], Coroutine[None, None, list[str]]],
    options: argparse.Namespace,
    environ: Mapping[str, str],
) -> int:
    """Runs a tool's work, which returns the failures, and returns the exit code."""
    try:
        identity.present_files(options, environ)
    except ConfigError as error:
        print(f"rollmesh gateway {tool}: {error}", file=sys.stderr)
        return 2
    try:
        failed = asyncio.run(work(options))
    except RollmeshError as error:
        failed = [error.message]
    for message in failed:
        print(f"rollmesh gateway {tool}: {message}", file=sys.stderr)
    return 1 if failed else 0


async def _revoked(options: argparse.Namespace) -> list[str]:
    """Ends the key of each session and returns the errors of the sessions that keep theirs."""
    failed = []
    async with aclosing(GatewayDirectory(options.router, options.gateway)) as gateways:
        for session_id in options.session_ids:
            try:
                await _end_key(gateways, session_id)
            except RollmeshError as error:
                failed.append(f"{session_id}: {error.message}")
            else:
                _say(f"{session_id}: its key is ended")
    return failed


async def _end_key(gateways: GatewayDirectory, session_id: str) -> None:
    """Ends the key of a session where it is served, also if another gateway takes it over now."""
    request = pb.EndSessionKeyRequest(session_id=session_id, request_id=uuid.uuid4().hex)
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    until_ms = clock.monotonic_ms() + _REPEATED_MS
    while True:
        try:
            gateway = await gateways.of(session_id)
            with typed_errors():
                await gateway.stub.EndSessionKey(request, timeout=_TIMEOUT_S)
        except RollmeshError as error:
            is_moving = gateways.failed(session_id, error) or isinstance(error, NoGatewayError)
            if not is_moving or clock.monotonic_ms() >= until_ms:
                raise
        else:
            return
        await asyncio.sleep(backoff.next_s())


async def _connected(options: argparse.Namespace) -> list[str]:
    """Does the work and returns the errors of the gateways that failed."""
    async with aclosing(GatewayDirectory(options.router, options.gateway)) as gateways:
        if options.session_ids:
            for session_id in options.session_ids:
                gateway = await gateways.of(session_id)
                with typed_errors():
                    await _retry_or_drop(gateway.stub, options.work, session_id)
            _say(f"{options.work}: {len(options.session_ids)} sessions")
            return []
        addresses = await gateways.addresses()
        if not addresses:
            raise NoGatewayError("no gateway is registered; give the address of one as --gateway")
        count, failed = 0, []
        for address in addresses:
            try:
                count += await _work_through(gateways.at(address), options.work)
            except RollmeshError as error:
                failed.append(f"gateway {address}: {error.message}")
        if options.work != "list":
            _say(f"{options.work}: {count} sessions")
        return failed


async def _work_through(stub: "Stub", work: str) -> int:
    """Shows, retries or drops all dead letters of one gateway and returns their number."""
    with typed_errors():
        letters = [letter async for letter in _letters(stub)]
        for letter in letters:
            if work == "list":
                _say(json_format.MessageToJson(letter, indent=None))
            else:
                await _retry_or_drop(stub, work, letter.session_id)
    return len(letters)


async def _letters(stub: "Stub") -> AsyncIterator[pb.DeadLetter]:
    request = pb.ListDeadLettersRequest()
    while True:
        page = await stub.ListDeadLetters(request, timeout=_TIMEOUT_S)
        for letter in page.dead_letters:
            yield letter
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _retry_or_drop(stub: "Stub", work: str, session_id: str) -> None:
    if work == "retry":
        request = pb.RetryDeadLetterRequest(session_id=session_id)
        await stub.RetryDeadLetter(request, timeout=_TIMEOUT_S)
    else:
        await stub.DropDeadLetter(
            pb.DropDeadLetterRequest(session_id=session_id), timeout=_TIMEOUT_S
        )


def _say(text: str) -> None:
    print(text)
