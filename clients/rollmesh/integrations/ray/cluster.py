"""What the cluster says of itself."""

import os
import random
import socket
from contextlib import ExitStack

import ray
from ray._private.state import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollmesh.integrations.ray.placement import HEAD, HEALTH, Losses, Node
from rollmesh.runtime.config import ConfigError

_PORTS = range(20_000, 30_000)
"""Where ports are chosen: by their defaults, Ray's workers and outgoing connections take others,
so none of them gets one before its service has started."""


def nodes() -> list[Node]:
    """Returns the nodes that are alive."""
    return [
        Node(one["NodeID"], float(one["Resources"].get("CPU", 0)))
        for one in ray.nodes()
        if one["Alive"]
    ]


def node_of(resource: str) -> str:
    """Returns the id of the node that has a resource.

    Raises:
        ConfigError: No node that is alive has it, or several have.
    """
    found = [one["NodeID"] for one in ray.nodes() if one["Alive"] and resource in one["Resources"]]
    if len(found) != 1:
        raise ConfigError(
            f"ray.disk: {len(found)} nodes have the resource {resource!r}; give it to one, by "
            f"`ray start --resources`"
        )
    return str(found[0])


def losses(timeout_s: float) -> Losses:
    """Returns how Ray finds out that nodes are lost."""
    alive = [bool(one["Alive"]) for one in ray.nodes()]
    head = NodeAffinitySchedulingStrategy(node_of(HEAD), soft=False)
    asked = ray.remote(_health_variables).options(scheduling_strategy=head, num_cpus=0)
    chosen = ray.get(asked.remote(), timeout=timeout_s) | state.get_system_config()
    settings = {name: int(chosen.get(name, default)) for name, default in HEALTH.items()}
    return Losses(sum(alive), len(alive) - sum(alive), settings)


def _health_variables() -> dict[str, str]:
    """Returns what the environment of the head node's Ray says, which its workers have too."""
    known = {name: os.environ.get(f"RAY_{name}") for name in HEALTH}  # noqa: TID251
    return {name: value for name, value in known.items() if value}


def addresses_at(node_id: str, ports: list[int], timeout_s: float) -> list[str]:
    """Returns host:port of a node for each port, 0 standing for a free one."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = ray.remote(free_addresses).options(scheduling_strategy=there, num_cpus=0)
    found: list[str] = ray.get(asked.remote(ports), timeout=timeout_s)
    return found


def free_addresses(ports: list[int]) -> list[str]:
    """Returns host:port of the node on which it runs for each port, 0 standing for a free one."""
    host = ray.util.get_node_ip_address()
    shown = f"[{host}]" if ":" in host else host
    with ExitStack() as held:
        return [f"{shown}:{port or _free_port(host, held)}" for port in ports]


def _free_port(host: str, held: ExitStack) -> int:
    """Returns a free port, which stays reserved until the stack is closed.

    Raises:
        ConfigError: All of them are taken.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.enter_context(probe)
        try:
            probe.bind((host, port))
        except OSError:  # another process has it
            continue
        return port
    raise ConfigError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free at {host}; set `port`")
