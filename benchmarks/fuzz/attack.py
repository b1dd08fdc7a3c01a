"""Attackers in a separate process: RPCs and HTTP bodies, until standard input ends.

Arguments: the mesh's addresses as JSON, what its doors ask for, the folder of its locks, the file
for the inputs behind findings, the file for the counts, and a seed. Each worker has choices of its
own that follow from the seed, and sessions of its own, whose ids and keys it mixes into what it
sends. In a locked mesh a worker shows what one role shows, and others knock with what must not open
a method, about sessions that must stay untouched. Beside them, engines that were paused or put to
sleep are woken up, and all services are asked whether they still answer.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.fuzz.callers import Callers
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.messages import Messages
from benchmarks.fuzz.routes import RouteAttack
from benchmarks.fuzz.rpcs import RpcAttack
from benchmarks.fuzz.seeds import CONSUMER, seeds
from benchmarks.kills.matrix import Doors
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import (
    engine_pb2,
    gateway_pb2,
    router_pb2_grpc,
    server_pb2,
)
from tests.served import SERVED

MODEL = "policy"
TRAINER = frozenset(("trainer",))
"""Name of the consumer of the trainer beside: what is its own, nobody else may acknowledge."""
_Control = engine_pb2.ControlEnginesRequest
_CALLERS, _BROWSERS = 6, 4
_KNOCKING, _KNOCKS = 48, 6
"""Calls at a time that must be refused, and how many follow each other about one session."""
_LIFE = 60
"""Inputs to a session, then there is another one."""
_WAKE_S = 0.3
_PROBE_S, _PROBE_LIMIT_S = 1.0, 20.0
_EVERYWHERE = (
    server_pb2.DESCRIPTOR.services_by_name["ServerService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
)


class Attack:
    """All workers of this process."""

    def __init__(
        self, addresses: dict[str, str], callers: Callers, client: Client, log: Path, seed: int
    ) -> None:
        """Takes the mesh, who calls it, and where findings go."""
        self._addresses = addresses
        self._client = client
        self._callers = callers
        self._seed = seed
        self._methods = list(_methods())
        self.findings = Findings(log)
        self.stopping = False

    async def run(self) -> None:
        """Works until stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(_CALLERS):
                    group.create_task(self._work(worker, self._calls))
                for worker in range(_CALLERS, _CALLERS + _BROWSERS):
                    group.create_task(self._work(worker, self._requests))
                if self._callers.tokens:
                    group.create_task(self._work(_CALLERS + _BROWSERS, self._knocks))
                group.create_task(self._every(_WAKE_S, self._wake))
                group.create_task(self._every(_PROBE_S, self._probe))
        finally:
            await self._callers.close()

    async def _work(
        self, worker: int, attack: Callable[[random.Random, Session, list[str]], Awaitable[None]]
    ) -> None:
        """Attacks in one session after the other."""
        rng = random.Random(f"{self._seed} {worker}")
        addresses = [self._addresses[name] for name in (*SERVED, "sidecar")]
        pool = [MODEL, CONSUMER, "engine-0", "gateway-0", *addresses]
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
        attack, caller = self._attack(rng, session, pool), self._callers.known(rng)
        await self._until_over(lambda: attack.once(caller))

    def _attack(self, rng: random.Random, session: Session, pool: list[str]) -> RpcAttack:
        messages = Messages(rng, pool, TRAINER)
        valid = seeds(session, MODEL)
        return RpcAttack(rng, self._methods, self._callers, messages, valid, self.findings)

    async def _knocks(self, rng: random.Random, session: Session, pool: list[str]) -> None:
        """Makes calls that must be refused. The session must then be as it was."""
        attack = self._attack(rng, session, pool)

        async def knock() -> None:
            for _ in range(_KNOCKS):
                if not self.stopping:
                    await attack.knock(self._callers.other(rng))

        async with asyncio.TaskGroup() as group:
            for _ in range(_KNOCKING):
                group.create_task(knock())
        try:
            turns = (await self._client.transcript(session)).turns
        except RollmeshError as error:
            turns, what = (), error.reason
        else:
            what = f"{len(turns)} turns" if turns else ""
        if what:
            self.findings.found("role_violations", "session", f"after refused calls: {what}")

    async def _requests(self, rng: random.Random, session: Session, pool: list[str]) -> None:
        tokens = self._callers.tokens
        attack = RouteAttack(rng, self._addresses["sidecar"], pool, tokens, self.findings)
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
        trainer = self._callers.trainer()
        shown: Any = {"timeout": 5, "metadata": trainer.metadata}
        stub: Any = router_pb2_grpc.RouterServiceStub(self._callers.channel(trainer, "router"))
        with suppress(grpc.aio.AioRpcError):
            for action in ({"resume": _Control.Resume()}, {"wake_up": _Control.WakeUp()}):
                await stub.ControlEngines(_Control(model=MODEL, **action), **shown)

    async def _probe(self) -> None:
        """Asks every service whether it answers. One that stands still is a hang."""
        await asyncio.gather(*(self._asked(name) for name in SERVED), self._asked_sidecar())

    async def _asked(self, name: str) -> None:
        channel = self._callers.channel(self._callers.trainer(), name)
        stub: Any = health_pb2_grpc.HealthStub(channel)
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


def _methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Yields all methods, each with the name of a service that is asked for it."""
    for name, own in SERVED.items():
        service: Any
        for service in (*own, *_EVERYWHERE):
            yield from ((name, method) for method in service.methods)


def _sorted(outcomes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(outcomes, key=lambda one: (-one[1], one[0]))


async def main(addresses: str, doors: str, locks: str, log: str, counts: str, seed: str) -> None:
    """Runs the attackers."""
    at: dict[str, str] = json.loads(addresses)
    callers = Callers(Doors(doors), Path(locks), at)
    shown = MeshAddresses.from_json(addresses)
    async with Client(shown) as client, asyncio.TaskGroup() as group:
        attack = Attack(at, callers, client, Path(log), int(seed))
        began = time.monotonic()
        group.create_task(attack.run())
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        attack.stopping = True
    found = {**attack.counts(), "seconds": time.monotonic() - began}
    Path(counts).write_text(json.dumps(found))  # noqa: ASYNC240 - nothing else runs any more


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
