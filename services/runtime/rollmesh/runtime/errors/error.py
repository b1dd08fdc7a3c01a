"""The base of all errors, and the error that names a field."""


class RollmeshError(Exception):
    """Base of all errors that cross a service boundary."""

    code: str = "INTERNAL"
    """Name of the gRPC status code."""
    reason: str = "INTERNAL"
    """What programs tell errors by."""

    def __init__(
        self, message: str, *, retry_delay_ms: int | None = None, **metadata: str | int
    ) -> None:
        """Makes an error.

        Args:
            message: For people: the field, what is wrong, what to do.
            retry_delay_ms: When trying again makes sense, milliseconds from now.
            **metadata: The variable parts of the message, for programs.
        """
        super().__init__(message)
        self.message = message
        self.retry_delay_ms = retry_delay_ms
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidFieldError(RollmeshError):
    """A field of a request is missing, out of range, or of the wrong form."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str, **metadata: str | int) -> None:
        """Makes an error that names `field` and says what is wrong and what to do."""
        super().__init__(f"{field}: {problem}", retry_delay_ms=None, field=field)
        self.metadata |= {key: str(value) for key, value in metadata.items()}
        self.field = field


class RemoteError(RollmeshError):
    """A status without a rollmesh reason, from the transport or a foreign server."""

    reason = "REMOTE"

    def __init__(self, message: str, code: str) -> None:
        """Keeps the name of the foreign status code as `code`."""
        super().__init__(message, status_code=code)
        self.code = code
