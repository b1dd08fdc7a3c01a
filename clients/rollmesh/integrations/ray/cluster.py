"""What the cluster says of itself."""

import socket
from contextlib import ExitStack
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from rollmesh.integrations.ray.placement import Node
from rollmesh.runtime.config import ConfigError


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


def free_addresses(ports: list[int]) -> list[str]:
    """Returns host:port of the node on which it runs for each port, 0 standing for a free one."""
    host = ray.util.get_node_ip_address()
    shown = f"[{host}]" if ":" in host else host
    with ExitStack() as held:
        return [f"{shown}:{port or _free_port(host, held)}" for port in ports]


def _free_port(host: str, held: ExitStack) -> int:
    """Returns a free port, which stays reserved until the stack is closed."""
    probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    probe.bind((host, 0))
    return int(probe.getsockname()[1])


def group_of(group_id: str) -> PlacementGroup:
    """Returns the placement group of an id, whoever made it."""
    from ray._raylet import PlacementGroupID  # noqa: PLC0415

    made: Any = PlacementGroupID(bytes.fromhex(group_id))
    return PlacementGroup(made)
