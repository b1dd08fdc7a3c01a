"""`rollmesh import`: opens sessions that start from a recorded node, or from a conversation.

It prints a line of JSON for each: its id, and the base URL and the key for its agent, which are
secrets. The sessions stay open until somebody closes them, or until they were idle for too long.
"""

import argparse
import asyncio
import json
import os
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.client import Client, MeshAddresses, recorded_node, start_of_atif
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import ConfigError

_MOST = 1024


def main() -> int:
    """Returns the exit code: 0, 1 if the mesh refuses, 2 for a bad flag or document."""
    parser = argparse.ArgumentParser(prog="rollmesh import", description=__doc__)
    for name in ("gateway", "sidecar"):
        parser.add_argument(
            f"--{name}", default="", help="host:port; default: those of the routers"
        )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--session", default="", help="a closed session with recorded messages")
    source.add_argument("--atif", type=Path, help="an ATIF document, a JSON file")
    parser.add_argument("--node", type=int, help="the node that the context ends with")
    parser.add_argument("--step", type=int, help="the step that it ends with; default: the last")
    parser.add_argument("--as-text", action="store_true", help="let the template make the ids anew")
    parser.add_argument("--count", type=int, default=1, help="number of sessions, one group")
    parser.add_argument("--group", default="", help="id of the group; default: a random one")
    parser.add_argument("--run-id", default="", help="id of the group's run")
    parser.add_argument("--model", default="", help="default: that of the recorded session")
    parser.add_argument("--request-id", default="", help="makes the command repeatable")
    parser.add_argument("--record-messages", action="store_true", help="record messages, too")
    parser.add_argument("--conversation", type=Path, help="file for the conversation, as JSON")
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    if bool(options.session) != (options.node is not None):
        parser.error("--node and --session belong together")
    if not 1 <= options.count <= _MOST:
        parser.error(f"--count: give 1 to {_MOST}")
    return identity.run_tool(parser.prog, options, os.environ, partial(_open, options))


async def _open(options: argparse.Namespace) -> None:
    """Opens the sessions, and prints each. A repeat with a request id opens no others."""
    addresses = MeshAddresses.of(options)
    async with Client(addresses) as client:
        if options.session:
            start = await client.start_at(options.session, options.node, as_text=options.as_text)
        else:
            document = _read(options.atif)
            node = None if options.as_text else recorded_node(document, options.step)
            start = await client.start_at(*node) if node else start_of_atif(document, options.step)
        if options.conversation:
            names = ("messages", "tools", "template_options")
            said = json.dumps({name: getattr(start, name) for name in names})
            try:
                await asyncio.to_thread(options.conversation.write_text, said, "utf-8")
            except OSError as error:
                raise ConfigError(f"--conversation: {error}") from error
        name = options.request_id or uuid.uuid4().hex
        group_id = options.group or (name if options.count > 1 else "")
        requests = [
            client.session_request(
                start=start,
                model=options.model,
                group_id=group_id,
                group_size=options.count,
                sample_index=index,
                run_id=options.run_id,
                request_id=f"{name}-{index}",
                record_messages=options.record_messages or None,
            )
            for index in range(options.count)
        ]
        is_new = not options.request_id
        for index, request in enumerate(requests):
            session = await client.open_session(request, is_new=is_new)
            line = {
                "session_id": session.session_id,
                "base_url": session.base_url,
                "api_key": session.api_key,
                "model": session.model,
                "group_id": group_id,
                "sample_index": index,
                "context_tokens": len(start.token_ids),
            }
            print(json.dumps(line), flush=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--atif: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("--atif: is no JSON object; give an ATIF document")
    return document


if __name__ == "__main__":
    sys.exit(main())
