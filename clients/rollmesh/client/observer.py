"""Looks at a mesh for its alarms, within a bounded time."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message

from rollmesh.client.connections import Connections, MeshAddresses
from rollmesh.mesh import addresses_of
from rollmesh.runtime import METRICS, Alarm, AlarmLimits, Labels, Observation, Server, clock, raised
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import is_tunnel, stub_of, typed_errors
from rollmesh.v1 import collector_pb2, gateway_admin_pb2, gateway_pb2, router_pb2, server_pb2
from rollmesh.v1.collector_pb2_grpc import CollectorServiceStub
from rollmesh.v1.gateway_admin_pb2_grpc import GatewayAdminServiceStub
from rollmesh.v1.router_pb2_grpc import RouterServiceStub
from rollmesh.v1.server_pb2_grpc import ServerServiceStub

_LOOK_S = 5.0
"""Time for the answers of one server, seconds."""
_SESSIONS = 1000
_MOST_SAID = 200
_SHOWN = (
    "rollmesh_collector_session_rewards_sum",
    "rollmesh_collector_session_rewards_count",
    "rollmesh_gateway_journal_takeovers_total",
    "process_start_time_seconds",
)
"""Metrics that no rule reads, for people."""
_KINDS = {
    router_pb2.REPLICA_KIND_ENGINE: "engine",
    router_pb2.REPLICA_KIND_GATEWAY: "gateway",
    router_pb2.REPLICA_KIND_COLLECTOR: "collector",
}
_AWAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


@dataclass(slots=True)
class _Look:
    """The answers so far."""

    servers: list[Server] = field(default_factory=list)
    members: router_pb2.ListReplicasResponse | None = None
    stores: list[collector_pb2.GetStatsResponse] = field(default_factory=list)
    sessions: list[gateway_pb2.OpenSession] | None = None


class Observer(Connections):
    """Reads the state of a mesh for the alarms of a mesh. It changes nothing.

    All servers are asked at the same time, and have 5 s. A server without an answer is noted.
    Sidecars, and engines that dial out, are not asked.
    """

    def __init__(
        self, addresses: MeshAddresses, limits: AlarmLimits | None = None, looks: int = 60
    ) -> None:
        """Takes the addresses.

        Args:
            addresses: Where the mesh is reached.
            limits: When a state has lasted for too long.
            looks: Number of looks that are kept. `patience_s` must be shorter.

        Raises:
            ConfigError: A file that opens the mesh cannot be read, or others may read it.
        """
        super().__init__(addresses)
        self._limits = limits or AlarmLimits()
        self.history: deque[Observation] = deque(maxlen=looks)
        """The last looks, oldest first. Only the newest has open sessions."""

    async def watch(self) -> list[Alarm]:
        """Looks once more. Returns the alarms that the looks since the first one raise."""
        found = await self.look()
        if self.history:
            self.history[-1] = replace(self.history[-1], sessions=None)
        self.history.append(found)
        return raised(list(self.history), self._limits)

    async def look(self) -> Observation:
        """Returns the mesh as it is now. It raises nothing that a server answers."""
        at_ms, found = clock.monotonic_ms(), _Look()
        routers = addresses_of(self.addresses.router)
        await self._ask_all(found, [("router", one, one) for one in routers])
        listed = found.members.replicas if found.members else ()
        targets = {
            one.hello.address: (_KINDS[one.hello.kind], one.hello.replica_id, one.hello.address)
            for one in listed
            if one.hello.kind in _KINDS and not is_tunnel(one.hello.address)
        }
        for kind in ("gateway", "collector"):
            for one in addresses_of(getattr(self.addresses, kind)):
                targets.setdefault(one, (kind, one, one))
        await self._ask_all(found, targets.values())
        for gone in self._channels.keys() - {*routers, *targets}:
            await self._channels.pop(gone).close()
        return Observation(
            at_ms=at_ms,
            servers=sorted(found.servers, key=lambda one: (one.kind, one.name)),
            members=found.members,
            stores=found.stores,
            sessions=found.sessions,
        )

    async def _ask_all(self, found: _Look, targets: Iterable[tuple[str, str, str]]) -> None:
        async with asyncio.TaskGroup() as group:
            for kind, name, address in targets:
                group.create_task(self._ask(found, kind, name, address))

    async def _ask(self, found: _Look, kind: str, name: str, address: str) -> None:
        """Asks one server for its metrics and more, and notes its answers, or why it is silent."""
        silent, known = "", dict[str, Any]()
        metrics = server_pb2.GetMetricsRequest(names=[*METRICS, *_SHOWN])
        for ask in ((ServerServiceStub, "GetMetrics", metrics), _OF_KIND.get(kind)):
            if ask is None or silent:
                continue
            stub, method, request = ask
            before_ms, begun_ms = clock.unix_ms(), clock.monotonic_ms()
            try:
                async with asyncio.timeout(_LOOK_S):
                    with typed_errors():
                        call = getattr(stub_of(self._channel(address), stub), method)
                        answer = await call(request, timeout=_LOOK_S)
            except TimeoutError:
                silent = f"{address} gives no answer in {_LOOK_S:.0f} s"
                continue
            except RollmeshError as error:
                if error.code in _AWAY and error.reason != "STARTING":
                    silent = f"{address}: {error.message}"
                continue
            match answer:
                case server_pb2.GetMetricsResponse():
                    took_ms = clock.monotonic_ms() - begun_ms
                    samples: dict[str, dict[Labels, float]] = {}
                    for one in answer.samples:
                        labels = tuple(sorted(one.labels.items()))
                        samples.setdefault(one.name, {})[labels] = one.value
                    known = {"samples": samples, "doubt_ms": took_ms / 2}
                    known["ahead_ms"] = answer.unix_ms - before_ms - took_ms / 2
                case router_pb2.ListReplicasResponse():
                    if found.members is None or len(answer.replicas) > len(found.members.replicas):
                        found.members = answer
                case collector_pb2.GetStatsResponse():
                    found.stores.append(answer)
                case _:
                    found.sessions = [*(found.sessions or ()), *answer.sessions]
        found.servers.append(Server(kind=kind, name=name, silent=silent[:_MOST_SAID], **known))


def states_of(one: router_pb2.Replica) -> list[str]:
    """Returns the words for the state of a member, the same wherever people see it."""
    load = one.hello.load
    circuit = name_of(router_pb2.CircuitState.DESCRIPTOR, one.circuit).lower()
    found = [name for name in ("paused", "sleeping", "draining") if getattr(load, name)]
    found += ["fenced"] * one.fenced
    return found + [f"circuit {circuit}"] * (circuit in ("open", "half_open"))


_OF_KIND: dict[str, tuple[Any, str, Message]] = {
    "router": (RouterServiceStub, "ListReplicas", router_pb2.ListReplicasRequest()),
    "gateway": (
        GatewayAdminServiceStub,
        "ListSessions",
        gateway_admin_pb2.ListSessionsRequest(page_size=_SESSIONS),
    ),
    "collector": (CollectorServiceStub, "GetStats", collector_pb2.GetStatsRequest()),
}
"""The question to a server of a kind, beside its metrics."""
