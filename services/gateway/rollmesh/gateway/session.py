"""An open session: its tree, and its in-flight and answered turns, indexed for retries.

Decides which sample a request asks for: an existing one if it is a retry, else a new one.

Equal requests are siblings, whether sequential or concurrent: best-of-n agents send such requests.
An idempotency key names one sample, however often it is requested. Without a key, the turns of
equal requests are candidates in this order:

| turn | a request marked as a retry | any other request |
|---|---|---|
| no request waits for it, and its answer was never sent completely | joins newest | joins newest |
| a request waits for it | joins oldest | begins its own turn |
| its answer was sent completely | joins newest | begins its own turn |

So no answer goes to two requests unless one of them is a retry. A sidecar that repeats a call whose
connection broke gives the call's id: it joins the turn that the call had joined, or counts as a
call that never arrived. Within the first row, and within
the other two rows together, a retry joins the turn whose number of tries fits its retry count best.
The order of the table breaks ties. When several siblings time out and all are retried, each retry
gets its own turn, and the same one on each further try.

After a restart no request waits. An answer counts as sent completely if the journal says so or the
agent continued from it. The journal may lack the answers of the last moments before a kill. Equal
requests get these again, as they get answers that were lost with the process.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from google.protobuf import json_format

from rollmesh.chat import RenderContext, Wanted
from rollmesh.gateway.conversation import Conversation, ImageFacts, MessageReader, answer_id_of
from rollmesh.gateway.tree import Lineage, Node, Tree
from rollmesh.mesh import Order
from rollmesh.runtime import clock
from rollmesh.runtime.codec import CheckedImage
from rollmesh.runtime.errors import (
    AnswerUnknownError,
    GenerationAbortedError,
    IdempotencyKeyReusedError,
    RollmeshError,
)
from rollmesh.v1 import gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2

# The settings of a session and the receipts of its answers. The journal stores both.

GroupName: TypeAlias = tuple[str, str]
"""The ids of a run and of a group in it."""


class Budget(NamedTuple):
    """Limits on the use of a session: see `SessionBudget`. 0 means no limit."""

    calls: int = 0
    sampled_tokens: int = 0
    time_ms: int = 0
    refuses: bool = False
    """Whether a request without room fails. Otherwise it gets a final answer."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The settings with which a session was created."""

    session_id: str
    opened_unix_ms: int
    model: str = ""
    """Name of the model that answers."""
    request_id: str = ""
    group_id: str = ""
    sample_index: int = 0
    group_size: int = 1
    sampling: str = "{}"
    """Its sampling parameters: the JSON form of `SamplingParams`."""
    sampling_policy: int = sampling_pb2.SAMPLING_POLICY_AGENT
    """Whether an agent's sampling parameters win over them: a `SamplingPolicy`."""
    metadata: dict[str, str] = field(default_factory=dict)
    finish_on_disconnect: bool = False
    export_mode: int = gateway_pb2.EXPORT_MODE_LEAVES
    """The form in which the tree is exported: an `ExportMode`."""
    purpose: int = session_pb2.SESSION_PURPOSE_TRAIN
    """The use of its tokens: a `SessionPurpose`."""
    run_id: str = ""
    adapters: Sequence[tuple[str, int]] = ()
    """Its policies: name and version of each adapter. An empty name is the base model, and a
    version of 0 the newest revision."""
    columns: Sequence[sampling_pb2.ColumnKind.ValueType] = ()
    budget: Budget = field(default_factory=Budget)
    message_bytes: int = 0
    """Maximum size of the messages in its record, bytes. 0: the record has none."""
    capture: int = session_pb2.CAPTURE_TOKENS
    """The recorded part of its turns: a `Capture`."""
    tokenizer_sha256: str = ""
    """SHA-256 of the tokenizer of its ids, hexadecimal. Empty without ids."""
    template_sha256: str = ""
    """SHA-256 of the chat template, hexadecimal. Empty without ids."""
    origin: str = ""
    """The place that it started from: the JSON form of `SessionOrigin`. Empty if it began empty."""

    @property
    def started_from(self) -> session_pb2.SessionOrigin | None:
        """The place that it started from. None if it began empty."""
        if not self.origin:
            return None
        return json_format.Parse(self.origin, session_pb2.SessionOrigin())

    @property
    def template_unix_ms(self) -> int:
        """The time that the chat template prints."""
        origin = self.started_from
        return (origin.template_unix_ms if origin else 0) or self.opened_unix_ms

    @classmethod
    def from_json(cls, text: str) -> "SessionSpec":
        """Returns the settings that the journal has."""
        found = cls(**json.loads(text))
        return replace(found, budget=Budget(*found.budget))

    @property
    def policies(self) -> list[sampling_pb2.AdapterRef]:
        """Its policies, as messages."""
        return [sampling_pb2.AdapterRef(name=name, version=at) for name, at in self.adapters]

    @property
    def named_adapters(self) -> list[tuple[str, int]]:
        """The adapter revisions that it names."""
        return [(name, version) for name, version in self.adapters if version]

    def policy(self, model: str) -> sampling_pb2.AdapterRef | None:
        """Returns the adapter that samples a turn. None if the base model does.

        Args:
            model: The name that the request gives. The first policy has every unknown name.
        """
        if not self.adapters:
            return None
        policies = self.policies
        wanted = "" if model == self.model else model
        named = [one for one in policies if one.name == wanted] if model else []
        policy = next(iter(named or policies), None)
        return policy if policy is not None and policy.name else None

    @property
    def group(self) -> "GroupName | None":
        """The group that it belongs to, if any."""
        return (self.run_id, self.group_id) if self.group_id else None


