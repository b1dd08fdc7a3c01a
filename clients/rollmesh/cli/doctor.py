"""`rollmesh doctor`: watches a mesh for a while, and names its alarms with their remedies."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

from rollmesh.client import MeshAddresses, Observer
from rollmesh.runtime import Alarm, AlarmLimits, clock, printable
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import ConfigError

_LEAST_LOOKS, _MOST_LOOKS = 24, 1000
_UNSEEN = "router: no server shows its state; give --router, and an operator's --token-file"


def main() -> int:
    """Returns the exit code: 0, 1 if something is wrong, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh doctor", description=__doc__)
    parser.add_argument("--for", dest="for_s", type=seconds, default=60.0, help="watch so long")
    parser.add_argument("--every", type=seconds, default=5.0, help="time between two looks")
    parser.add_argument("--watch", action="store_true", help="watch until it is stopped")
    parser.add_argument("--json", action="store_true", help="a JSON object for each alarm")
    limits = AlarmLimits()
    parser.add_argument(
        "--patience", type=seconds, default=limits.patience_s, help="what should pass may last"
    )
    parser.add_argument(
        "--session-idle", type=seconds, default=limits.session_s, help="agents may ask nothing"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=-1, help="serves rollmesh_alarm to Prometheus"
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of that port")
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    found: set[tuple[str, str]] = set()
    try:
        code = identity.run_tool(parser.prog, options, os.environ, partial(_watch, options, found))
    except KeyboardInterrupt:
        code = 0
    return code or int(bool(found))


def seconds(text: str) -> float:
    """Reads `60`, `60s` or `5m`. Raises ValueError for what is no time."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    seconds = float(text[:-1]) * unit if unit else float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


async def _watch(options: argparse.Namespace, found: set[tuple[str, str]]) -> list[str]:
    """Prints alarms as they are raised and cleared, and adds them to `found`.

    Raises:
        ConfigError: The looks within `--patience` are too many, a port is taken, or no server shows
            its state.
    """
    limits = AlarmLimits(patience_s=options.patience, session_s=options.session_idle)
    looks = max(_LEAST_LOOKS, 2 * round(options.patience / options.every))
    if looks > _MOST_LOOKS:
        least = 2 * options.patience / _MOST_LOOKS
        raise ConfigError(f"every: is too short for this patience; give at least {least:.1f}")
    addresses = MeshAddresses.of(options)
    until_ms = clock.monotonic_ms() + options.for_s * 1000
    now: dict[tuple[str, str], Alarm] = {}
    with ExitStack() as stack:
        show = _exported(options, stack)
        async with Observer(addresses, limits, looks) as observer:
            while True:
                next_ms = clock.monotonic_ms() + options.every * 1000
                alarms = await observer.watch()
                seen = (one for look in observer.history for one in look.servers)
                if not any(one.samples or one.silent for one in seen):
                    raise ConfigError(_UNSEEN)
                before, now = now, {(one.name, one.where): one for one in alarms}
                for key in now.keys() - before.keys() - (set() if options.watch else found):
                    _say(now[key], options)
                if options.watch:
                    for key in before.keys() - now.keys():
                        _say(before[key], options, cleared=True)
                found.update((name, where * (not options.watch)) for name, where in now)
                show(now)
                next_ms = max(next_ms, clock.monotonic_ms())
                if not options.watch and next_ms > until_ms and len(observer.history) > 1:
                    break
                await asyncio.sleep((next_ms - clock.monotonic_ms()) / 1000)
    if not found and not options.json:
        servers = len(observer.history[-1].servers)
        print(f"nothing is wrong: {servers} servers, watched for {options.for_s:.0f} s")
    return []


def _exported(
    options: argparse.Namespace, stack: ExitStack
) -> Callable[[Iterable[tuple[str, str]]], None]:
    """Serves the gauge of alarms if a port is given. Returns what sets it.

    Raises:
        ConfigError: The port is taken, or the packages of servers are missing.
    """
    if options.metrics_port < 0:
        return lambda _: None
    if find_spec("prometheus_client") is None:
        raise ConfigError("metrics-port: needs more; run: pip install 'rollmesh[server]'")
    from rollmesh.runtime.telemetry import metrics_endpoint, show_alarms

    port = stack.enter_context(metrics_endpoint(options.metrics_host, options.metrics_port))
    print(f"metrics at http://{options.metrics_host}:{port}/metrics", file=sys.stderr, flush=True)
    return show_alarms


def _say(alarm: Alarm, options: argparse.Namespace, *, cleared: bool = False) -> None:
    """Prints an alarm. For people it has no character that moves a terminal's cursor."""
    if options.json:
        line = json.dumps(alarm._asdict() | {"cleared": cleared}, ensure_ascii=False)
    else:
        line = printable(f"{'cleared  ' * cleared}{alarm.name}  {alarm.where}")
        line += "" if cleared else f"\n  {printable(alarm.message)}."
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
