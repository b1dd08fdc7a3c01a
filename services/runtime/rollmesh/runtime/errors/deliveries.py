"""Errors of consumers and scorers."""

from rollmesh.runtime.errors.error import RollmeshError


class ConsumerExistsError(RollmeshError):
    """A consumer has this name."""

    code = "ALREADY_EXISTS"
    reason = "CONSUMER_EXISTS"


class ConsumerUnknownError(RollmeshError):
    """No consumer has this name."""

    code = "NOT_FOUND"
    reason = "CONSUMER_UNKNOWN"


class ConsumerMovedError(RollmeshError):
    """The consumer was moved or got another group policy; its streams must be reopened."""

    code = "UNAVAILABLE"
    reason = "CONSUMER_MOVED"


class ScorerFailedError(RollmeshError):
    """The scorer's function raised or took too long, or its process died."""

    reason = "SCORER_FAILED"


class ScorerBusyError(RollmeshError):
    """Too many sessions wait for the scorer already."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SCORER_BUSY"
