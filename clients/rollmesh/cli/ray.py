"""The command `rollmesh ray`."""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import ray

from rollmesh.cli.config import installed, own_problems
from rollmesh.integrations.ray import Mesh, MeshError
from rollmesh.launch import mesh_tokens, trainer_files
from rollmesh.runtime import mesh_config, owner_only, read_mesh
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.telemetry import configure_logging


def main() -> int:
    """Returns the exit code: 0, 1 if the mesh is not there or not ready, 2 for a bad setting."""
    options = _parser().parse_args()
    configure_logging("ray", "warning")
    os.umask(owner_only.UMASK)
    try:
        if options.command == "up" and (problems := _problems(options.config)):
            print(*(f"rollmesh ray: {one}" for one in problems), sep="\n", file=sys.stderr)
            return 2
        try:
            ray.init(address=options.address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            print(f"rollmesh ray: {error}; {_how_to_get_in()}", file=sys.stderr)
            return 1
        return _run(options)
    except ConfigError as error:
        print(f"rollmesh ray: {error}", file=sys.stderr)
        return 2
    except (MeshError, ConnectionError) as error:
        print(f"rollmesh ray: {error}", file=sys.stderr)
        return 1


def _how_to_get_in() -> str:
    """Returns the remedy if the cluster needs a token, which Ray reports only in its own log."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return (
            "check that `ray start` runs there, and that ~/.ray/auth_token is the cluster's token"
        )
    return (
        "check that `ray start` runs there; if Ray says InvalidAuthToken, the cluster asks for its "
        "token: set RAY_AUTH_MODE=token, with the cluster's ~/.ray/auth_token on this machine"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollmesh ray", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, doc in (
        ("up", "brings the mesh up, and waits until it is ready"),
        ("status", "shows the services"),
        ("scale", "brings services to a number"),
        ("targets", "prints the Prometheus endpoints for file_sd_configs"),
        ("down", "stops the mesh"),
    ):
        command = commands.add_parser(name, help=doc, description=doc)
        command.add_argument("--name", default="rollmesh", help="name of the mesh in the cluster")
        command.add_argument("--address", default="auto", help="of the cluster, as for ray.init")
        command.add_argument("--timeout", type=float, default=300.0, help="seconds")
        if name == "up":
            command.add_argument("--config", type=Path, required=True, help="the mesh file")
        if name == "scale":
            for service in ("engines", "gateways", "sidecars"):
                command.add_argument(f"--{service}", type=int)
            command.add_argument("--model", default="", help="where the mesh has several")
    return parser


def _problems(path: Path) -> list[str]:
    return own_problems(read_mesh(path), str(path), installed())


def _run(options: argparse.Namespace) -> int:
    mesh = Mesh(options.config if options.command == "up" else None, name=options.name)
    match options.command:
        case "up":
            try:
                mesh.wait(options.timeout)
            except MeshError:
                if mesh.brought_up:
                    mesh.down()
                raise
            _show(mesh)
            config = mesh_config(read_mesh(options.config))
            line = {"router": mesh.addresses.router, **trainer_files(config, mesh_tokens(config))}
            print("UP", json.dumps(line))
        case "status":
            _show(mesh)
        case "scale":
            mesh.scale(
                engines=options.engines,
                gateways=options.gateways,
                sidecars=options.sidecars,
                model=options.model,
                timeout_s=options.timeout,
            )
            _show(mesh)
        case "targets":
            print(json.dumps(mesh.metrics_targets(), indent=1))
        case "down":
            mesh.down(options.timeout)
    return 0


def _show(mesh: Mesh) -> None:
    found = mesh.status()
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        where = f"node {one.node_id[:8]}" if one.node_id else "not placed"
        state = one.address or one.problem or ("starting" if one.node_id else "waits for room")
        print(f"{one.name:<{width}}  {where}  {state}  starts {one.starts}")


if __name__ == "__main__":
    sys.exit(main())
