"""`rollmesh tail`: prints sessions as they end, a line for each."""

import argparse
import asyncio
import json
import os
import sys
from functools import partial
from typing import Any

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime import Backoff, clock, line_of, words_of
from rollmesh.runtime.access import identity
from rollmesh.runtime.errors import RollmeshError

_PAUSE_S, _MOST_PAUSE_S = 0.5, 10.0
_PAGE = 5_000


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 if the mesh refuses, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh tail", description=__doc__)
    parser.add_argument("--last-ms", type=int, default=0, help="begin so long ago, milliseconds")
    parser.add_argument("--run-id", default="", help="only sessions of this run")
    outcomes = ("COMPLETED", "FAILED", "ABORTED", "LOST")
    parser.add_argument("--outcome", choices=outcomes, help="only sessions that ended so")
    parser.add_argument("--json", action="store_true", help="a JSON object for each")
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    try:
        return identity.run_tool(parser.prog, options, os.environ, partial(_follow, options))
    except KeyboardInterrupt:
        return 0


async def _follow(options: argparse.Namespace) -> list[str]:
    """Prints sessions until it is stopped. A collector that is away is waited for.

    Sessions that are stored at the start are read once, and old ones skipped.
    """
    since, after, away = clock.unix_ms() - options.last_ms, "", ""
    backoff = Backoff(_PAUSE_S, _MOST_PAUSE_S)
    addresses = MeshAddresses.of(options)
    async with Client(addresses) as client:
        while True:
            try:
                page = await client.stored_sessions(after=after, limit=_PAGE)
            except RollmeshError as error:
                if error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                if error.message != away:
                    print(f"rollmesh tail: {error.message}", file=sys.stderr, flush=True)
                away = error.message
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            away = ""
            for one in page:
                after = one.resume_token
                if one.HasField("session") and one.session.closed_unix_ms >= since:
                    _show(line_of(one.session), options)
            if len(page) < _PAGE:
                await asyncio.sleep(_PAUSE_S)


def _show(line: dict[str, Any], options: argparse.Namespace) -> None:
    if options.run_id not in ("", line["run_id"]):
        return
    if options.outcome not in (None, line["outcome"]):
        return
    print(json.dumps(line, ensure_ascii=False) if options.json else words_of(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
