"""Runs a sidecar: `python -m rollmesh.sidecar --help`."""

import asyncio
import logging
import os
import socket
import sys
import uuid
from contextlib import AsyncExitStack

import uvloop

from rollmesh.mesh.directories.gateways import GatewayDirectory
from rollmesh.mesh.routers.membership import Membership
from rollmesh.runtime import owner_only
from rollmesh.runtime.access.identity import Identity, present
from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.descriptors import raise_descriptor_limit
from rollmesh.runtime.process.main import print_ready
from rollmesh.runtime.process.signals import stop_signals
from rollmesh.runtime.rpc.listening import Bound, bind_host
from rollmesh.runtime.rpc.locks import check_exposed
from rollmesh.runtime.telemetry.endpoint import metrics_endpoint, tls_of, tokens_of
from rollmesh.runtime.telemetry.logs import configure_logging, fields
from rollmesh.sidecar.advertising import advertised
from rollmesh.sidecar.app import make_app
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.http.server import HttpServer
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)
_OTHER_FILES = 64
"""Files of a sidecar besides its connections: gateways, routers, libraries, logs."""


async def _serve(config: SidecarConfig) -> None:
    host = bind_host(config)
    locked = bool(config.token_file or config.tls_certificate_file)
    check_exposed(config, host, "--token-file", locked=locked)
    scrapers = tokens_of(config.metrics_token_file)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host.strip("[]"), config.port))
    wanted = None if config.metrics_port < 0 else config.metrics_port
    with metrics_endpoint(config.host, wanted, scrapers, tls_of(config)) as metrics_port:
        await _serve_on(listener, config, metrics_port)


async def _serve_on(
    listener: socket.socket, config: SidecarConfig, metrics_port: int | None
) -> None:
    directory = GatewayDirectory(config.router, config.gateway)
    try:
        server = HttpServer(make_app(config, directory), config)
        with stop_signals(supervised=config.supervised) as stop:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                port = listener.getsockname()[1]
                if config.register and not config.gateway:
                    await stack.enter_async_context(_membership(config, port))
                serving = group.create_task(server.serve([listener]))
                stopping = group.create_task(stop.wait())
                listener.listen(1024)
                print_ready(Bound(port, metrics_port))
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                server.should_exit = True
                stopping.cancel()
    finally:
        await directory.aclose()


def _membership(config: SidecarConfig, port: int) -> Membership:
    """Tells the router where agents reach this sidecar."""
    door = advertised(config, port)
    hello = router_pb2.ReplicaHello(
        replica_id=f"sidecar-{uuid.uuid4().hex}",
        kind=router_pb2.REPLICA_KIND_SIDECAR,
        address=door.address,
        https=door.https,
        path_prefix=door.path_prefix,
    )
    return Membership(config.router, hello, router_pb2.ReplicaLoad)


def _check_descriptors(config: SidecarConfig) -> None:
    """Warns if connections run out of file descriptors before they reach their bound."""
    limit = raise_descriptor_limit()
    if 0 <= limit < config.max_connections + _OTHER_FILES:
        _log.warning(
            "max_connections is above the limit of open files",
            extra=fields(max_connections=config.max_connections, limit=limit),
        )


def main() -> int:
    """Returns the exit code."""
    os.umask(owner_only.UMASK)
    try:
        config = parse_config(SidecarConfig, "sidecar", sys.argv[1:], os.environ)
        configure_logging("sidecar", config.log_level)
        faults.arm(config.fault)
        _check_descriptors(config)
        present(Identity(config))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config))
    except ConfigError as error:
        print(f"rollmesh sidecar: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rollmesh sidecar: port: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