@dataclass(slots=True, eq=False)
class AnswerReceipt:
    """The record by which a retry finds an answered turn."""

    answer_id: str
    fingerprint: str
    idempotency_key: str
    created_unix_ms: int
    lineage: Lineage | None = None
    """The lineage that the request gives the turn, or None if it gives none."""
    awaited: bool = True
    """Whether a request waited for the answer when it was committed."""
    tries: int = 0
    """The highest retry count of the requests for it until then."""
    call_ids: list[str] = field(default_factory=list)
    """Ids of the calls that had joined it by then."""
    stop: str = ""
    """The stop string that ended it, or empty if none did."""
    is_withdrawn: bool = False
    """Whether the agent deleted it: it is no longer found by its id."""
    request_ids: list[str] = field(default_factory=list)
    """Ids that the agent gave the requests that had joined it by then."""


_Result = TypeVar("_Result")
_MOST_CUT_SHORT = 65_536
_MOST_REQUEST_IDS = 16  # of one turn
EDGE_BYTES = 512  # of an edge in a record, at most


class Shared(Generic[_Result]):
    """Work that the choices of a request share. The first choice that needs it does it."""

    def __init__(self) -> None:
        self._working = asyncio.Lock()
        self._outcome: tuple[_Result] | RollmeshError | None = None

    async def get(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Returns the result. If the choice that does the work is cancelled, the next one does it.

        Raises:
            RollmeshError: The work failed. Every choice gets the same exception.
        """
        async with self._working:
            if self._outcome is None:
                try:
                    self._outcome = (await work(),)
                except RollmeshError as error:
                    self._outcome = error
        if isinstance(self._outcome, RollmeshError):
            raise self._outcome
        return self._outcome[0]


class TurnSampling(NamedTuple):
    """How the answers to a request are sampled."""

    params: sampling_pb2.SamplingParams
    """The sampling parameters of the first choice, never changed."""
    bad_words: tuple[str, ...] = ()
    is_changed: bool = False
    """Whether the distribution is another one than the session's own."""
    truncates: bool = False
    """Whether tokens that the model may sample are cut off: by top_p, top_k or min_p."""
    ignored: tuple[str, ...] = ()
    """Names of the request's parameters that the session overrides."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """All of a chat request but its messages and its retries. Agents send the same every time."""

    render_context: RenderContext
    callable_context: RenderContext
    """The tools that may be called: printed tools, and tools that the conversation describes."""
    sampling: TurnSampling
    stops: tuple[str, ...]
    wanted: Wanted
    returns: gateway_pb2.ReturnOptions
    """The data that the agent wants in addition to the answer."""
    fingerprint: tuple[Any, ...]
    """What distinguishes a retry from another request, apart from sampling and choice: JSON."""
    keeps_stop: bool = False
    """Whether the stop string, or the text of a stop token, is part of the answer."""
    shows_special: bool = False
    """Whether special tokens are part of the answer's text."""
    lineage: Lineage | None = None
    """The lineage that the request gives, or None if it gives none."""
    max_tokens_must_fit: bool = False
    """Whether to refuse a request whose answer may not fit into the context."""
    returns_tokens: bool = False
    """Whether the agent wants ids or log-probabilities in addition to the answer."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One choice of a validated chat request."""

    conversation: Conversation
    settings: TurnSettings
    sampling: sampling_pb2.SamplingParams
    """The sampling parameters of this choice, never changed."""
    fingerprint: str
    """Digest of everything that determines the answer, which is equal for a retry."""
    idempotency_key: str = ""
    """Key of the sample, including the choice index: each choice is a sample. May be empty."""
    choice: int = 0
    """Index of the choice, from 0."""
    stream: bool = False
    finish_on_disconnect: bool = False
    retry_count: int = 0
    call_id: str = ""
    """Id that the sidecar gives the call and its own repeats of it. May be empty."""
    request_id: str = ""
    """Id that the agent gives the model request. May be empty."""
    adapter: sampling_pb2.AdapterRef | None = None
    """The adapter that samples. None if the base model does. A version of 0 means the newest."""
    shared: Shared[Any] | None = None
    """Work shared by several choices of the request: it is tokenised once."""


@dataclass(slots=True, eq=False)
class Turn(AnswerReceipt):
    """One requested sample and the requests that wait for its answer.

    The responses of its stream are buffered until the turn ends. A retry that joins late gets all
    of them, and a slow reader delays neither the engine nor other readers. The buffer holds no more
    text than the answer. After the end, they are derived from the answer itself.
    """

    node_id: int = 0
    begun_unix_ms: int = 0
    """When its first request came."""
    choice: int = 0
    stream: bool = False
    """Whether its answer is streamed while it is sampled. Otherwise all requests get it whole."""
    finish_on_disconnect: bool = False
    sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    """The sampling parameters that its answer begins with, never changed."""
    readers: set[asyncio.Event] = field(default_factory=set)
    """The requests that wait for it. Each event is set when there is news."""
    joins: int = 0
    """Number of requests that have joined it so far."""
    handed: bool = False
    """Whether sending its answer has started. Whether it arrived may be unknown."""
    sent: bool = False
    """Whether its complete answer was sent to any request."""
    prompt_tokens: int = 0
    """Number of ids in its prompt, once that is known."""
    restarted: bool = False
    """Whether tokens that were sampled for its request were discarded with an earlier turn."""
    sampled: bool = False
    """Whether tokens were sampled for it, also if they were discarded since."""
    task: asyncio.Task[None] | None = None
    committing: bool = False
    """Whether the answer is being written to the journal. From then on it is kept."""
    booked_tokens: int = 0
    """Number of tokens that the budget of its session holds for it."""
    is_limited: bool = False
    """Whether that is less than it may sample otherwise."""
    is_attached: bool = False
    """Whether the tree has its answer, so that the budget counts it there."""
    record_bytes: int = 0
    """Approximate upper bound of its path's share of the session's record, bytes."""
    images: Mapping[str, CheckedImage] = field(default_factory=dict)
    """Images of its request that the session does not have, by hash, until it ends."""
    responses: list[gateway_pb2.StreamChatResponse] = field(default_factory=list)
    """The prompt, if that is wanted, and the deltas of its answer, until it has ended."""
    stored_ids: int = 0
    """Number of its request ids that the journal has."""
    outcome: Node | RollmeshError | None = None
    """The committed answer, or the error with which it failed, or None until then."""
    node: Node | None = None
    """The committed answer, once there is one."""
    running: tuple[Node, Order] | None = None
    """The node that it continues, and its generation, while engines sample it."""
    _prompts: int = 0

    @property
    def has_emitted(self) -> bool:
        """Whether part of the answer may have been sent."""
        return self.stream and len(self.responses) > self._prompts

    def begin(self, prompt: gateway_pb2.StreamChatResponse) -> None:
        """Emits the prompt, which is not part of the answer."""
        self._prompts = 1
        self.responses.append(prompt)
        self._wake()

    def emit(self, deltas: Sequence[gateway_pb2.StreamChatResponse]) -> None:
        """Buffers deltas and wakes their readers. The first one tells the size of the prompt."""
        if deltas and self.stream:
            if len(self.responses) == self._prompts:
                deltas[0].delta.prompt_tokens = self.prompt_tokens
            self.responses += deltas
            self._wake()

    def begin_again(self) -> None:
        """Drops the deltas of a lost answer, none of which was sent."""
        del self.responses[self._prompts :]

    def end(self, outcome: Node | RollmeshError) -> None:
        """Ends the turn. Only the first end counts."""
        if self.outcome is None:
            self.outcome = outcome
            if isinstance(outcome, Node):
                self.node = outcome
            self.images, self.running = {}, None
            self._wake()
            self.responses = []  # current readers keep a reference to the old list

    def _wake(self) -> None:
        for reader in self.readers:
            reader.set()


@dataclass(slots=True)
class EqualTurns:
    """The turns of equal requests, in flight or answered, oldest first.

    A turn whose answer was sent stays sent, so a request that is not a retry looks at the others
    only: a session may have thousands of equal samples.
    """

    turns: dict[Turn, None] = field(default_factory=dict)
    unsent: dict[Turn, None] = field(default_factory=dict)
    """Turns whose answers were not sent when they were last looked at."""
    calls: dict[str, Turn] = field(default_factory=dict)
    """Turns by the ids of the calls that joined them."""

    def add(self, turn: Turn) -> None:
        """Adds the newest turn, with the calls that joined it before a restart."""
        self.turns[turn] = self.unsent[turn] = None
        self.calls |= dict.fromkeys(turn.call_ids, turn)

    def remove(self, turn: Turn) -> None:
        """Removes a turn, if it is one of them."""
        self.turns.pop(turn, None)
        self.unsent.pop(turn, None)
        for call_id in turn.call_ids:
            self.calls.pop(call_id, None)

    def retried(self, retry_count: int, call_id: str = "") -> Turn | None:
        """Returns the turn that a request without a key joins, or None if it begins a new one."""
        if call_id in self.calls:
            return self.calls[call_id]
        for turn in [turn for turn in self.unsent if turn.sent]:
            del self.unsent[turn]
        lost = [turn for turn in self.unsent if not turn.readers]
        candidates = lost[::-1]
        if retry_count and not lost:
            gone = [turn for turn in self.turns if not turn.readers]
            candidates = [turn for turn in self.turns if turn.readers] + gone[::-1]
        # The first turn whose number of tries is closest to the request's.
        return min(candidates, key=lambda turn: abs(turn.tries + 1 - retry_count), default=None)


def cancelled() -> GenerationAbortedError:
    """Returns the error of a turn that no request waits for."""
    return GenerationAbortedError("the turn was cancelled; nothing was committed")


@dataclass(slots=True)
class Session:
    """One open session."""

    spec: SessionSpec
    tree: Tree
    turns: dict[str, EqualTurns] = field(default_factory=partial(defaultdict, EqualTurns))
    """In-flight and answered turns by the identity that retries share."""
    in_flight: dict[Turn, None] = field(default_factory=dict)
    """Turns that have not ended, oldest first."""
    answers: dict[str, Turn] = field(default_factory=dict)
    """In-flight and answered turns by the id of their answer."""
    reader: MessageReader = field(default_factory=MessageReader)
    """Reads the session's requests."""
    images: dict[str, ImageFacts] = field(default_factory=dict)
    """The images that it has, by hash: each was in a turn that is in the journal."""
    cut_short: Counter[str] = field(default_factory=Counter)
    """Number of turns that failed after tokens were sampled, by the fingerprint of the request.
    Each marks the next equal turn that begins, which is sampled in its place."""
    declaring: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while edges are written to the journal."""
    closing: bool = False
    used_ms: int = field(default_factory=clock.monotonic_ms)
    """Time of the last use, on the monotonic clock."""
    now_s: int = field(init=False)
    """The time that the chat template prints, unix seconds."""

    def __post_init__(self) -> None:
        """Reads the time from the settings, once for all turns."""
        self.now_s = self.spec.template_unix_ms // 1000

    @property
    def image_bytes(self) -> int:
        """Number of bytes of all its images."""
        return sum(one.size for one in self.images.values())

    @property
    def record_bytes(self) -> int:
        """Approximate upper bound of the size of its record, bytes."""
        size = EDGE_BYTES * len(self.tree.edges) + (self.image_bytes if self.images else 0)
        match self.spec.export_mode:
            case gateway_pb2.EXPORT_MODE_TREE:
                return size + self.tree.tree_bytes
            case gateway_pb2.EXPORT_MODE_TURNS:
                return size + self.tree.turn_bytes
            case _:
                return size + self.tree.leaf_bytes

    def find_turn(self, request: TurnRequest) -> Turn | None:
        """Returns the turn that a request retries, or None if it asks for a new sample.

        Raises:
            IdempotencyKeyReusedError: The key belongs to the sample of another request.
        """
        turns = self.turns.get(request.idempotency_key or request.fingerprint)
        if turns is None:
            return None
        if not request.idempotency_key:
            return turns.retried(request.retry_count, request.call_id)
        first = next(iter(turns.turns))
        if first.fingerprint != request.fingerprint:
            raise IdempotencyKeyReusedError(
                "idempotency_key", "was given with another request; give each request its own"
            )
        return first

    def find_answer(self, answer_id: str) -> Turn:
        """Returns an answered turn by the id of its answer.

        Raises:
            AnswerUnknownError: The session does not have it, or it was withdrawn.
        """
        turn = self.answers.get(answer_id)
        if turn is None or turn.node is None or turn.is_withdrawn:
            raise AnswerUnknownError(
                f"answer_id: this session has no answer {answer_id!r:.200}; give the id of one "
                "that it sampled"
            )
        return turn

    def new_answer_id(self) -> str:
        """Returns an id that no answer has."""
        return answer_id_of(self.spec.session_id, self.tree.reserve_id())

    def begin(self, request: TurnRequest) -> Turn:
        """Begins a turn for a request. It replaces an equal turn that was cut short."""
        node_id = self.tree.reserve_id()
        turn = Turn(
            answer_id_of(self.spec.session_id, node_id),
            request.fingerprint,
            request.idempotency_key,
            0,
            request.settings.lineage,
            node_id=node_id,
            begun_unix_ms=clock.unix_ms(),
            choice=request.choice,
            stream=request.stream,
            finish_on_disconnect=request.finish_on_disconnect,
            sampling=request.sampling,
        )
        if failed := self.cut_short.pop(turn.fingerprint, 0):
            turn.restarted = True
            if failed > 1:
                self.cut_short[turn.fingerprint] = failed - 1
        self.in_flight[turn] = None
        self.answers[turn.answer_id] = turn
        self.turns[turn.idempotency_key or turn.fingerprint].add(turn)
        return turn

    def restore(self, node: Node, receipt: AnswerReceipt, *, sent: bool) -> None:
        """Adds an answered turn from the journal, which has it as sent or not.

        An answer that was requested may have been handed over: whether it arrived is unknown.
        """
        turn = Turn(**asdict(receipt), node_id=node.node_id, sent=sent or bool(node.children))
        if node.sample is not None:
            turn.sampling = node.sample.sampling
            turn.request_ids = node.sample.request_ids
        replayed = trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in node.reasons
        turn.handed = turn.sent or turn.awaited or replayed
        turn.end(node)
        self.answers[turn.answer_id] = turn
        self.turns[turn.idempotency_key or turn.fingerprint].add(turn)

    def join(self, turn: Turn, request: TurnRequest, reader: asyncio.Event) -> None:
        """Lets a request wait for a turn. Its repeats then find the same turn."""
        turn.readers.add(reader)
        turn.joins += 1
        turn.tries = max(turn.tries, request.retry_count)
        if request.request_id not in {"", *turn.request_ids[:_MOST_REQUEST_IDS]} and (
            len(turn.request_ids) < _MOST_REQUEST_IDS
        ):
            turn.request_ids.append(request.request_id)
        equal = self.turns.get(turn.idempotency_key or turn.fingerprint)
        if equal is not None and request.call_id and request.call_id not in equal.calls:
            turn.call_ids.append(request.call_id)
            equal.calls[request.call_id] = turn

    def leave(self, turn: Turn, reader: asyncio.Event) -> None:
        """Ends the wait of a request. The last one cancels a turn that need not finish."""
        turn.readers.discard(reader)
        if turn.readers or turn.outcome is not None or turn.committing:
            return
        if not turn.finish_on_disconnect:
            self.forget(turn)
            self.cancel(turn, cancelled())

    def end(self, turn: Turn, outcome: Node | RollmeshError) -> None:
        """Ends a turn unless it has ended. A failed turn is forgotten because it has no sample."""
        if turn in self.in_flight:
            del self.in_flight[turn]
            self.used_ms = clock.monotonic_ms()
            if isinstance(outcome, RollmeshError):
                self._note_cut_short(turn)
        turn.end(outcome)
        if turn.node is None:
            self.forget(turn)

    def end_cancelled(self, turn: Turn, _: object = None) -> None:
        """Ends a turn whose task is over, unless it has ended."""
        if turn in self.in_flight:
            self.end(turn, cancelled())

    def cancel(self, turn: Turn, error: RollmeshError) -> None:
        """Cancels a turn that is not being committed. Its requests may be repeated at once."""
        self._note_cut_short(turn)
        turn.end(error)
        if turn.task is not None:
            turn.task.cancel()

    def cancel_all(self, error: RollmeshError) -> None:
        """Cancels the turns that are not being committed."""
        for turn in [*self.in_flight]:
            if not turn.committing:
                self.cancel(turn, error)

    def _note_cut_short(self, turn: Turn) -> None:
        """Counts a turn that is about to fail, once, if tokens were sampled for its request."""
        if turn.outcome is None and (turn.restarted or turn.sampled):
            self.cut_short[turn.fingerprint] += 1
            if len(self.cut_short) > _MOST_CUT_SHORT:
                del self.cut_short[next(iter(self.cut_short))]

    def forget(self, turn: Turn) -> None:
        """Removes a turn so that no more requests can join it."""
        identity = turn.idempotency_key or turn.fingerprint
        turns = self.turns.get(identity)
        if turns is not None:
            turns.remove(turn)
            if not turns.turns:
                del self.turns[identity]
        if self.answers.get(turn.answer_id) is turn:
            del self.answers[turn.answer_id]

    def mark_orphans(self) -> list[Node]:
        """Marks the answers that never reached the agent and that it did not continue from.

        Returns:
            All nodes whose answers did not reach the agent, marked or not.
        """
        nodes = [
            turn.node
            for equal in self.turns.values()
            for turn in equal.turns
            if turn.node is not None and not (turn.handed or turn.readers)
        ]
        orphaned = {trajectory_pb2.FIDELITY_REASON_ORPHANED}
        for node in nodes:
            # A close that could not be stored may have marked it.
            node.reasons = node.reasons - orphaned if node.children else node.reasons | orphaned
        return nodes
