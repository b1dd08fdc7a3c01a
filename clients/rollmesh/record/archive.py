"""`rollmesh archive`: writes sessions into the record as they end, as a consumer of its own.

A session is acknowledged when its files are durable. A killed archive gets it again, and knows by
the record's index whether it has it.
"""

import argparse
import asyncio
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prometheus_client import Counter

from rollmesh.client import Client, Delivery, MeshAddresses, SubscribeOptions, Subscription
from rollmesh.record import beside
from rollmesh.record.files import COMMITS, PARTS, Writer
from rollmesh.runtime import clock, first_of, owner_only
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults, stop_signals
from rollmesh.runtime.telemetry import configure_logging, fields, metrics_endpoint
from rollmesh.v1 import collector_pb2, session_pb2

_log = logging.getLogger(__name__)
_LEAST_LEASE_MS, _LEASES = 600_000, 3
_MOST_S = 3600
_ACKNOWLEDGE_S = 5.0
_CHANGES = 16
"""Most sessions whose late rewards and annotations are read at once."""
_LOOK_S = 0.5
"""Time between two looks for a stop while nothing comes."""
_STARTS = {"earliest": collector_pb2.LOG_END_EARLIEST, "latest": collector_pb2.LOG_END_LATEST}
SESSIONS = Counter(
    "rollmesh_archive_sessions_total",
    "Sessions acknowledged, by kind: new, again for those that the record had, or set_aside.",
    ["kind"],
)
BYTES = Counter(
    "rollmesh_archive_bytes_total", "Size of the sessions and late values that were written."
)
_ALL = collector_pb2.DeliveryFilter(
    purposes=[
        session_pb2.SESSION_PURPOSE_TRAIN,
        session_pb2.SESSION_PURPOSE_EVAL,
        session_pb2.SESSION_PURPOSE_OTHER,
    ],
    captures=[session_pb2.CAPTURE_TOKENS, session_pb2.CAPTURE_LOGPROBS, session_pb2.CAPTURE_TEXT],
    stale_runs=collector_pb2.STALE_RUNS_KEEP,
)


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 after an error, 2 for an invalid flag."""
    parser = argparse.ArgumentParser(prog="rollmesh archive", description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the record")
    parser.add_argument("--consumer", default="archive", help="its name: one for each folder")
    parser.add_argument(
        "--from", dest="start", choices=_STARTS, default="earliest", help="where a new one starts"
    )
    parser.add_argument(
        "--seconds", type=int, default=60, help="longest time until a session is in the record"
    )
    parser.add_argument("--sessions", type=int, default=10_000, help="most sessions of a file")
    parser.add_argument("--mebibytes", type=int, default=128, help="most data of a file")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of the metrics")
    parser.add_argument("--metrics-port", type=int, default=-1, help="0 chooses one, -1 is off")
    parser.add_argument("--supervised", choices=("true",), help="ends with its standard input")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    os.umask(owner_only.UMASK)
    configure_logging("archive", "info")
    return identity.run_tool(parser.prog, options, os.environ, partial(_archive, options))


async def _archive(options: argparse.Namespace) -> list[str]:
    """Writes sessions until a stop. Returns the error that ended it."""
    faults.arm(options.fault)
    if not 1 <= options.seconds <= _MOST_S:
        raise ConfigError(f"seconds: is {options.seconds}; give 1 to {_MOST_S}")
    if options.sessions < 1 or options.mebibytes < 1:
        raise ConfigError("sessions, mebibytes: give at least 1")
    addresses = MeshAddresses.of(options)
    start = collector_pb2.Position(end=_STARTS[options.start])
    wants = SubscribeOptions(start=start, filter=_ALL, messages=True, records=True)
    lease_ms = max(_LEAST_LEASE_MS, _LEASES * options.seconds * 1000)
    with (
        Writer(options.to) as writer,
        metrics_endpoint(options.metrics_host, options.metrics_port) as port,
        stop_signals(supervised=bool(options.supervised)) as stop,
    ):
        async with (
            Client(addresses) as client,
            client.subscribe(
                options.consumer, unit="session", lease_ms=lease_ms, options=wants
            ) as deliveries,
        ):
            print("READY", json.dumps({"metrics_port": port}), flush=True)
            try:
                while not stop.is_set():
                    batch = await _collect(writer, deliveries, options, stop)
                    if not stop.is_set():
                        await _read_changes(writer, client, options, stop)
                    if batch or not writer.is_empty:
                        await _keep(writer, deliveries, batch, stop)
            except (OSError, sqlite3.Error) as error:  # nothing of the batch was acknowledged
                return [f"{options.to}: {error}"]
    return []


async def _collect(
    writer: Writer, deliveries: Subscription, options: argparse.Namespace, stop: asyncio.Event
) -> list[Delivery]:
    """Gives the writer sessions until it has enough, or the first has waited long enough.

    A stop ends it at once, and it ends without sessions when none has come for so long.
    """
    batch: list[Delivery] = []
    end_ms = clock.monotonic_ms() + options.seconds * 1000
    while (
        not stop.is_set()
        and writer.sessions < options.sessions
        and writer.bytes < options.mebibytes * 2**20
    ):
        left_s = (end_ms - clock.monotonic_ms()) / 1000
        if left_s <= 0:
            break
        try:
            async with asyncio.timeout(min(left_s, _LOOK_S)):
                delivery = await anext(deliveries)
        except TimeoutError:
            continue
        if not batch:
            end_ms = clock.monotonic_ms() + options.seconds * 1000
        batch.append(delivery)
        for record in delivery.records:
            await asyncio.to_thread(writer.add, record)
    return batch


async def _read_changes(
    writer: Writer, client: Client, options: argparse.Namespace, stop: asyncio.Event
) -> None:
    """Gives the writer values that were set late since it asked last. The next batch has more."""

    async def read() -> Sequence[collector_pb2.ReadChangesResponse]:
        try:
            return await client.changed_sessions(after=writer.place, limit=_CHANGES)
        except RollmeshError as error:
            _log.warning("late rewards and annotations wait", extra=fields(error=str(error)))
            return ()

    async def stopped() -> Sequence[collector_pb2.ReadChangesResponse]:
        await stop.wait()
        return ()

    left = options.sessions
    while left > 0 and writer.bytes < options.mebibytes * 2**20:
        found = await first_of([read(), stopped()])
        for one in found:
            await asyncio.to_thread(writer.change, one.session, one.annotations, one.scores)
            writer.place = one.resume_token
        if len(found) < _CHANGES:
            return
        left -= len(found)


async def _keep(
    writer: Writer, deliveries: Subscription, batch: list[Delivery], stop: asyncio.Event
) -> None:
    """Makes a batch durable, then acknowledges it.

    A stop does not wait for a collector that is away: the next start gets the sessions again.

    Raises:
        OSError: It cannot be written.
        sqlite3.Error: The index cannot be written.
        InvalidFieldError: Too many sessions cannot be converted.
    """
    begun_ms, sessions, size = clock.monotonic_ms(), writer.sessions, writer.bytes
    await faults.reach("archive-before-write")
    await asyncio.to_thread(writer.write)
    await faults.reach("archive-before-aside")
    refused = dict(writer.refused)
    for id_ in await asyncio.to_thread(writer.set_aside):
        path = writer.folder / beside.FOLDER / beside.name_of(id_)
        said = fields(session_id=id_, reason=refused[id_].reason, file=str(path))
        _log.error("set aside a session; update rollmesh, replay the consumer", extra=said)
    await faults.reach("archive-after-write")
    await asyncio.to_thread(writer.publish, PARTS)
    await faults.reach("archive-between-names")
    await asyncio.to_thread(writer.publish, COMMITS)
    await faults.reach("archive-before-ack")
    new, files = await asyncio.to_thread(writer.finish)
    while batch:
        try:
            async with asyncio.timeout(_ACKNOWLEDGE_S):
                await deliveries.acknowledge(*batch)
                break
        except TimeoutError:
            if stop.is_set():
                return
    SESSIONS.labels("new").inc(new)
    SESSIONS.labels("again").inc(sessions - new - len(refused))
    if refused:
        SESSIONS.labels("set_aside").inc(len(refused))
    BYTES.inc(size)
    took_ms = clock.monotonic_ms() - begun_ms
    done = fields(sessions=sessions, new=new, set_aside=len(refused), files=files, took_ms=took_ms)
    _log.info("archived", extra=done)


if __name__ == "__main__":
    sys.exit(main())
