"""An open session: its tree, and its in-flight and answered turns, indexed for retries."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollmesh.chat.constraints.structural_tag import Wanted
from rollmesh.chat.messages import Message, RenderContext
from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent
from rollmesh.gateway.conversation.choices import Shared
from rollmesh.gateway.conversation.images import SessionImages
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.reading import Conversation, MessageReader
from rollmesh.gateway.conversation.reasons import Lineage
from rollmesh.gateway.conversation.retries import retried
from rollmesh.gateway.conversation.sampled import Returns, Shown
from rollmesh.gateway.conversation.spec import AnswerReceipt, SessionSpec, answer_id_of
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.runtime import clock
from rollmesh.runtime.codec.images import CheckedImage
from rollmesh.runtime.errors import (
    IdempotencyKeyReusedError,
    RollmeshError,
)
from rollmesh.v1 import sampling_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One choice of a validated chat request; only its sampling parameters are still a proto."""

    conversation: Conversation
    render_context: RenderContext
    callable_context: RenderContext
    """The tools that may be called: the printed ones, and those that the conversation describes."""
    sampling: sampling_pb2.SamplingParams
    stops: tuple[str, ...]
    wanted: Wanted
    stream: bool
    fingerprint: str
    """Digest of everything that determines the answer; equal for a retry."""
    idempotency_key: str = ""
    """Key of the sample, including the choice index: each choice is a sample. May be empty."""
    choice: int = 0
    """Index of the choice, from 0."""
    keeps_stop: bool = False
    """Whether the stop string, or the text of a stop token, is part of the answer."""
    shows_special: bool = False
    """Whether special tokens are part of the answer's text."""
    bad_words: tuple[str, ...] = ()
    returns: Returns = field(default_factory=Returns)
    shared: Shared[Any] = field(default_factory=Shared, compare=False)
    """Work shared by all choices of the request: it is tokenised once."""
    retry_count: int = 0
    finish_on_disconnect: bool = False
    lineage: Lineage | None = None
    """The lineage that the request gives; None if it gives none."""
    max_tokens_must_fit: bool = False
    """Whether to refuse a request whose answer may not fit into the context."""

    @property
    def may_stop_early(self) -> bool:
        """Whether parts of the answer are needed before it is complete."""
        return self.stream or bool(self.stops) or self.wanted.one_call

    @property
    def identity(self) -> str:
        """The key that a retry shares with the first try."""
        return self.idempotency_key or self.fingerprint


@dataclass(frozen=True, slots=True)
class Report:
    """What a request wants in addition to the answer."""

    prompt: bytes
    """Packed ids of the prompt; empty if they are not requested."""
    tokens: Shown


@dataclass(frozen=True, slots=True)
class Answered:
    """A committed turn."""

    node: Node
    receipt: AnswerReceipt
    report: Report | None = None
    """Set if one is requested and was not streamed during sampling."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of an answer."""

    answer_id: str


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The packed prompt of a streamed answer; sent before the answer's events."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt was read; comes once, before everything else but the beginning."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens of a streamed answer, and the event that they produced."""

    tokens: Shown
    event: ParserEvent | None


StreamEvent: TypeAlias = ParserEvent | Told | PromptIds
TurnEvent: TypeAlias = Begun | Reading | StreamEvent | Answered


