"""What NetworkPolicies allow: one connection judged by all of them, as Kubernetes documents it."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.kubernetes.rendering import Manifest

DNS = 53


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a connection."""

    labels: dict[str, str]
    namespace: str = "rollmesh"


def allowed(policies: list[Manifest], caller: Peer, server: Peer, port: int) -> bool:
    """Returns whether policies of the mesh's namespace let a TCP connection through."""
    return _one_way(policies, caller, server, port, "Egress") and _one_way(
        policies, server, caller, port, "Ingress"
    )


def _one_way(
    policies: list[Manifest], subject: Peer, other: Peer, port: int, direction: str
) -> bool:
    """What policies say of the one end that they select. What none selects is free."""
    here = [one for one in policies if direction in one["spec"]["policyTypes"]]
    selecting = [
        one
        for one in here
        if subject.namespace == one["metadata"]["namespace"]
        and matches(one["spec"]["podSelector"], subject.labels)
    ]
    if not selecting:
        return True
    rules = [rule for one in selecting for rule in one["spec"].get(direction.lower(), [])]
    return any(_takes(rule, other, port) for rule in rules)


def _takes(rule: Manifest, other: Peer, port: int) -> bool:
    peers = rule.get("from", rule.get("to"))
    ports = rule.get("ports")
    return (
        ports is None
        or any(one.get("protocol", "TCP") == "TCP" and one["port"] == port for one in ports)
    ) and (peers is None or any(_is(peer, other) for peer in peers))


def _is(peer: Manifest, other: Peer) -> bool:
    if "namespaceSelector" in peer:
        name = {"kubernetes.io/metadata.name": other.namespace}
        if not matches(peer["namespaceSelector"], name):
            return False
    elif other.namespace != "rollmesh":
        return False
    return matches(peer.get("podSelector", {}), other.labels)


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Returns whether a selector takes labels."""
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(labels) for _holds in _expressions(selector)
    )


def _expressions(selector: Manifest) -> Iterator["_In"]:
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", one
        yield _In(one["key"], frozenset(one["values"]))


@dataclass(frozen=True, slots=True)
class _In:
    key: str
    values: frozenset[str]

    def __call__(self, labels: dict[str, str]) -> bool:
        return labels.get(self.key) in self.values
