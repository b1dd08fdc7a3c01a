"""Errors of sessions and their answers."""

from rollmesh.runtime.errors.error import InvalidFieldError, RollmeshError


class GroupSizeError(InvalidFieldError):
    """A session gives its group a different size than earlier sessions did."""

    reason = "GROUP_SIZE_CONFLICT"


class SessionUnknownError(RollmeshError):
    """No session has this id."""

    code = "NOT_FOUND"
    reason = "SESSION_UNKNOWN"


class AnswerUnknownError(RollmeshError):
    """The session has no answer with this id, or it was withdrawn."""

    code = "NOT_FOUND"
    reason = "ANSWER_UNKNOWN"


class SessionDamagedError(RollmeshError):
    """The stored data of a session cannot be read; other sessions are not affected."""

    code = "DATA_LOSS"
    reason = "SESSION_DAMAGED"


class SessionClosedError(RollmeshError):
    """The session is closed and accepts no more turns."""

    code = "FAILED_PRECONDITION"
    reason = "SESSION_CLOSED"


class SessionLimitError(RollmeshError):
    """The session has reached a limit; its contents are kept, and it can be closed."""

    code = "OUT_OF_RANGE"
    reason = "SESSION_LIMIT"


class SessionKeyWrongError(RollmeshError):
    """The key does not open this session."""

    code = "UNAUTHENTICATED"
    reason = "SESSION_KEY_WRONG"


class TooManySessionsError(RollmeshError):
    """The gateway has its maximum number of open sessions."""

    code = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_SESSIONS"
