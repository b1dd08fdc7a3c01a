"""The model whose token ids a journal holds."""

from typing import NamedTuple


class ModelFiles(NamedTuple):
    """The files that determine a conversation's token ids; SHA-256 of each, hexadecimal."""

    tokenizer_sha256: str
    template_sha256: str


class OtherModelError(Exception):
    """The journal has open sessions of another model."""

    def __init__(self, found: ModelFiles, open_sessions: int) -> None:
        """Takes the journal's model and the number of its open sessions."""
        super().__init__(found, open_sessions)
        self.found = found
        self.open_sessions = open_sessions
