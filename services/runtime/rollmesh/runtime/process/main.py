"""The entry point of a service process: flags in, one READY line and an exit code out."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import uvloop

from rollmesh.runtime import owner_only
from rollmesh.runtime.access.identity import Identity, present
from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.host import (
    keep_freed_memory,
    print_ready,
    raise_descriptor_limit,
    stop_signals,
)
from rollmesh.runtime.rpc.listening import PortInUseError, ServerConfig
from rollmesh.runtime.rpc.server import Service, serve
from rollmesh.runtime.telemetry import tracing
from rollmesh.runtime.telemetry.logs import configure_logging

_Config = TypeVar("_Config", bound=ServerConfig)


def run_service(
    name: str,
    config_class: type[_Config],
    build: Callable[[_Config], Service],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Runs a service until it is stopped, and prints `READY {"port": ...}` when it serves.

    Returns:
        The exit code: 0 after a stop, 1 after a failure, 2 for a bad setting.
    """
    os.umask(owner_only.UMASK)
    try:
        config = parse_config(config_class, name, argv, environ)
        configure_logging(name, config.log_level)
        faults.arm(config.fault)
        raise_descriptor_limit(config.max_connections)
        present(Identity(config))
    except ConfigError as error:
        _complain(name, error)
        return 2
    keep_freed_memory()
    try:
        with (
            tracing.sending(name, config),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            failure = runner.run(_serve(build, config))
    except (ConfigError, PortInUseError) as error:
        _complain(name, error)
        return 2
    except RollmeshError as error:  # it could not start
        _complain(name, error.message)
        return 1
    if failure:
        _complain(name, failure)
        return 1
    return 0


def _complain(name: str, problem: object) -> None:
    sys.stderr.write(f"rollmesh {name}: {problem}\n")


async def _serve(build: Callable[[_Config], Service], config: _Config) -> str | None:
    with stop_signals(supervised=config.supervised) as stop:
        return await serve(build(config), config, announce=print_ready, stop=stop)
