"""An open session: its tree, its turns in flight, and how retries find their answer.

A retry is not a sample. What a request asks for again is told by its idempotency key, which names
one sample however often it is asked for. Without a key a request is a retry when it equals one that
is in flight, or when it equals an answered one and says so (retry count) or its answer never left
whole. The same request after an answer that did leave is a new sample: a sibling.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from rollmesh.gateway.answer import Delta
from rollmesh.gateway.fidelity import Fidelity
from rollmesh.gateway.forced import Wanted
from rollmesh.gateway.journal import AnswerRecord, SessionSpec
from rollmesh.gateway.messages import Frame, Message
from rollmesh.gateway.reading import MessageReader
from rollmesh.gateway.tree import Node, Tree
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    IdempotencyKeyReusedError,
    RollmeshError,
    SessionLimitError,
)
from rollmesh.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One chat request, checked and free of protos but for its sampling parameters."""

    messages: tuple[Message, ...]
    frame: Frame
    sampling: types_pb2.SamplingParams
    stops: tuple[str, ...]
    wanted: Wanted
    stream: bool
    fingerprint: str
    """Digest of all that makes the answer; equal for a retry."""
    idempotency_key: str = ""
    """Names the sample; with the choice, of which each is a sample. May be empty."""
    retry_count: int = 0
    finish_on_disconnect: bool = False

    @property
    def may_stop_early(self) -> bool:
        """Whether pieces of the answer are needed before its end."""
        return self.stream or bool(self.stops) or self.wanted.one_call

    @property
    def identity(self) -> str:
        """What a retry has in common with the first try."""
        return self.idempotency_key or self.fingerprint


@dataclass(frozen=True, slots=True)
class Answered:
    """A committed turn."""

    node: Node
    record: AnswerRecord


class Turn:
    """One generation and those who wait for its answer.

    Pieces are kept until the end, so that a retry that joins late gets all of them, and so that who
    reads slowly holds up neither the engine nor others: they have no more text than the answer.
    """

    def __init__(self, request: TurnRequest) -> None:
        """Begins a turn that nobody has joined."""
        self.request = request
        self.subscribers = 0
        self.joins = 0
        """How often somebody asked for its answer."""
        self.task: asyncio.Task[None] | None = None
        self.committing = False
        """Whether the answer is on its way to the journal: from then on it is kept."""
        self.abandoned = False
        """Whether it was ended because nobody waits for it; no one joins it any more."""
        self._deltas: list[Delta] = []
        self._result: Answered | RollmeshError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether there is an answer or an error."""
        return self._result is not None

    @property
    def answered(self) -> Answered | None:
        """The committed turn, once there is one."""
        return self._result if isinstance(self._result, Answered) else None

    @property
    def has_emitted(self) -> bool:
        """Whether a piece of the answer may have left."""
        return self.request.stream and bool(self._deltas)

    def emit(self, deltas: list[Delta]) -> None:
        """Passes pieces on."""
        if deltas:
            self._deltas += deltas
            self._wake()

    def end(self, result: Answered | RollmeshError) -> None:
        """Ends the turn; the first end counts."""
        if self._result is None:
            self._result = result
            self._wake()

    def cancel(self, error: RollmeshError) -> None:
        """Ends a turn that is not on its way to the journal; who waits for it gets the error."""
        self.end(error)
        if self.task is not None:
            self.task.cancel()

    async def events(self) -> AsyncIterator[Delta | Answered]:
        """Yields the pieces and then the answer.

        Raises:
            RollmeshError: The turn failed.
        """
        at = 0
        while True:
            changed = self._changed
            while at < len(self._deltas):
                at += 1
                yield self._deltas[at - 1]
            if isinstance(self._result, RollmeshError):
                raise self._result
            if self._result is not None:
                yield self._result
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much one session may hold."""

    nodes: int
    tokens: int
    text_bytes: int

    def check(self, session: "Session") -> None:
        """Checks that a session may take another turn.

        Raises:
            SessionLimitError: It holds as much as it may.
        """
        tree = session.tree
        for name, held, most in (
            ("nodes", len(tree.nodes), self.nodes),
            ("tokens", tree.tokens, self.tokens),
            ("bytes", tree.text_bytes, self.text_bytes),
        ):
            if held >= most:
                raise SessionLimitError(
                    f"the session holds {held} {name} and may hold {most}; close it, or raise "
                    f"max_session_{name} of the gateway",
                    session_id=session.spec.session_id,
                )


@dataclass(slots=True)
class Session:
    """One open session."""

    spec: SessionSpec
    tree: Tree
    answers: dict[str, Answered] = field(default_factory=dict)
    """The answer of each idempotency key, and the newest without one of each fingerprint."""
    delivered: set[int] = field(default_factory=set)
    """Node ids of answers that left whole."""
    handed: set[int] = field(default_factory=set)
    """Node ids of answers that began to leave; whether they arrived may not be known."""
    unseen: set[int] = field(default_factory=set)
    """Node ids of answers that were committed when nobody waited for them any more."""
    in_flight: dict[str, Turn] = field(default_factory=dict)
    """By what retries have in common."""
    reader: MessageReader = field(default_factory=MessageReader)
    """Reads its requests."""
    closing: bool = False
    used_ms: int = field(default_factory=clock.monotonic_ms)
    """When it was last used, on the monotonic clock."""

    def find_answer(self, request: TurnRequest) -> Answered | None:
        """Returns the answer that a request is a retry of; None where it is a new sample.

        Raises:
            IdempotencyKeyReusedError: The key names the sample of another request.
        """
        found = self.answers.get(request.identity)
        if found is None:
            return None
        if request.idempotency_key:
            _check_same(found.record.fingerprint, request)
            return found
        is_retry = request.retry_count > 0 or found.node.node_id not in self.delivered
        return found if is_retry else None

    def find_turn(self, request: TurnRequest) -> Turn | None:
        """Returns the turn in flight that a request is a retry of; None where there is none.

        Raises:
            IdempotencyKeyReusedError: The key names the sample of another request.
        """
        turn = self.in_flight.get(request.identity)
        if turn is None or turn.abandoned:
            return None
        _check_same(turn.request.fingerprint, request)
        return turn

    def leaves(self, answered: Answered) -> None:
        """Notes that an answer is handed out: from now on it counts as seen."""
        self.handed.add(answered.node.node_id)
        self.unseen.discard(answered.node.node_id)

    def deserted(self, turn: Turn) -> None:
        """Notes that nobody waits for a turn any more, which may have ended unseen."""
        answered = turn.answered
        if answered is not None and answered.node.node_id not in self.handed:
            self.unseen.add(answered.node.node_id)

    def mark_orphans(self) -> None:
        """Marks the answers that never reached the agent, which went on without them.

        After a restart it is not known who had an answer; then everybody has.
        """
        for node_id in self.unseen:
            node = self.tree.nodes[node_id]
            reasons = node.reasons - {Fidelity.ORPHANED}  # of a close that could not be stored
            node.reasons = reasons if node.children else reasons | {Fidelity.ORPHANED}

    def answered(self, answered: Answered) -> None:
        """Remembers a committed turn."""
        record = answered.record
        self.answers[record.idempotency_key or record.fingerprint] = answered


def _check_same(fingerprint: str, request: TurnRequest) -> None:
    if fingerprint != request.fingerprint:
        raise IdempotencyKeyReusedError(
            "idempotency_key", "was given with another request; give each request its own"
        )
