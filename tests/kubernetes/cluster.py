"""A cluster without an API server: it keeps, rolls, evicts and loses pods by the manifests."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.kubelet import Pod, make_pod
from tests.kubernetes.network import Network, forward, network
from tests.kubernetes.policies import Peer, allowed, matches
from tests.kubernetes.rendering import ROLLED, Manifest, of_kind

_DOMAIN = "rollmesh.svc.cluster.local"


@dataclass
class Cluster:
    """Pods, by the names of what makes them."""

    objects: list[Manifest]
    network: Network
    folder: Path
    secrets: dict[tuple[str, str], str]
    pods: dict[str, list[Pod]] = field(default_factory=dict)
    gone: list[Pod] = field(default_factory=list)
    forbidden: set[tuple[str, str, int]] = field(default_factory=set)
    """Connections that were seen and that no policy allows: roles, and the port."""
    connected: set[tuple[str, str]] = field(default_factory=set)
    """Roles between which connections were seen."""
    _services: dict[str, str] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def claims(self) -> Path:
        return self.folder / "claims"

    @property
    def makers(self) -> dict[str, Manifest]:
        return of_kind(self.objects, *ROLLED)

    def all_pods(self) -> list[Pod]:
        return [pod for pods in self.pods.values() for pod in pods]

    async def serve(self, stack: AsyncExitStack) -> None:
        """Serves the addresses of Services that have one."""
        for name, service in of_kind(self.objects, "Service").items():
            if service["spec"].get("clusterIP") == "None":
                continue
            address = self.network.service_address()
            self._services[name] = address
            turn = itertools.count()

            def end(maker: str = name, turn: "itertools.count[int]" = turn) -> str | None:
                ready = [pod.address for pod in self.pods.get(maker, []) if pod.ready]
                return ready[next(turn) % len(ready)] if ready else None

            for port in service["spec"]["ports"]:
                server = await forward(address, port["port"], end)
                stack.callback(server.close)

    async def start(self) -> None:
        """Starts all pods at once, and waits until they are ready."""
        async with asyncio.TaskGroup() as group:
            for maker, one in self.makers.items():
                for number in range(one["spec"]["replicas"]):
                    group.create_task(self._ready(maker, self._name(maker, number)))

    async def run(self, name: str, template: Manifest) -> Pod:
        """Starts a pod that nothing makes. It has no probes."""
        return await self._add(name, name, template)

    async def roll(self, maker: str) -> None:
        """Replaces all pods, as after a change of the template: by the strategy of their maker."""
        one = self.makers[maker]
        if one["kind"] == "Deployment":
            strategy = one["spec"]["strategy"]["rollingUpdate"]
            assert strategy == {"maxSurge": 1, "maxUnavailable": 0}
            for old in [*self.pods[maker]]:
                await self._ready(maker, self._name(maker, 0))
                await self._delete(maker, old)
            return
        for number in reversed(range(one["spec"]["replicas"])):
            name = self._name(maker, number)
            await self._delete(maker, self.pod(name))
            await self._ready(maker, name)

    async def evict(self, pod: Pod) -> None:
        """Drains a pod from its node, which its budget must allow, and waits for the next one."""
        maker = self._maker(pod)
        budget = of_kind(self.objects, "PodDisruptionBudget")[maker]["spec"]
        assert matches(budget["selector"], pod.labels)
        unavailable = self.makers[maker]["spec"]["replicas"] - sum(
            one.ready for one in self.pods[maker]
        )
        assert unavailable < budget["maxUnavailable"], f"{pod.name} may not be evicted"
        is_stateful = self.makers[maker]["kind"] == "StatefulSet"
        await self._delete(maker, pod)
        await self._ready(maker, pod.name if is_stateful else self._name(maker, 0))

    async def lose(self, *names: str) -> None:
        """Loses a node with these pods, and waits until others run in their places."""
        lost = [self.pod(name) for name in names]
        self.look()
        makers = [self._maker(pod) for pod in lost]
        await asyncio.gather(*(pod.lose() for pod in lost))
        for maker, pod in zip(makers, lost, strict=True):
            self._forget(maker, pod)
        async with asyncio.TaskGroup() as group:
            for maker, pod in zip(makers, lost, strict=True):
                group.create_task(self._ready(maker, pod.name))

    def pod(self, name: str) -> Pod:
        (found,) = [pod for pod in self.all_pods() if pod.name == name]
        return found

    def look(self) -> None:
        """Notes which pods are connected, and judges it by the policies."""
        policies = list(of_kind(self.objects, "NetworkPolicy").values())
        at = {pod.address: pod for pod in self.all_pods()}
        for pod in self.all_pods():
            for address, port in pod.connections():
                if (other := at.get(address)) is None or other is pod:
                    continue
                roles = (pod.labels["rollmesh-role"], other.labels["rollmesh-role"])
                self.connected.add(roles)
                if not allowed(policies, Peer(pod.labels), Peer(other.labels), port):
                    self.forbidden.add((*roles, port))

    async def _ready(self, maker: str, name: str) -> None:
        pod = await self._add(maker, name, self.makers[maker]["spec"]["template"])
        await pod.until_ready()

    async def _add(self, maker: str, name: str, template: Manifest) -> Pod:
        claimed = self.makers.get(maker, {}).get("spec", {}).get("volumeClaimTemplates", [])
        volumes = [
            {
                "name": one["metadata"]["name"],
                "persistentVolumeClaim": {"claimName": f"{one['metadata']['name']}-{name}"},
            }
            for one in claimed
        ]
        spec = {**template["spec"], "volumes": [*template["spec"]["volumes"], *volumes]}
        folder = self.folder / f"{name}-{next(self._numbers)}"
        pod = make_pod(
            name,
            {**template, "spec": spec},
            self.objects,
            self.network,
            folder,
            claims=self.claims,
            secrets=self.secrets,
        )
        self.pods.setdefault(maker, []).append(pod)
        await pod.start()
        self._publish()
        return pod

    async def _delete(self, maker: str, pod: Pod) -> None:
        self.look()
        await pod.stop()
        self._forget(maker, pod)

    def _forget(self, maker: str, pod: Pod) -> None:
        self.pods[maker].remove(pod)
        self.gone.append(pod)
        self._publish()

    def _publish(self) -> None:
        names = [
            (pod.address, f"{pod.name}.{maker}{domain}")
            for maker, pods in self.pods.items()
            for pod in pods
            for domain in ("", f".{_DOMAIN}")
            if pod.address
        ]
        names += [(address, name) for name, address in self._services.items()]
        self.network.publish(names)

    def _name(self, maker: str, number: int) -> str:
        if self.makers[maker]["kind"] == "StatefulSet":
            return f"{maker}-{number}"
        return f"{maker}-{next(self._numbers):05x}"

    def _maker(self, pod: Pod) -> str:
        return next(maker for maker, pods in self.pods.items() if pod in pods)


@asynccontextmanager
async def cluster(
    objects: list[Manifest], folder: Path, secrets: dict[tuple[str, str], str]
) -> AsyncIterator[Cluster]:
    """A cluster without pods. Those that it has at the end are killed."""
    with network(folder) as made:
        found = Cluster(objects, made, folder, secrets)
        found.claims.mkdir()
        async with AsyncExitStack() as stack:
            await found.serve(stack)
            try:
                yield found
            finally:
                await asyncio.gather(*(pod.end() for pod in found.all_pods()))
