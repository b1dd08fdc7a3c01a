"""A network for pods on this machine: a bridge, and a namespace with an address for each."""

import asyncio
import ipaddress
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PIECE = 64 * 1024
_MOST_NETWORKS = 250


def run(*command: str) -> str:
    """Runs a program. Returns what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """The network of a cluster, and the names in it.

    Its bridge is in a namespace of its own, where no firewall of this machine drops packets.
    """

    def __init__(self, folder: Path) -> None:
        number, self._name = _free_name()
        self._addresses = ipaddress.ip_network(f"10.213.{number}.0/24").hosts()
        self.host = str(next(self._addresses))
        """Address of this machine."""
        self._made = {self._name}
        self._numbers = itertools.count()
        self.hosts_file = folder / "hosts"
        """What pods have as /etc/hosts: names of Services and pods."""
        self.hosts_file.write_text("")
        self._inside("link", "add", "bridge", "type", "bridge")
        self._inside("link", "set", "bridge", "up")
        self._connect(self._name)
        run("ip", "address", "add", f"{self.host}/24", "dev", self._name)
        run("ip", "link", "set", self._name, "up")

    def add(self) -> tuple[str, str]:
        """Makes the network namespace of a pod. Returns its name and its address."""
        name, address = f"{self._name}-{next(self._numbers)}", str(next(self._addresses))
        self._made.add(name)
        run("ip", "netns", "add", name)
        self._connect("eth0", "netns", name)
        within = ("ip", "-n", name)
        run(*within, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run(*within, "link", "set", device, "up")
        return name, address

    def _connect(self, device: str, *where: str) -> None:
        """Makes a device that leads to the bridge."""
        end = f"p{next(self._numbers)}"
        run(
            "ip",
            "link",
            "add",
            device,
            *where,
            "type",
            "veth",
            "peer",
            "name",
            end,
            "netns",
            self._name,
        )
        self._inside("link", "set", end, "master", "bridge", "up")

    def _inside(self, *command: str) -> None:
        run("ip", "-n", self._name, *command)

    def cut(self, name: str) -> None:
        """Takes a pod off the network without a word to its peers."""
        with suppress(OSError):
            run("ip", "-n", name, "link", "delete", "eth0")

    def remove(self, name: str) -> None:
        """Removes the network namespace of a pod that has ended."""
        self._made.discard(name)
        with suppress(OSError):
            run("ip", "netns", "delete", name)

    def service_address(self) -> str:
        """Returns a further address of this machine, for a Service."""
        address = str(next(self._addresses))
        run("ip", "address", "add", f"{address}/24", "dev", self._name)
        return address

    def publish(self, names: Sequence[tuple[str, str]]) -> None:
        """Gives names to addresses, as the cluster's DNS does. Pods have the file mounted."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in names)]
        self.hosts_file.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        for name in sorted(self._made, reverse=True):
            self.remove(name)


def _free_name() -> tuple[int, str]:
    """Makes the namespace of a network that no other process has. Returns its number and name."""
    for number in range(1, _MOST_NETWORKS):
        name = f"rollmesh{number}"
        with suppress(OSError):
            run("ip", "netns", "add", name)
            return number, name
    raise OSError("`ip netns` makes no namespace, or has those of too many runs")


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A network that is gone when the block ends."""
    made = Network(folder)
    try:
        yield made
    finally:
        made.close()


async def forward(address: str, port: int, ends: Callable[[], str | None]) -> asyncio.Server:
    """Serves an address of a Service: each connection goes to an end, or is refused."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                writer.write(piece)
                await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if (end := ends()) is None:
                return
            with suppress(OSError):
                other_reader, other = await asyncio.open_connection(end, port)
                try:
                    await asyncio.gather(pump(reader, other), pump(other_reader, writer))
                finally:
                    other.close()
        finally:
            writer.close()

    return await asyncio.start_server(connected, address, port)
