"""Errors of who is in the mesh."""

from rollmesh.runtime.errors.error import RollmeshError


class ReplicaIdInUseError(RollmeshError):
    """Another member is registered under this id."""

    code = "ALREADY_EXISTS"
    reason = "REPLICA_ID_IN_USE"


class NoGatewayError(RollmeshError):
    """No gateway serves the session, or takes a new one."""

    code = "UNAVAILABLE"
    reason = "NO_GATEWAY"


class NoCollectorError(RollmeshError):
    """No collector is registered with the router."""

    code = "UNAVAILABLE"
    reason = "NO_COLLECTOR"


class NoSidecarError(RollmeshError):
    """No sidecar is registered with the router."""

    code = "UNAVAILABLE"
    reason = "NO_SIDECAR"
