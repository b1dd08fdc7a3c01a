"""The entry point of a service process: flags in, one READY line and an exit code out."""

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import uvloop

from rollmesh.runtime import owner_only
from rollmesh.runtime.access.identity import Identity, present
from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.memory import keep_freed_memory
from rollmesh.runtime.rpc.listening import Bound, PortInUseError, ServerConfig
from rollmesh.runtime.rpc.server import Service, serve
from rollmesh.runtime.telemetry import tracing
from rollmesh.runtime.telemetry.logs import configure_logging


@contextmanager
def stop_signals(*, supervised: bool = False) -> Iterator[asyncio.Event]:
    """Yields an event that SIGTERM and SIGINT set.

    After a stop the signals are ignored, so that a second one does not change the exit code.

    Args:
        supervised: The end of standard input sets it too: the supervisor is gone.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if supervised:
        loop.add_reader(sys.stdin, readable)
    try:
        yield stop
    finally:
        if supervised:
            loop.remove_reader(sys.stdin)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            if stop.is_set():
                signal.signal(number, signal.SIG_IGN)


_Config = TypeVar("_Config", bound=ServerConfig)
_GARBAGE_THRESHOLD = 20_000  # messages and conversations have no cycles: rare collections suffice


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


def print_ready(bound: Bound) -> None:
    """Prints the READY line, and exempts everything loaded so far from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, *gc.get_threshold()[1:])
    line = {"port": bound.port, "metrics_port": bound.metrics_port}
    sys.stdout.write(f"READY {json.dumps(line)}\n")
    sys.stdout.flush()
