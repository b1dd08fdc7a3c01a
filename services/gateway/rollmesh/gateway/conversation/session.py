"""An open session: its tree, and its turns, in flight and answered, as retries find them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollmesh.chat.constraints.structural_tag import Wanted
from rollmesh.chat.messages import Message, RenderContext
from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent
from rollmesh.gateway.conversation.choices import Shared
from rollmesh.gateway.conversation.reading import MessageReader
from rollmesh.gateway.conversation.reasons import Lineage
from rollmesh.gateway.conversation.retries import retried
from rollmesh.gateway.conversation.sampled import Returns, Shown
from rollmesh.gateway.conversation.spec import AnswerRecord, SessionSpec
from rollmesh.gateway.conversation.tree import Node, Tree
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
    render_context: RenderContext
    sampling: types_pb2.SamplingParams
    stops: tuple[str, ...]
    wanted: Wanted
    stream: bool
    fingerprint: str
    """Digest of all that makes the answer; equal for a retry."""
    idempotency_key: str = ""
    """Names the sample; with the choice, of which each is a sample. May be empty."""
    choice: int = 0
    """Which of the request's choices it is, from 0."""
    keeps_stop: bool = False
    """Whether the stop string, or the text of a stop token, is part of the answer."""
    shows_special: bool = False
    """Whether special tokens are part of its text."""
    bad_words: tuple[str, ...] = ()
    returns: Returns = field(default_factory=Returns)
    shared: Shared[Any] = field(default_factory=Shared, compare=False)
    """What all choices of the request have in common: it is made into tokens once."""
    retry_count: int = 0
    finish_on_disconnect: bool = False
    lineage: Lineage | None = None
    """What the request says that it is; None where it says nothing."""

    @property
    def may_stop_early(self) -> bool:
        """Whether parts of the answer are needed before its end."""
        return self.stream or bool(self.stops) or self.wanted.one_call

    @property
    def identity(self) -> str:
        """What a retry has in common with the first try."""
        return self.idempotency_key or self.fingerprint


@dataclass(frozen=True, slots=True)
class Report:
    """What a request wants to know beside the answer."""

    prompt: bytes
    """Packed ids of the prompt; empty where they are not wanted."""
    tokens: Shown


@dataclass(frozen=True, slots=True)
class Answered:
    """A committed turn."""

    node: Node
    record: AnswerRecord
    report: Report | None = None
    """Where one is wanted, and was not told while it was sampled."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of an answer."""

    answer_id: str


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The prompt of a streamed answer, packed; told before all else."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens of a streamed answer, and the event that came with them."""

    tokens: Shown
    event: ParserEvent | None


StreamEvent: TypeAlias = ParserEvent | Told | PromptIds
TurnEvent: TypeAlias = Begun | StreamEvent | Answered


class Turn:
    """One sample that was asked for, and those who wait for its answer.

    Events are kept until the end, so that a retry that joins late gets all of them, and so that who
    reads slowly holds up neither the engine nor others: they have no more text than the answer.
    Afterwards they are read from the answer itself.
    """

    def __init__(
        self, node_id: int, answer_id: str, fingerprint: str, idempotency_key: str = ""
    ) -> None:
        """Begins a turn that nobody has joined; its ids are those it has when it is committed."""
        self.node_id = node_id
        self.answer_id = answer_id
        self.fingerprint = fingerprint
        self.idempotency_key = idempotency_key
        self.stream = False
        self.finish_on_disconnect = False
        self.lineage: Lineage | None = None
        self.waiting = 0
        self.joins = 0
        """How often somebody asked for its answer."""
        self.tries = 0
        self.handed = False
        """Whether its answer began to leave; whether it arrived may not be known."""
        self.left = False
        self.task: asyncio.Task[None] | None = None
        self.committing = False
        """Whether the answer is on its way to the journal: from then on it is kept."""
        self._events: list[StreamEvent] = []
        self._prompts = 0
        self.record_bytes = 0
        """What its path may add to the session's record, about, at most."""
        self._result: Answered | RollmeshError | None = None
        self._changed: asyncio.Event | None = None

    @classmethod
    def of(cls, request: TurnRequest, session_id: str, node_id: int) -> "Turn":
        """Returns the turn that a request begins, with the node id that is reserved for it."""
        answer_id = f"chatcmpl-{session_id}-{node_id}"
        turn = cls(node_id, answer_id, request.fingerprint, request.idempotency_key)
        turn.stream, turn.finish_on_disconnect = request.stream, request.finish_on_disconnect
        turn.lineage = request.lineage
        return turn

    @classmethod
    def stored(cls, answered: Answered) -> "Turn":
        """Returns an answered turn as the journal has it.

        Who had its answer is not known: everybody may have. That all of it left is known only where
        the agent went on from it.
        """
        record = answered.record
        turn = cls(
            answered.node.node_id, record.answer_id, record.fingerprint, record.idempotency_key
        )
        turn.handed, turn.left = True, bool(answered.node.children)
        turn.end(answered)
        return turn

    @property
    def identity(self) -> str:
        """What its retries have in common with it."""
        return self.idempotency_key or self.fingerprint

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
        """Whether a part of the answer may have left."""
        return self.stream and len(self._events) > self._prompts

    def begin(self, prompt: PromptIds) -> None:
        """Passes the prompt on, which is no part of the answer."""
        self._prompts = 1
        self.emit([prompt])

    def emit(self, events: Sequence[StreamEvent]) -> None:
        """Passes events on."""
        if events:
            self._events += events
            self._wake()

    def begin_again(self) -> None:
        """Drops the events of an answer that is lost; none of them has left."""
        del self._events[self._prompts :]

    def end(self, result: Answered | RollmeshError) -> None:
        """Ends the turn; the first end counts."""
        if self._result is None:
            self._result = result
            self._wake()
            self._events = []  # who reads them has the list

    def cancel(self, error: RollmeshError) -> None:
        """Ends a turn that is not on its way to the journal; who waits for it gets the error."""
        self.end(error)
        if self.task is not None:
            self.task.cancel()

    async def result(self) -> Answered:
        """Returns the committed turn, once there is one.

        Raises:
            RollmeshError: The turn failed.
        """
        while self._result is None:
            changed = self._changed = self._changed or asyncio.Event()
            await changed.wait()
        if isinstance(self._result, RollmeshError):
            raise self._result
        return self._result

    async def events(self) -> AsyncIterator[TurnEvent]:
        """Yields the beginning, the prompt where it is passed on, the events, and then the answer.

        Raises:
            RollmeshError: The turn failed.
        """
        yield Begun(self.answer_id)
        events: Sequence[StreamEvent] = self._events
        at = 0
        if self.answered is not None:
            events = _events_of(self.answered.node.messages[0])
        while True:
            changed = self._changed = self._changed or asyncio.Event()
            while at < len(events):
                at += 1
                yield events[at - 1]
            if isinstance(self._result, RollmeshError):
                raise self._result
            if self._result is not None:
                yield self._result
                return
            await changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


