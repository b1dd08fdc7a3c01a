"""`rollmesh tail`: prints sessions as they end, a line for each."""

import argparse
import asyncio
import json
import os
import sys
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rollmesh.cli.words import plain
from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime import clock
from rollmesh.runtime.access import identity
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.config import LOCAL_ROUTER
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.runs import told
from rollmesh.v1 import session_pb2, trajectory_pb2

_PAUSE_S, _MOST_PAUSE_S = 0.5, 10.0
_PAGE = 5_000
_EXACT = trajectory_pb2.FIDELITY_REASON_EXACT


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 if the mesh refuses, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh tail", description=__doc__)
    parser.add_argument("--router", default=LOCAL_ROUTER, help="host:port of the routers")
    parser.add_argument("--collector", default="", help="host:port; default: those of the routers")
    parser.add_argument("--last-ms", type=int, default=0, help="begin so long ago, milliseconds")
    parser.add_argument("--run-id", default="", help="only sessions of this run")
    outcomes = ("COMPLETED", "FAILED", "ABORTED", "LOST")
    parser.add_argument("--outcome", choices=outcomes, help="only sessions that ended so")
    parser.add_argument("--json", action="store_true", help="a JSON object for each")
    identity.add_flags(parser)
    options = parser.parse_args()
    try:
        return identity.run_tool(parser.prog, options, os.environ, partial(_follow, options))
    except KeyboardInterrupt:
        return 0


async def _follow(options: argparse.Namespace) -> list[str]:
    """Prints sessions until it is stopped. A collector that is away is waited for.

    Sessions that are stored at the start are read once, and old ones skipped.
    """
    since, after = clock.unix_ms() - options.last_ms, ""
    backoff = Backoff(_PAUSE_S, _MOST_PAUSE_S)
    addresses = MeshAddresses(
        router=options.router, collector=options.collector, **identity.given(options)
    )
    async with Client(addresses) as client:
        while True:
            try:
                page = await client.stored_sessions(after=after, limit=_PAGE)
            except RollmeshError as error:
                if error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                print(f"rollmesh tail: {error.message}", file=sys.stderr, flush=True)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            for one in page:
                after = one.resume_token
                if one.HasField("session") and one.session.closed_unix_ms >= since:
                    _show(line_of(one.session), options)
            if len(page) < _PAGE:
                await asyncio.sleep(_PAUSE_S)


def line_of(session: session_pb2.SessionRecord) -> dict[str, Any]:
    """Returns the words of a session's line, by their names in JSON."""
    trees = [session.tree] if session.HasField("tree") else []
    rows: list[trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree]
    rows = [*session.trajectories, *trees]
    versions = [span.policy_version for row in rows for span in row.version_spans]
    reasons = {reason for row in rows for reason in row.reasons} - {_EXACT}
    enum = trajectory_pb2.FidelityReason.DESCRIPTOR
    return {
        "closed_unix_ms": session.closed_unix_ms,
        "session_id": session.session_id,
        "run_id": session.run_id,
        "group_id": session.group_id,
        "sample_index": session.sample_index,
        "outcome": name_of(session_pb2.SessionOutcome.DESCRIPTOR, session.outcome),
        "reward": session.reward if session.HasField("reward") else None,
        "turns": session.turns,
        "seconds": (session.closed_unix_ms - session.opened_unix_ms) / 1000,
        "policy": told(max(versions)) if versions else None,
        "reasons": sorted(name_of(enum, reason) for reason in reasons),
        "superseded": session.superseded,
        "error": session.abandoned or session.metadata.get("error", ""),
    }


def _show(line: dict[str, Any], options: argparse.Namespace) -> None:
    if options.run_id not in ("", line["run_id"]):
        return
    if options.outcome not in (None, line["outcome"]):
        return
    print(json.dumps(line, ensure_ascii=False) if options.json else words_of(line), flush=True)


def words_of(line: dict[str, Any]) -> str:
    """Returns a line for people. It has no character that moves a terminal's cursor."""
    at = datetime.fromtimestamp(line["closed_unix_ms"] / 1000, UTC).strftime("%H:%M:%S")
    reward = "-" if line["reward"] is None else f"{line['reward']:.3f}"
    parts = [at, line["session_id"], f"{line['outcome']:<9}", f"reward {reward}"]
    parts += [f"turns {line['turns']}", f"{line['seconds']:.1f} s", line["policy"] or ""]
    if line["group_id"]:
        parts.append(f"group {line['group_id']} {line['sample_index']}")
    parts += ["superseded"] * line["superseded"] + line["reasons"] + [line["error"][:200]]
    return plain("  ".join(one for one in parts if one))


if __name__ == "__main__":
    sys.exit(main())
