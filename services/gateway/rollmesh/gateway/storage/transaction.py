"""A transaction of a journal, and what runs it."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rollmesh.mesh.directories.gateways import JOURNAL_ID_CHARS
from rollmesh.runtime.errors import JournalMovedError, RollmeshError
from rollmesh.runtime.statements import Statements

_Result = TypeVar("_Result")
_RETRY_MS = 1000
SECRET_BYTES = 32
"""Length of the secret of session keys."""


def new_journal_id() -> str:
    """Returns an id for a new journal."""
    return secrets.token_hex(JOURNAL_ID_CHARS // 2)


def moved(journal_id: str) -> JournalMovedError:
    """Returns the error of a session whose journal is elsewhere."""
    return JournalMovedError(
        f"session_id: another gateway serves journal {journal_id}, or takes it over now; try again",
        retry_delay_ms=_RETRY_MS,
    )


class Transaction(NamedTuple):
    """A transaction of one journal; its tables may hold other journals, too."""

    db: Statements
    journal_id: str


class Journal(ABC):
    """One journal that this process may write; no other process may at the same time."""

    def __init__(self, journal_id: str, secret: bytes, epoch: int) -> None:
        """Takes the journal's identity."""
        self.journal_id = journal_id
        """What the ids of its sessions begin with."""
        self.secret = secret
        """Secret of the session keys."""
        self.epoch = epoch
        """Number of times that a gateway has taken it; 0 if that is not counted."""

    @abstractmethod
    async def run(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work in a transaction; returns once the commit is durable.

        Work may run more than once; all but the last run leave nothing.

        Raises:
            JournalMovedError: Another gateway has taken the journal; nothing was stored.
            StoreInDoubtError: The work may or may not be stored, and the journal is lost.
            RollmeshError: The store failed and nothing was stored, or an error of the work.
        """

    @abstractmethod
    async def read(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work that only reads, without delaying commits where the store can do that."""

    @abstractmethod
    async def lost(self) -> RollmeshError:
        """Waits until the journal cannot be written any more; returns the reason."""

    @abstractmethod
    async def release(self) -> None:
        """Leaves the journal to any gateway; nothing is written after that."""

    @abstractmethod
    async def remove(self) -> bool:
        """Removes the journal if it has no sessions; returns whether it did.

        Closes that it remembered are forgotten.
        """


class Journals(ABC):
    """The journals of a database that several gateways share."""

    @abstractmethod
    async def create(self) -> Journal:
        """Creates a journal and takes it."""

    @abstractmethod
    async def take(self) -> Journal | None:
        """Takes one journal of the model that nobody holds; None if there is none."""

    @abstractmethod
    async def renew(self) -> None:
        """Renews the leases of the journals that were taken; those of others are lost."""

    @abstractmethod
    async def remove_abandoned(self) -> int:
        """Removes journals without sessions that nobody has held for long; returns how many."""
