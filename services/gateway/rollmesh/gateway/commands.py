"""`rollmesh gateway dead-letters`: manages the sessions that a running gateway has set aside."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from google.protobuf import json_format

from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import gateway_pb2 as pb, gateway_pb2_grpc

if TYPE_CHECKING:
    from rollmesh.v1.gateway_pb2_grpc import GatewayServiceAsyncStub as Stub

DEAD_LETTERS = "dead-letters"
_TIMEOUT_S = 60.0


def run_dead_letters(argv: Sequence[str]) -> int:
    """Runs the tool; returns 0, 1 if the gateway returns an error, or 2 for an invalid flag."""
    parser = argparse.ArgumentParser(prog=f"rollmesh gateway {DEAD_LETTERS}")
    parser.add_argument("--gateway", default="127.0.0.1:7200", help="host:port")
    parser.add_argument("work", nargs="?", default="list", choices=("list", "retry", "drop"))
    parser.add_argument("session_ids", nargs="*", help="retry, drop: which; with --all, all")
    parser.add_argument("--all", action="store_true", help="retry, drop: every dead letter")
    options = parser.parse_args(argv)
    if options.work != "list" and options.all == bool(options.session_ids):
        parser.error(f"{options.work}: give session ids, or --all")
    try:
        asyncio.run(_connected(options))
    except RollmeshError as error:
        print(f"rollmesh gateway {DEAD_LETTERS}: {error.message}", file=sys.stderr)  # noqa: T201 - the edge
        return 1
    return 0


async def _connected(options: argparse.Namespace) -> None:
    async with open_channel(options.gateway) as channel:
        stub: Stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with typed_errors():
            if options.work == "list":
                async for letter in _letters(stub):
                    print(json_format.MessageToJson(letter, indent=None))  # noqa: T201 - its output
                return
            ids = options.session_ids or [one.session_id async for one in _letters(stub)]
            for session_id in ids:
                await _settle(stub, options.work, session_id)
        print(f"{options.work}: {len(ids)} sessions")  # noqa: T201 - its output


async def _letters(stub: "Stub") -> AsyncIterator[pb.DeadLetter]:
    request = pb.ListDeadLettersRequest()
    while True:
        page = await stub.ListDeadLetters(request, timeout=_TIMEOUT_S)
        for letter in page.dead_letters:
            yield letter
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _settle(stub: "Stub", work: str, session_id: str) -> None:
    if work == "retry":
        request = pb.RetryDeadLetterRequest(session_id=session_id)
        await stub.RetryDeadLetter(request, timeout=_TIMEOUT_S)
    else:
        await stub.DropDeadLetter(
            pb.DropDeadLetterRequest(session_id=session_id), timeout=_TIMEOUT_S
        )
