"""`rollmesh up`: runs a complete mesh on this machine and restarts processes that die."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rollmesh.cli.config.members import own_problems
from rollmesh.cli.services import environment, installed
from rollmesh.cli.up.supervisor import StartError, Supervisor, free_ports
from rollmesh.launch.locks import mesh_tokens, trainer_files
from rollmesh.launch.plan import plan_mesh, visible_gpus
from rollmesh.runtime import owner_only
from rollmesh.runtime.config import ConfigError, Tables, mesh_config, read_mesh
from rollmesh.runtime.process.signals import stop_signals
from rollmesh.runtime.telemetry.logs import configure_logging


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 if the mesh cannot start, 2 for a bad setting."""
    parser = argparse.ArgumentParser(prog="rollmesh up", description=__doc__)
    parser.add_argument(
        "--config", type=Path, help="TOML file of the mesh: [mesh], and a table for each service"
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    options = parser.parse_args()
    configure_logging("up", "info")
    os.umask(owner_only.UMASK)
    with closing(free_ports()) as ports:
        try:
            tables = read_mesh(options.config)
            if problems := own_problems(tables, str(options.config), installed()):
                print(*(f"rollmesh up: {one}" for one in problems), sep="\n", file=sys.stderr)
                return 2
            supervisor = _planned(tables, ports.__next__, options.start_timeout)
        except ConfigError as error:
            print(f"rollmesh up: {error}", file=sys.stderr)
            return 2
        failure = asyncio.run(_supervise(supervisor))
    if failure:
        print(f"rollmesh up: {failure}", file=sys.stderr)
    return 1 if failure else 0


def _planned(tables: Tables, free_port: Callable[[], int], start_timeout_s: float) -> Supervisor:
    """Returns the supervisor of the processes that a file describes.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    mesh = mesh_config(tables)
    tokens = mesh_tokens(mesh)
    specs = plan_mesh(tables, free_port, tokens, environment(os.environ))
    environments = {
        spec.name: {**os.environ, **visible_gpus(spec, os.environ), **spec.variables}
        for spec in specs
    }
    shown = trainer_files(mesh, tokens)
    return Supervisor(specs, environments, mesh.data_dir / "logs", start_timeout_s, shown)


async def _supervise(supervisor: Supervisor) -> str:
    """Returns why the mesh could not start; empty after a stop."""
    failure = ""
    with stop_signals() as stop:
        try:
            await supervisor.run(stop)
        except* StartError as errors:
            failure = str(errors.exceptions[0])
    return failure


if __name__ == "__main__":
    sys.exit(main())
