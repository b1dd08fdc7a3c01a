"""Runs a sidecar: `python -m rollmesh.sidecar --help`."""

import asyncio
import os
import sys
from contextlib import aclosing

import uvloop

from rollmesh.mesh import GatewayDirectory
from rollmesh.runtime import owner_only
from rollmesh.runtime.access import Identity, present
from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.runtime.process import faults, print_ready, raise_descriptor_limit, stop_signals
from rollmesh.runtime.rpc import Bound, bind_host, check_exposed
from rollmesh.runtime.telemetry import configure_logging, metrics_endpoint, tracing
from rollmesh.sidecar.app import serving
from rollmesh.sidecar.config import SidecarConfig


async def _serve(config: SidecarConfig) -> None:
    locked = bool(config.token_file or config.tls_certificate_file)
    check_exposed(config, bind_host(config), "--token-file", locked=locked)
    joins = config.register and not config.gateway
    async with aclosing(GatewayDirectory(config.router, config.gateway)) as directory:
        with (
            metrics_endpoint(
                config.host, config.metrics_port, config.metrics_token_file, config
            ) as metrics_port,
            stop_signals(supervised=config.supervised) as stop,
        ):
            async with serving(config, directory, joins=joins) as port:
                print_ready(Bound(port, metrics_port))
                await stop.wait()


def main() -> int:
    """Returns the exit code."""
    os.umask(owner_only.UMASK)
    try:
        config = parse_config(SidecarConfig, "sidecar", sys.argv[1:], os.environ)
        configure_logging("sidecar", config.log_level)
        faults.arm(config.fault)
        raise_descriptor_limit(config.max_connections)
        present(Identity(config))
        with (
            tracing.sending("sidecar", config),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
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
