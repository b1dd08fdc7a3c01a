"""Attackers in a separate process: RPCs and HTTP bodies, until standard input ends.

Arguments: the mesh's addresses as JSON, the file for the inputs behind findings, the file for the
counts, and a seed. Each worker has choices of its own that follow from the seed, and sessions of
its own, whose ids and keys it mixes into what it sends. Beside them, engines that were paused or
put to sleep are woken up, and all services are asked whether they still answer.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.messages import Messages
from benchmarks.fuzz.routes import RouteAttack
from benchmarks.fuzz.rpcs import RpcAttack
from benchmarks.fuzz.seeds import CONSUMER, seeds
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.v1 import (
    collector_pb2,
    engine_pb2,
    gateway_pb2,
    router_pb2,
    router_pb2_grpc,
    server_pb2,
)

MODEL = "policy"
TRAINER = frozenset(("trainer",))
"""Name of the consumer of the trainer beside: what is its own, nobody else may acknowledge."""
_CALLERS, _BROWSERS = 6, 4
_LIFE = 60
"""Inputs to a session, then there is another one."""
_WAKE_S = 0.3
_PROBE_S, _PROBE_LIMIT_S = 1.0, 20.0
_SERVICES: dict[str, ServiceDescriptor] = {
    "router": router_pb2.DESCRIPTOR.services_by_name["RouterService"],
    "engine": engine_pb2.DESCRIPTOR.services_by_name["EngineService"],
    "gateway": gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
    "collector": collector_pb2.DESCRIPTOR.services_by_name["CollectorService"],
}
_EVERYWHERE = (
    server_pb2.DESCRIPTOR.services_by_name["ServerService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
)


class Attack:
    """All workers of this process."""

    def __init__(self, addresses: dict[str, str], client: Client, log: Path, seed: int) -> None:
        """Takes the mesh, and where findings go."""
        self._addresses = addresses
        self._client = client
        self._seed = seed
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.findings = Findings(log)
        self.stopping = False

    async def run(self) -> None:
        """Works until stopped."""
        for name in _SERVICES:
            self._channels[name] = open_channel(self._addresses[name])
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(_CALLERS):
                    group.create_task(self._work(worker, self._calls))
                for worker in range(_CALLERS, _CALLERS + _BROWSERS):
                    group.create_task(self._work(worker, self._requests))
                group.create_task(self._every(_WAKE_S, self._wake))
                group.create_task(self._every(_PROBE_S, self._probe))
        finally:
            for channel in self._channels.values():
                await channel.close()

    async def _work(
        self, worker: int, attack: Callable[[random.Random, Session, list[str]], Awaitable[None]]
    ) -> None:
        """Attacks in one session after the other."""
        rng = random.Random(f"{self._seed} {worker}")
        pool = [MODEL, CONSUMER, "engine-0", "gateway-0", *self._addresses.values()]
        kept = len(pool)
        while not self.stopping:
            try:
                session = await self._client.open_session(gateway_pb2.CreateSessionRequest())
            except RollmeshError:
                await asyncio.sleep(_WAKE_S)
                continue
            answer = f"chatcmpl-{session.session_id}-2"
            pool[kept:] = [session.session_id, session.api_key, answer]
            await attack(rng, session, pool)
            with suppress(RollmeshError):
                await self._client.close_session(session, outcome="ABORTED")

    async def _calls(self, rng: random.Random, session: Session, pool: list[str]) -> None:
        targets = [
            (channel, service)
            for name, channel in self._channels.items()
            for service in (_SERVICES[name], *_EVERYWHERE)
        ]
        messages = Messages(rng, pool, TRAINER)
        attack = RpcAttack(rng, targets, messages, seeds(session, MODEL), self.findings)
        await self._until_over(attack.once)

    async def _requests(self, rng: random.Random, session: Session, pool: list[str]) -> None:
        attack = RouteAttack(rng, self._addresses["sidecar"], pool, self.findings)
        try:
            await self._until_over(lambda: attack.once(session.api_key))
        finally:
            await attack.close()

    async def _until_over(self, once: Callable[[], Awaitable[None]]) -> None:
        for _ in range(_LIFE):
            if self.stopping:
                return
            await once()

    async def _every(self, pause_s: float, work: Callable[[], Awaitable[None]]) -> None:
        while not self.stopping:
            await work()
            await asyncio.sleep(pause_s)

    async def _wake(self) -> None:
        """Lets engines sample again."""
        stub: Any = router_pb2_grpc.RouterServiceStub(self._channels["router"])
        with suppress(grpc.aio.AioRpcError):
            await stub.ResumeEngines(router_pb2.ResumeEnginesRequest(model=MODEL), timeout=5)
            await stub.WakeUpEngines(router_pb2.WakeUpEnginesRequest(model=MODEL), timeout=5)

    async def _probe(self) -> None:
        """Asks every service whether it answers; one that stands still is a hang."""
        await asyncio.gather(*(self._asked(name) for name in self._channels), self._asked_sidecar())

    async def _asked(self, name: str) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self._channels[name])
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            self.findings.found("hangs", name, f"health: {error.code().name}")

    async def _asked_sidecar(self) -> None:
        url = f"http://{self._addresses['sidecar']}/healthz"
        try:
            async with httpx2.AsyncClient(timeout=_PROBE_LIMIT_S) as http:
                answer = await http.get(url)
        except httpx2.HTTPError as error:
            self.findings.found("hangs", "sidecar", f"health: {type(error).__name__}")
        else:
            self.findings.answered("healthz", str(answer.status_code))

    def counts(self) -> dict[str, Any]:
        """Returns what was counted."""
        return {**self.findings.counts, "outcomes": dict(_sorted(self.findings.outcomes.items()))}


def _sorted(outcomes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(outcomes, key=lambda one: (-one[1], one[0]))


async def main(addresses: str, log: str, counts: str, seed: str) -> None:
    """Runs the attackers."""
    at = MeshAddresses.from_json(addresses)
    async with Client(at) as client, asyncio.TaskGroup() as group:
        attack = Attack(json.loads(addresses), client, Path(log), int(seed))
        began = time.monotonic()
        group.create_task(attack.run())
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        attack.stopping = True
    found = {**attack.counts(), "seconds": time.monotonic() - began}
    Path(counts).write_text(json.dumps(found))  # noqa: ASYNC240 - nothing else runs any more


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
