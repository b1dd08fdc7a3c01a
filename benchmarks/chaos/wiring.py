"""The mesh of `make chaos`: its processes, and a proxy on every link between two of them."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rollmesh.cli.up.plan import ProcessSpec
from tests.faults.proxy import Proxy, proxy_to

_SERVERS = {
    "engine": ("router",),
    "gateway": ("router", "collector"),
    "sidecar": ("router",),
    "agents": ("router", "collector"),
    "trainer": ("router", "collector"),
}
"""Which servers each process is given addresses of."""
_ADVERTISED = ("engine", "gateway")
"""Servers that others find through the router."""


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
        servers = await self.servers(spec.name, spec.service, stack)
        flags = [*spec.flags, *(f"--{name}={value}" for name, value in servers.items())]
        if spec.service in _ADVERTISED:
            flags.append(f"--advertise={await self._link('', spec, stack)}")
        return tuple(flags)

    async def servers(self, client: str, service: str, stack: AsyncExitStack) -> dict[str, str]:
        """Returns the addresses that a client is given, by the service at them."""
        return {
            server: ",".join([await self._link(client, one, stack) for one in self.of(server)])
            for server in _SERVERS.get(service, ())
        }

    async def _link(self, client: str, server: ProcessSpec, stack: AsyncExitStack) -> str:
        proxy = await stack.enter_async_context(proxy_to(server.address))
        self.links[f"{client}>{server.name}"] = proxy
        return proxy.address
