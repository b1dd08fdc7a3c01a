"""`rollmesh harbor connect`: answers the agents of a Harbor server through its inference relay."""

import argparse
import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from rollmesh.client import Client, MeshAddresses
from rollmesh.integrations.harbor import Connector, HarborError, ServedTrials
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import LOCAL_ROUTER
from rollmesh.runtime.process import stop_signals
from rollmesh.runtime.telemetry import configure_logging


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 if the server refuses, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh harbor", description=__doc__)
    commands = parser.add_subparsers(required=True)
    connect = commands.add_parser("connect", help="dials the relay, and answers its requests")
    connect.add_argument("--server", required=True, help="URL of the Harbor server")
    connect.add_argument("--session", required=True, help="the session_id of the submitted jobs")
    connect.add_argument(
        "--key-file", type=Path, required=True, help="file with the server's HARBOR_API_KEY"
    )
    connect.add_argument("--reward", default="reward", help="the session's reward of the verifier")
    connect.add_argument("--run-id", default="", help="the run of the sessions")
    connect.add_argument(
        "--data-dir", type=Path, help="the server's, to write sampled tokens into its trials"
    )
    connect.add_argument("--tokenizer", type=Path, help="folder of the model, for their text")
    connect.add_argument("--router", default=LOCAL_ROUTER, help="host:port of the routers")
    identity.add_flags(connect)
    options = parser.parse_args()
    configure_logging("harbor", "info")
    return identity.run_tool("rollmesh harbor", options, os.environ, partial(_connect, options))


async def _connect(options: argparse.Namespace) -> list[str]:
    """Answers until a stop. Returns why it cannot."""
    try:
        key = options.key_file.read_text().strip()
    except OSError as error:
        return [f"--key-file: {error}"]
    trials = None
    if options.data_dir is not None:
        trials = ServedTrials(data_dir=options.data_dir, tokenizer=options.tokenizer)
    async with Client(MeshAddresses(router=options.router)) as client:
        connector = Connector(
            client,
            options.server,
            options.session,
            key,
            reward=options.reward,
            run_id=options.run_id,
            trials=trials,
        )
        with stop_signals() as stop:
            running = asyncio.create_task(connector.run())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            running.cancel()
            await asyncio.wait({running})
    failure = None if running.cancelled() else running.exception()
    if failure is not None and not isinstance(failure, HarborError):
        raise failure
    return [str(failure)] if failure is not None else []


if __name__ == "__main__":
    sys.exit(main())
