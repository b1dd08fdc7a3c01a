"""Errors of engines: their leases, their generations and their weights."""

from rollmesh.runtime.errors.error import InvalidFieldError, RollmeshError


class InvalidLeaseError(InvalidFieldError):
    """A lease request names no model in a mesh of several, or reuses the id of a lease."""

    reason = "INVALID_LEASE"


class NoEngineError(RollmeshError):
    """No engine can serve the turn."""

    code = "UNAVAILABLE"
    reason = "NO_ENGINE"


class EnginesBusyError(RollmeshError):
    """All leases of every engine are taken."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ENGINES_BUSY"


class EngineStartError(RollmeshError):
    """The model could not be loaded."""

    code = "FAILED_PRECONDITION"
    reason = "ENGINE_START_FAILED"


class EngineDeadError(RollmeshError):
    """The engine's model process died."""

    code = "UNAVAILABLE"
    reason = "ENGINE_DEAD"


class EngineLostError(RollmeshError):
    """The engine went away in the middle of a turn; nothing was committed."""

    code = "UNAVAILABLE"
    reason = "ENGINE_LOST"


class EngineMismatchError(RollmeshError):
    """The engine's vocabulary or context length does not fit the gateway's model."""

    code = "INTERNAL"
    reason = "ENGINE_MISMATCH"


class EngineFaultError(RollmeshError):
    """The engine contradicted itself or its request; its answer was discarded."""

    code = "INTERNAL"
    reason = "ENGINE_FAULT"
    spoils_tokens = True
    """Whether the tokens that it sampled before cannot be trusted either."""

    def __init__(
        self,
        message: str,
        *,
        spoils_tokens: bool = True,
        retry_delay_ms: int | None = None,
        **metadata: str | int,
    ) -> None:
        """Makes an error; an engine that is only stuck does not spoil its tokens."""
        super().__init__(message, retry_delay_ms=retry_delay_ms, **metadata)
        self.spoils_tokens = spoils_tokens


class GenerationAbortedError(RollmeshError):
    """An operator aborted the generation; nothing was committed."""

    code = "ABORTED"
    reason = "GENERATION_ABORTED"


class PrefixCacheInUseError(RollmeshError):
    """Running generations use the prefix cache, so it was not emptied."""

    code = "FAILED_PRECONDITION"
    reason = "PREFIX_CACHE_IN_USE"


class InvalidWeightsError(InvalidFieldError):
    """The new weights do not fit the model; the old ones stay in use."""

    reason = "INVALID_WEIGHTS"


class StaleVersionError(RollmeshError):
    """The policy version is not above the current one."""

    code = "FAILED_PRECONDITION"
    reason = "STALE_VERSION"


class SupersededError(RollmeshError):
    """A later push or stream replaced this one, or the engine left before it answered."""

    code = "ABORTED"
    reason = "SUPERSEDED"


class WeightTransferError(RollmeshError):
    """A transfer backend did not connect to the trainer or did not receive its weights."""

    code = "FAILED_PRECONDITION"
    reason = "WEIGHT_TRANSFER_FAILED"
