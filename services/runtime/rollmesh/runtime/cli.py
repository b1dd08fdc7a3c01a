"""The `rollmesh` command: one service, or a whole mesh on this machine."""

import argparse
import asyncio
import os
import sys
from contextlib import closing
from pathlib import Path

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.logs import configure_logging
from rollmesh.runtime.mesh import SERVICES, plan_mesh, read_mesh
from rollmesh.runtime.serving import stop_signals
from rollmesh.runtime.supervisor import StartError, Supervisor, free_ports

_USAGE = f"""usage: rollmesh up [--config mesh.toml]
       rollmesh SERVICE [flags]        one of {", ".join(SERVICES)}
       rollmesh SERVICE --help         its flags
       rollmesh collector export|inspect|replay [flags]
       rollmesh template check MODEL   what a gateway finds about a chat template
"""


def main() -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in SERVICES:
        command = [sys.executable, "-m", f"rollmesh.{arguments[0]}", *arguments[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - becomes the service
    if arguments[:2] == ["template", "check"]:
        command = [sys.executable, "-m", "rollmesh.gateway.template_check", *arguments[2:]]
        os.execv(sys.executable, command)  # noqa: S606 - becomes the check
    if arguments and arguments[0] == "up":
        return _up(arguments[1:])
    print(_USAGE, end="", file=sys.stderr)
    return 0 if arguments in (["--help"], ["-h"]) else 2


def _up(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rollmesh up", description=_up.__doc__)
    parser.add_argument("--config", type=Path, help="TOML file that describes the mesh")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    options = parser.parse_args(arguments)
    configure_logging("up", "info")
    try:
        tables = read_mesh(options.config)
        with closing(free_ports()) as ports:
            specs = plan_mesh(tables, ports.__next__)
    except ConfigError as error:
        print(f"rollmesh up: {error}", file=sys.stderr)
        return 2
    log_dir = Path(tables.get("mesh", {}).get("data_dir", "var/mesh")) / "logs"
    supervisor = Supervisor(specs, log_dir, options.start_timeout)
    failure = asyncio.run(_supervise(supervisor))
    if failure:
        print(f"rollmesh up: {failure}", file=sys.stderr)
    return 1 if failure else 0


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
