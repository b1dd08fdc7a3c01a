"""`rollmesh status`: the members of a mesh, its weights, its sessions and its consumers."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from rollmesh.client import Client, MeshAddresses, states_of
from rollmesh.runtime import run_of, version_of
from rollmesh.runtime.access import identity
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import collector_pb2, router_pb2

_LIMIT_S = 30.0


def main() -> int:
    """Returns the exit code: 0, 1 if the mesh does not answer, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh status", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    return identity.run_tool(parser.prog, options, os.environ, partial(_show, options))


async def _show(options: argparse.Namespace) -> list[str]:
    """Prints the state of a mesh. Returns why it could not."""
    try:
        found = await _read(MeshAddresses.of(options))
    except (RollmeshError, TimeoutError) as error:
        return [f"{options.router}: {getattr(error, 'message', 'no answer in time')}"]
    print(json.dumps(found) if options.json else "\n".join(_lines(found)))
    return []


async def _read(addresses: MeshAddresses) -> dict[str, Any]:
    """Returns the state of a mesh. `store` is None while no collector answers."""
    async with asyncio.timeout(_LIMIT_S), Client(addresses) as client:
        listed = await client.replicas()
        kinds = {one.hello.kind for one in listed.replicas}
        has_collector = addresses.collector or router_pb2.REPLICA_KIND_COLLECTOR in kinds
        stats = await client.stats() if has_collector else None
    return {
        "models": {one.model: _model(one) for one in listed.models},
        "members": [_member(one) for one in listed.replicas],
        "store": None if stats is None else _store(stats),
    }


def _model(one: router_pb2.ModelWeights) -> dict[str, Any]:
    pins = [
        {"holder": pin.holder, "left_s": round(pin.remaining_ms / 1000), **_version(pin)}
        for pin in one.pins
    ]
    return {**_version(one, "target_policy_version"), "pins": pins}


def _version(proto: Any, name: str = "policy_version") -> dict[str, int]:
    """Returns the run and the version within it, of a field of the protocol."""
    number = getattr(proto, name)
    return {"run": run_of(number), "policy_version": version_of(number)}


def _member(one: router_pb2.Replica) -> dict[str, Any]:
    hello, load = one.hello, one.hello.load
    kind = name_of(router_pb2.ReplicaKind.DESCRIPTOR, hello.kind).lower()
    found: dict[str, Any] = {"kind": kind, "replica_id": hello.replica_id, "address": hello.address}
    if kind == "engine":
        found |= {"model": hello.model, **_version(load)}
        found |= {"leases": one.leases, "lease_capacity": hello.lease_capacity}
        found |= {"sessions": one.sessions, "running": load.running, "waiting": load.waiting}
    if kind == "gateway":
        found |= {"model": hello.model, "live_sessions": load.live_sessions}
    return found | {"state": states_of(one)}


def _store(stats: collector_pb2.GetStatsResponse) -> dict[str, Any]:
    consumers = [
        {
            "name": one.name,
            "ready": one.ready,
            "leased": one.leased,
            "acknowledged": one.acknowledged,
            "filtered": {
                name_of(collector_pb2.FilterReason.DESCRIPTOR, part.reason): part.units
                for part in one.filtered
            },
            "step": one.step if one.HasField("step") else None,
            "alarms": {alarm.name: alarm.message for alarm in one.alarms},
        }
        for one in stats.consumers
    ]
    names = ("sessions", "complete_groups", "open_groups", "waiting_for_rewards", "stored_bytes")
    return {**{name: getattr(stats, name) for name in names}, "consumers": consumers}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for model, weights in found["models"].items():
        version = "run {run}, version {policy_version}"
        yield f"model {model or '-'}  {version.format(**weights)}"
        for pin in weights["pins"]:
            held = f"{version.format(**pin)}, for up to {pin['left_s']} s"
            yield f"  pinned by {pin['holder']}: {held}"
    for one in found["members"]:
        yield _line(one)
    store = found["store"]
    if store is None:
        yield "store  no collector is registered"
        return
    consumers = store.pop("consumers")
    yield _line({"kind": "store", **store})
    for consumer in consumers:
        alarms = consumer.pop("alarms")
        yield _line({"kind": "consumer", **consumer})
        for name, message in alarms.items():
            yield f"  alarm {name}: {message}"


def _line(values: dict[str, Any]) -> str:
    head = " ".join(
        str(values.pop(name))
        for name in ("kind", "replica_id", "name", "address")
        if name in values
    )
    rest = [
        f"{name} {_text(value)}" for name, value in values.items() if value not in ([], {}, None)
    ]
    return "  ".join((head, *rest))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
