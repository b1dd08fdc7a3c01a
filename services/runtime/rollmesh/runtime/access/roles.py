"""The roles of a mesh, and the one table of which methods each of them may call."""

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Role(StrEnum):
    """The role of a caller. A token or a certificate shows one or several."""

    OPERATOR = "operator"
    TRAINER = "trainer"
    ENGINE = "engine"
    ROUTER = "router"
    GATEWAY = "gateway"
    COLLECTOR = "collector"
    SIDECAR = "sidecar"
    AGENT = "agent"


ROLES: Mapping[str, Role] = {str(role): role for role in Role}
"""By name."""
MEANING: Mapping[Role, str] = {
    Role.OPERATOR: "People and tools that run the mesh: they inspect it, pause engines, move "
    "consumers, and read stored sessions. They open no sessions and receive no deliveries.",
    Role.TRAINER: "The trainer and its rollout runners: they open and close sessions, receive "
    "trajectories, set rewards and push weights.",
    Role.ENGINE: "An engine. It registers with the routers. If it dials out, it opens tunnels to "
    "them and to gateways. It calls nobody else.",
    Role.ROUTER: "A router: it controls engines, brings weights to them, and shares weights with "
    "its peers.",
    Role.GATEWAY: "A gateway: it leases engines, generates on them, and hands closed sessions to "
    "the collector.",
    Role.COLLECTOR: "A collector. It registers with the routers, calls the scorer, and may have "
    "engines score tokens.",
    Role.SIDECAR: "A sidecar: it passes turns of agents on to gateways, each with its session's "
    "key. It may dial a relay.",
    Role.AGENT: "An agent. It calls the HTTP of a sidecar with the key of its session; of gRPC, "
    "only what describes a server.",
}
"""The meaning of each role."""

_R = Role
_EVERY_ROLE = frozenset(Role)
_SERVICES = frozenset({_R.ENGINE, _R.GATEWAY, _R.COLLECTOR, _R.SIDECAR})
_OPERATES = frozenset({_R.OPERATOR, _R.TRAINER})
_TRAINS = frozenset({_R.TRAINER})
_CONTROLS = frozenset({_R.OPERATOR, _R.ROUTER})
_GENERATES = frozenset({_R.GATEWAY, _R.TRAINER})
_TALKS = frozenset({_R.SIDECAR, _R.TRAINER})
_ROUTES = frozenset({_R.ROUTER})

_BY_SERVICE: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "rollmesh.v1.RouterService": {
        "PlaceSession": _OPERATES,
        "ListGateways": _OPERATES | _TALKS | {_R.ENGINE},
        "ListReplicas": _OPERATES | {_R.GATEWAY, _R.COLLECTOR},
        "RelayScoreTokens": _TRAINS | {_R.COLLECTOR},
        "ControlEngines": _OPERATES,
        "PushWeights": _OPERATES,
        "PinWeights": _OPERATES,
        "PushAdapter": _OPERATES,
        "ForgetWeights": _OPERATES,
        "OpenRun": _TRAINS,
    },
    "rollmesh.internal.v1.MembershipService": {"Register": _SERVICES},
    "rollmesh.internal.v1.LeaseService": {"Dispatch": frozenset({_R.GATEWAY})},
    "rollmesh.internal.v1.TunnelService": {"Attach": frozenset({_R.ENGINE, _R.SIDECAR})},
    "rollmesh.internal.v1.PeerService": dict.fromkeys(
        ("ListKeptWeights", "FetchWeights", "SyncWeights"), _ROUTES
    ),
    "rollmesh.v1.EngineService": {
        "Generate": _GENERATES,
        "Generations": _GENERATES,
        "ScoreTokens": _TRAINS | {_R.COLLECTOR, _R.ROUTER},
        "GetInfo": _GENERATES | {_R.OPERATOR},
        "ControlEngines": _CONTROLS,
        "UpdateWeights": _CONTROLS,
        "LoadAdapter": _CONTROLS,
    },
    "rollmesh.v1.GatewayService": {
        "CreateSession": _TRAINS,
        "FindSession": _OPERATES,
        "Chat": _TALKS,
        "StreamChat": _TALKS,
        "CountTokens": _TALKS,
        "GetAnswer": _TALKS,
        "WithdrawAnswer": _TALKS,
        "DeclareLineage": _TALKS,
        "CloseSession": _TALKS,
        "RevokeSessionKey": _TRAINS,
        "GetSession": _OPERATES,
        "GetGatewayInfo": _OPERATES | _TALKS,
    },
    "rollmesh.v1.GatewayAdminService": dict.fromkeys(
        (
            *("ListSessions", "EndSession", "EndSessionKey"),
            *("ListDeadLetters", "RetryDeadLetter", "DropDeadLetter"),
        ),
        frozenset({_R.OPERATOR}),
    ),
    "rollmesh.v1.CollectorService": {
        "Ingest": frozenset({_R.GATEWAY}),
        "AbandonSeat": _TRAINS,
        "CreateConsumer": _TRAINS,
        "GetConsumer": _OPERATES,
        "ListConsumers": _OPERATES,
        "UpdateConsumer": _OPERATES,
        "DeleteConsumer": _OPERATES,
        "Subscribe": _TRAINS,
        "GetStats": _OPERATES,
        "SetRewards": _TRAINS,
        "Seek": _OPERATES,
        "CreateCheckpoint": _TRAINS,
        "RestoreCheckpoint": _TRAINS,
        "ReleaseCheckpoint": _TRAINS,
        "ReportStep": _TRAINS,
        "Annotate": _TRAINS,
        "ListSteps": _OPERATES,
        "ListFiltered": _OPERATES,
        "ListGroups": _OPERATES,
        "ReadSessions": _OPERATES,
        "ReadChanges": _OPERATES,
    },
    "rollmesh.v1.ScorerService": {"Score": frozenset({_R.COLLECTOR})},
    "rollmesh.v1.ServerService": {"GetServerInfo": _EVERY_ROLE, "GetMetrics": _OPERATES},
    "grpc.health.v1.Health": {"Check": _EVERY_ROLE, "List": _EVERY_ROLE, "Watch": _EVERY_ROLE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": frozenset({_R.OPERATOR})},
}

TABLE: Mapping[str, frozenset[Role]] = {
    f"/{service}/{method}": roles
    for service, methods in _BY_SERVICE.items()
    for method, roles in methods.items()
}
"""Roles that may call a method, by its full name. A method that is missing has no caller."""
OPEN = frozenset({"/grpc.health.v1.Health/Check"})
"""Methods that answer anyone who reaches the port. Probes of containers carry no secrets, and the
answer says only whether the service serves."""


def may_call(method: str, roles: frozenset[Role]) -> bool:
    """Returns whether a caller may call a method.

    Args:
        method: Its full name: `/rollmesh.v1.GatewayService/Chat`.
        roles: Roles that the caller has shown, none for a stranger.
    """
    return method in OPEN or not roles.isdisjoint(TABLE.get(method, ()))


# Roles that a client certificate shows: URIs such as `rollmesh://role/engine`.

_PREFIX = b"rollmesh://role/"


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Role]:
    """Returns the roles of a verified client certificate. Unknown ones do not count."""
    names = auth_context.get("x509_subject_alternative_name", ())
    found = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    roles = (ROLES.get(name.decode(errors="replace")) for name in found)
    return frozenset(role for role in roles if role is not None)
