"""The model whose token ids a journal holds."""

from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.runtime.errors import StoreError


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


def check_names(found: Sequence[str], served: str) -> None:
    """Checks that the open sessions of a journal are of the model that is served.

    Raises:
        StoreError: Some have a model of another name.
    """
    others = [name for name in found if name != served]
    if others:
        raise StoreError(
            f"the journal holds {len(others)} open sessions of model {others[0]!r}, and this "
            f"gateway serves {served!r}; serve them under that name until they are closed, or name "
            "another data_dir"
        )
