"""Errors of journals and stores."""

from rollmesh.runtime.errors.error import RollmeshError


class StoreFullError(RollmeshError):
    """The store is full until deliveries are acknowledged, or its disk is full."""

    code = "RESOURCE_EXHAUSTED"
    reason = "STORE_FULL"


class StoreError(RollmeshError):
    """The store failed; nothing of the request was stored."""

    reason = "STORE_FAILED"


class StoreLostError(StoreError):
    """The store's files were removed or replaced while open; nothing more is stored."""

    reason = "STORE_LOST"


class StoreInUseError(StoreError):
    """Another running process has the store open."""

    code = "FAILED_PRECONDITION"
    reason = "STORE_IN_USE"


class StoreAwayError(RollmeshError):
    """The store's server cannot be reached; nothing of the request was stored."""

    code = "UNAVAILABLE"
    reason = "STORE_AWAY"


class StoreInDoubtError(StoreAwayError):
    """The store's server was lost in a commit; whether the request was stored is unknown."""

    reason = "STORE_IN_DOUBT"


class JournalMovedError(RollmeshError):
    """Another gateway serves the session's journal; nothing of the request was stored."""

    code = "UNAVAILABLE"
    reason = "JOURNAL_MOVED"
