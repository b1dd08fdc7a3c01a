"""Errors of a call to any service, whatever it asks for."""

from rollmesh.runtime.errors.error import InvalidFieldError, RollmeshError


class UndecodableError(InvalidFieldError):
    """The bytes of a request are not a message of the called method."""

    reason = "UNDECODABLE"


class RepeatConflictError(RollmeshError):
    """A write was repeated with a different body; the first one was kept."""

    code = "ALREADY_EXISTS"
    reason = "REPEAT_CONFLICT"


class WrongServiceError(RollmeshError):
    """The server does not serve this method; another service of it does."""

    code = "UNIMPLEMENTED"
    reason = "WRONG_SERVICE"


class CallerUnknownError(RollmeshError):
    """The caller showed no token or certificate that this server accepts."""

    code = "UNAUTHENTICATED"
    reason = "CALLER_UNKNOWN"


class RoleRefusedError(RollmeshError):
    """The caller's role may not call this method."""

    code = "PERMISSION_DENIED"
    reason = "ROLE_REFUSED"


class OverloadedError(RollmeshError):
    """The service holds as many bytes of requests as it may; nothing of this one was kept."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class StartingError(RollmeshError):
    """The service is still reading its store."""

    code = "UNAVAILABLE"
    reason = "STARTING"


class ShuttingDownError(RollmeshError):
    """The service is shutting down and accepts no new work."""

    code = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"


class DeadlineError(RollmeshError):
    """The deadline passed before there was an answer."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"
