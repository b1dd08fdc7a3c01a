"""`rollmesh gateway dead-letters`: manages the sessions that running gateways have set aside."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from google.protobuf import json_format

from rollmesh.mesh.directories.gateways import GatewayDirectory
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import LOCAL_ROUTER, ConfigError
from rollmesh.runtime.errors import NoGatewayError, RollmeshError
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import gateway_pb2 as pb

if TYPE_CHECKING:
    from rollmesh.v1.gateway_pb2_grpc import GatewayServiceAsyncStub as Stub

DEAD_LETTERS = "dead-letters"
_TIMEOUT_S = 60.0


def run_dead_letters(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the tool; returns 0, 1 if a gateway returns an error, or 2 for an invalid flag."""
    parser = argparse.ArgumentParser(prog=f"rollmesh gateway {DEAD_LETTERS}")
    parser.add_argument(
        "--router", default=LOCAL_ROUTER, help="host:port of the routers, which know gateways"
    )
    parser.add_argument(
        "--gateway", default="", help="host:port of the only one; the router is then not asked"
    )
    parser.add_argument("work", nargs="?", default="list", choices=("list", "retry", "drop"))
    parser.add_argument("session_ids", nargs="*", help="retry, drop: which; with --all, all")
    parser.add_argument("--all", action="store_true", help="retry, drop: every dead letter")
    identity.add_flags(parser)
    options = parser.parse_args(argv)
    if options.work != "list" and options.all == bool(options.session_ids):
        parser.error(f"{options.work}: give session ids, or --all")
    try:
        identity.present_files(options, environ)
    except ConfigError as error:
        print(f"rollmesh gateway {DEAD_LETTERS}: {error}", file=sys.stderr)  # noqa: T201 - the edge
        return 2
    try:
        failed = asyncio.run(_connected(options))
    except RollmeshError as error:
        failed = [error.message]
    for message in failed:
        print(f"rollmesh gateway {DEAD_LETTERS}: {message}", file=sys.stderr)  # noqa: T201 - the edge
    return 1 if failed else 0


async def _connected(options: argparse.Namespace) -> list[str]:
    """Does the work; returns what gateways said that could not do theirs."""
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
    """Shows, retries or drops all dead letters of one gateway; returns their number."""
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
    print(text)  # noqa: T201 - its output
