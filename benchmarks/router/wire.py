"""CPU time of a lease in a router process, gRPC included."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.measure import cpu_ms
from benchmarks.harness.systems import read_line, run_process
from rollmesh.mesh import LeaseClient, Membership
from rollmesh.v1 import router_pb2

_SESSIONS, _TURNS = 64, 150
_TURN_S = 0.01


async def lease_us() -> float:
    """Returns the CPU time of a router process for each lease of 64 busy sessions, microseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = sys.executable, "-m", "rollmesh.router", "--port=0", f"--data-dir={name}"
        async with run_process(folder / "router.log", *command) as process:
            port = json.loads(await read_line(process, "READY", folder))["port"]
            address = f"127.0.0.1:{port}"
            hello = router_pb2.ReplicaHello(
                replica_id="engine",
                kind=router_pb2.REPLICA_KIND_ENGINE,
                address="127.0.0.1:9",
                model="policy",
                lease_capacity=4096,
            )
            async with (
                Membership(address, hello, router_pb2.ReplicaLoad) as member,
                LeaseClient(address, "gateway") as leases,
            ):
                await member.wait_registered()
                await _take_turns(leases, 1)
                before = cpu_ms(process.pid)
                await _take_turns(leases, _TURNS)
                spent = cpu_ms(process.pid) - before
    return round(spent * 1000 / (_SESSIONS * _TURNS), 1)


async def _take_turns(leases: LeaseClient, turns: int) -> None:
    async def session(number: int) -> None:
        for _ in range(turns):
            async with leases.lease(
                session_id=f"session-{number}", group_id=f"group-{number // 8}", deadline_ms=30_000
            ):
                await asyncio.sleep(_TURN_S)

    async with asyncio.TaskGroup() as tasks:
        for number in range(_SESSIONS):
            tasks.create_task(session(number))