def _events_of(message: Message) -> list[ParserEvent]:
    """Returns a whole answer as the events of a stream."""
    events: list[ParserEvent] = [ReasoningEvent(message.reasoning)] if message.reasoning else []
    events += [TextEvent(message.content)] if message.content else []
    events += [
        ToolCallEvent(index, call.id, call.name, call.arguments)
        for index, call in enumerate(message.tool_calls)
    ]
    return events


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much one session may hold."""

    nodes: int
    tokens: int
    text_bytes: int
    record_bytes: int
    """Of the record, which must be small enough to be handed over."""

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

    def reserve(self, session: "Session", turn: Turn, held: int, added: int) -> None:
        """Keeps room in the session's record for a turn, as long as that is in flight.

        Args:
            session: The session.
            turn: The turn.
            held: Size of the record of what the session holds, bytes.
            added: What the turn may add, bytes.

        Raises:
            SessionLimitError: The session could not be closed with it.
        """
        turn.record_bytes = 0
        held += sum(other.record_bytes for other in session.in_flight)
        if held + added > self.record_bytes:
            raise SessionLimitError(
                f"the session's record would have {held + added} bytes with this turn and may have "
                f"{self.record_bytes}; close it, or raise max_session_record_bytes of the gateway",
                session_id=session.spec.session_id,
            )
        turn.record_bytes = added


@dataclass(slots=True)
class Session:
    """One open session."""

    spec: SessionSpec
    tree: Tree
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    """Those in flight and the answered ones, by what retries have in common, oldest first."""
    in_flight: list[Turn] = field(default_factory=list)
    reader: MessageReader = field(default_factory=MessageReader)
    """Reads its requests."""
    closing: bool = False
    used_ms: int = field(default_factory=clock.monotonic_ms)
    """When it was last used, on the monotonic clock."""

    def find_turn(self, request: TurnRequest) -> Turn | None:
        """Returns the turn that a request is a retry of; None where it is a new sample.

        Raises:
            IdempotencyKeyReusedError: The key names the sample of another request.
        """
        turns = self.turns.get(request.identity, [])
        if not request.idempotency_key:
            return retried(turns, request.retry_count)
        if turns and turns[0].fingerprint != request.fingerprint:
            raise IdempotencyKeyReusedError(
                "idempotency_key", "was given with another request; give each request its own"
            )
        return turns[0] if turns else None

    def begin(self, turn: Turn) -> None:
        """Takes up a turn that is in flight."""
        self.in_flight.append(turn)
        self.turns.setdefault(turn.identity, []).append(turn)

    def restore(self, answered: Answered) -> None:
        """Takes up an answered turn of the journal."""
        turn = Turn.stored(answered)
        self.turns.setdefault(turn.identity, []).append(turn)

    def end(self, turn: Turn, result: Answered | RollmeshError) -> None:
        """Ends a turn, unless it has ended; one that failed is forgotten: it is no sample."""
        if turn in self.in_flight:
            self.in_flight.remove(turn)
            self.used_ms = clock.monotonic_ms()
        turn.end(result)
        if turn.answered is None:
            self.forget(turn)

    def forget(self, turn: Turn) -> None:
        """Lets no more requests join a turn."""
        turns = self.turns.get(turn.identity, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self.turns.pop(turn.identity, None)

    def mark_orphans(self) -> list[Node]:
        """Marks the answers that never reached the agent, which went on without them.

        Returns:
            Those that did not reach it, marked or not.
        """
        nodes = [
            turn.answered.node
            for turns in self.turns.values()
            for turn in turns
            if turn.answered is not None and not (turn.handed or turn.waiting)
        ]
        for node in nodes:
            reasons = node.reasons - {
                types_pb2.FIDELITY_REASON_ORPHANED
            }  # of a close that was not stored
            node.reasons = (
                reasons if node.children else reasons | {types_pb2.FIDELITY_REASON_ORPHANED}
            )
        return nodes