class Turn:
    """One requested sample and the requests that wait for its answer.

    Events are buffered until the turn ends. A retry that joins late gets all of them, and a slow
    reader delays neither the engine nor other readers. The buffer holds no more text than the
    answer. After the end, events are derived from the answer itself.
    """

    def __init__(
        self, node_id: int, answer_id: str, fingerprint: str, idempotency_key: str = ""
    ) -> None:
        """Creates a turn that no request has joined; its ids stay the same when it is committed."""
        self.node_id = node_id
        self.answer_id = answer_id
        self.fingerprint = fingerprint
        self.idempotency_key = idempotency_key
        self.stream = False
        self.finish_on_disconnect = False
        self.lineage: Lineage | None = None
        self.waiting = 0
        self.joins = 0
        """Number of requests that have joined it so far."""
        self.tries = 0
        self.handed = False
        """Whether sending its answer has started; whether it arrived may be unknown."""
        self.prompt_tokens = 0
        """Number of ids in its prompt, once that is known."""
        self.stop = ""
        """The stop string that ended its answer, if one did."""
        self.sent = False
        self.task: asyncio.Task[None] | None = None
        self.committing = False
        """Whether the answer is being written to the journal; from then on it is kept."""
        self._events: list[StreamEvent] = []
        self._prompts = 0
        self.record_bytes = 0
        """Approximate upper bound of what its path adds to the session's record, bytes."""
        self.images: Mapping[str, CheckedImage] = {}
        """Images of its request that the session does not have, by hash; until it ends."""
        self._result: Answered | RollmeshError | None = None
        self._changed: asyncio.Event | None = None

    @classmethod
    def of(cls, request: TurnRequest, session_id: str, node_id: int) -> "Turn":
        """Returns the turn that a request begins, with the node id reserved for it."""
        answer_id = answer_id_of(session_id, node_id)
        turn = cls(node_id, answer_id, request.fingerprint, request.idempotency_key)
        turn.stream, turn.finish_on_disconnect = request.stream, request.finish_on_disconnect
        turn.lineage = request.lineage
        return turn

    @classmethod
    def stored(cls, answered: Answered, *, sent: bool) -> "Turn":
        """Returns an answered turn restored from the journal, which has it as sent or not.

        An answer that was requested may have been handed over: whether it arrived is unknown.
        """
        receipt = answered.receipt
        turn = cls(
            answered.node.node_id, receipt.answer_id, receipt.fingerprint, receipt.idempotency_key
        )
        turn.tries = receipt.tries
        turn.sent = sent or bool(answered.node.children)
        replayed = trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in answered.node.reasons
        turn.handed = turn.sent or receipt.awaited or replayed
        turn.end(answered)
        return turn

    @property
    def identity(self) -> str:
        """The key that its retries share with it."""
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
        """Whether part of the answer may have been sent."""
        return self.stream and len(self._events) > self._prompts

    def begin(self, prompt: PromptIds) -> None:
        """Emits the prompt, which is not part of the answer."""
        self._prompts = 1
        self.emit([prompt])

    def emit(self, events: Sequence[StreamEvent]) -> None:
        """Buffers events and wakes their readers."""
        if events:
            self._events += events
            self._wake()

    def begin_again(self) -> None:
        """Drops the events of a lost answer, none of which was sent."""
        del self._events[self._prompts :]

    def end(self, result: Answered | RollmeshError) -> None:
        """Ends the turn; only the first end counts."""
        if self._result is None:
            self._result = result
            self.images = {}
            if isinstance(result, Answered) and result.node.sample is not None:
                self.prompt_tokens = result.node.sample.prompt_tokens
            self._wake()
            self._events = []  # current readers keep a reference to the old list

    def cancel(self, error: RollmeshError) -> None:
        """Ends a turn that is not being committed; requests that wait for it get the error."""
        self.end(error)
        if self.task is not None:
            self.task.cancel()

    def replace(self, answered: Answered) -> None:
        """Replaces the receipt of an answered turn."""
        self._result = answered

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
        """Yields the beginning, the prompt's size, the events, and then the answer.

        Raises:
            RollmeshError: The turn failed.
        """
        yield Begun(self.answer_id)
        events: Sequence[StreamEvent] = self._events
        at, is_read = 0, False
        if self.answered is not None:
            events = _events_of(self.answered.node.messages[0])
            is_read = True
            yield Reading(self.prompt_tokens)
        while True:
            changed = self._changed = self._changed or asyncio.Event()
            if events and not is_read:
                is_read = True
                yield Reading(self.prompt_tokens)
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
    """Returns a complete answer as the events of a stream."""
    events: list[ParserEvent] = [ReasoningEvent(message.reasoning)] if message.reasoning else []
    events += [TextEvent(message.content)] if message.content else []
    events += [
        ToolCallEvent(index, call.id, call.name, call.arguments)
        for index, call in enumerate(message.tool_calls)
    ]
    return events


@dataclass(slots=True)
class Session:
    """One open session."""

    spec: SessionSpec
    tree: Tree
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    """In-flight and answered turns by the identity that retries share, oldest first."""
    in_flight: list[Turn] = field(default_factory=list)
    reader: MessageReader = field(default_factory=MessageReader)
    """Reads the session's requests."""
    images: SessionImages = field(default_factory=SessionImages)
    """The images of its turns."""
    closing: bool = False
    used_ms: int = field(default_factory=clock.monotonic_ms)
    """Time of the last use, on the monotonic clock."""

    def find_turn(self, request: TurnRequest) -> Turn | None:
        """Returns the turn that a request retries; None if it asks for a new sample.

        Raises:
            IdempotencyKeyReusedError: The key belongs to the sample of another request.
        """
        turns = self.turns.get(request.identity, [])
        if not request.idempotency_key:
            return retried(turns, request.retry_count)
        if turns and turns[0].fingerprint != request.fingerprint:
            raise IdempotencyKeyReusedError(
                "idempotency_key", "was given with another request; give each request its own"
            )
        return turns[0] if turns else None

    def find_answer(self, answer_id: str) -> Turn | None:
        """Returns the answered turn with an id; None if there is none or it was withdrawn."""
        for turns in self.turns.values():
            for turn in turns:
                if turn.answer_id == answer_id:
                    answered = turn.answered
                    withdrawn = answered is None or answered.receipt.is_withdrawn
                    return None if withdrawn else turn
        return None

    def begin(self, turn: Turn) -> None:
        """Adds a turn that is in flight."""
        self.in_flight.append(turn)
        self.turns.setdefault(turn.identity, []).append(turn)

    def restore(self, answered: Answered, *, sent: bool) -> None:
        """Adds an answered turn from the journal."""
        turn = Turn.stored(answered, sent=sent)
        self.turns.setdefault(turn.identity, []).append(turn)

    def end(self, turn: Turn, result: Answered | RollmeshError) -> None:
        """Ends a turn unless it has ended; a failed turn is forgotten because it has no sample."""
        if turn in self.in_flight:
            self.in_flight.remove(turn)
            self.used_ms = clock.monotonic_ms()
        turn.end(result)
        if turn.answered is None:
            self.forget(turn)

    def forget(self, turn: Turn) -> None:
        """Removes a turn so that no more requests can join it."""
        turns = self.turns.get(turn.identity, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self.turns.pop(turn.identity, None)

    def mark_orphans(self) -> list[Node]:
        """Marks the answers that never reached the agent and that it did not continue from.

        Returns:
            All nodes whose answers did not reach the agent, marked or not.
        """
        nodes = [
            turn.answered.node
            for turns in self.turns.values()
            for turn in turns
            if turn.answered is not None and not (turn.handed or turn.waiting)
        ]
        for node in nodes:
            # A close that could not be stored may have marked it.
            reasons = node.reasons - {trajectory_pb2.FIDELITY_REASON_ORPHANED}
            node.reasons = (
                reasons if node.children else reasons | {trajectory_pb2.FIDELITY_REASON_ORPHANED}
            )
        return nodes
