"""The mesh of `make chaos`: its processes, and a proxy on every link between two of them."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rollmesh.launch import ProcessSpec
from tests.faults.proxy import Proxy, proxy_to

_ROUTED = ("engine", "gateway", "collector", "sidecar", "agents", "trainer")
"""What is told where the routers are."""
_ADVERTISED = ("engine", "gateway", "collector")
"""What is found through the routers."""


@dataclass
class Wiring:
    """The processes, the links between them, and what each process must be told."""

    specs: Sequence[ProcessSpec]
    links: dict[str, Proxy] = field(default_factory=dict)
    """By name: `gateway-0>router` for one client, `>engine-1` for all."""

    def of(self, service: str) -> list[ProcessSpec]:
        """Returns the processes of a service."""
        return [spec for spec in self.specs if spec.service == service]

    async def flags(self, spec: ProcessSpec, stack: AsyncExitStack) -> tuple[str, ...]:
        """Returns the flags of a process, with its links instead of the servers' addresses."""
        flags = [*spec.flags]
        if spec.service in _ROUTED:
            flags.append(f"--router={await self.routers(spec.name, stack)}")
        if spec.service == "router":
            flags.append(f"--peers={await self.routers(spec.name, stack)}")
        if spec.service in _ADVERTISED:
            flags.append(f"--advertise={await self._link('', spec, stack)}")
        return tuple(flags)

    async def routers(self, client: str, stack: AsyncExitStack) -> str:
        """Returns the addresses of the routers, but itself, that a client is given."""
        routers = [one for one in self.of("router") if one.name != client]
        return ",".join([await self._link(client, one, stack) for one in routers])

    async def _link(self, client: str, server: ProcessSpec, stack: AsyncExitStack) -> str:
        proxy = await stack.enter_async_context(proxy_to(server.address))
        self.links[f"{client}>{server.name}"] = proxy
        return proxy.address
