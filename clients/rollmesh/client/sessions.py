"""An open session."""

import math
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.client.arguments import (
    EXPORT_FORMS,
    OUTCOMES,
    POLICIES,
    PURPOSES,
    Budget,
    Column,
    ExportForm,
    Purpose,
    SamplingPolicy,
    budget_of,
    choices_of,
    chosen,
    filled,
    read_sampling,
)
from rollmesh.client.conversations import Start
from rollmesh.client.failures import is_infrastructure, shielded
from rollmesh.client.runs import RunCalls, of_spans
from rollmesh.client.scores import Scores, read_scores
from rollmesh.mesh import retried
from rollmesh.runtime import run_of, version_of
from rollmesh.runtime.codec import (
    KINDS,
    Columns,
    Conversation,
    Logprobs,
    Mask,
    TokenIds,
    conversation_of,
    name_of,
    unpack_tokens,
)
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    SessionClosedError,
    SessionKeyWrongError,
)
from rollmesh.v1 import (
    collector_pb2,
    engine_pb2,
    gateway_pb2,
    sampling_pb2,
    session_pb2,
    trajectory_pb2,
)
from rollmesh.v1.sampling_pb2 import AdapterChoice

# Rewards of a session, of its trajectories and of its turns.

_RULE = trajectory_pb2.LineageRule.DESCRIPTOR
REWARD_NAMES = frozenset({"reward", "trajectory_rewards", "turn_rewards"})
"""What `read_rewards` reads from a mapping."""
_ANSWER = "chatcmpl-"


@dataclass(slots=True)
class Rewards:
    """The rewards of one session. Omitted ones are not set.

    The session's reward applies to all its trajectories without one of their own.
    """

    session: float | None = None
    """Reward of the whole session."""
    trajectories: dict[str, float] = field(default_factory=dict)
    """By trajectory id, or by the id of the last answer of the trajectory."""
    turns: dict[str | int, float] = field(default_factory=dict)
    """By the id of the answer (`chatcmpl-...`), or by node id."""

    def to_proto(self, session_id: str) -> session_pb2.SessionRewards:
        """Returns the rewards as a message.

        Raises:
            InvalidFieldError: A reward is not a finite number, or an id belongs to another session.
        """
        own = [] if self.session is None else [self.session]
        for reward in (*own, *self.trajectories.values(), *self.turns.values()):
            with suppress(TypeError):  # no number at all
                if math.isfinite(reward):
                    continue
            raise InvalidFieldError("rewards", f"{reward!r} is not a finite number")
        return session_pb2.SessionRewards(
            reward=self.session,
            trajectory_rewards={
                trajectory_id.removeprefix(_ANSWER): reward
                for trajectory_id, reward in self.trajectories.items()
            },
            turn_rewards={
                _node_id(turn, session_id): reward for turn, reward in self.turns.items()
            },
        )


def read_rewards(value: object) -> Rewards:
    """Reads the result of a runner or a reward function.

    Args:
        value: A number, `Rewards`, None, or (the JSON result of a command) a mapping with
            `reward`, `trajectory_rewards` and `turn_rewards`, all optional.

    Raises:
        InvalidFieldError: It is none of these.
    """
    if value is None:
        return Rewards()
    if isinstance(value, Rewards):
        return value
    if isinstance(value, Mapping):
        reward = value.get("reward")
        parts = [value.get(name) or {} for name in ("trajectory_rewards", "turn_rewards")]
        try:
            trajectories, turns = ({key: float(part[key]) for key in part} for part in parts)
            return Rewards(None if reward is None else float(reward), trajectories, turns)
        except (TypeError, ValueError) as error:
            raise InvalidFieldError(
                "reward", f"{value!r:.200} has a value that is not a number"
            ) from error
    try:
        return Rewards(session=float(value))  # type: ignore[arg-type]  # NumPy's and torch's too
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(
            "reward",
            f"is a {type(value).__name__}; return a number, Rewards or None, "
            "or give the rollout a reward function that reads it",
        ) from error


def _node_id(turn: str | int, session_id: str) -> int:
    if isinstance(turn, int) or turn.isdecimal():  # a JSON object's keys are text
        return int(turn)
    of, _, node_id = turn.removeprefix(_ANSWER).rpartition("-")
    if of != session_id or not node_id.isdecimal():
        raise InvalidFieldError(
            "rewards.turns",
            f"{turn!r} is not an answer of session {session_id}; give the id of one",
            turn=turn,
        )
    return int(node_id)


Outcome: TypeAlias = Literal["COMPLETED", "FAILED", "ABORTED", "LOST"]
"""How a session ended. LOST: by its infrastructure, which says nothing about the policy."""


@dataclass(slots=True)
class Session:
    """An open session: one attempt of an agent at one task."""

    session_id: str
    """Grants no access, so it may be logged and shown."""
    api_key: str = field(repr=False)
    """Bearer token of this session only."""
    base_url: str = field(repr=False)
    """The agent's base URL. It contains the key, so it works with any API key or none. Keep it as
    secret as the key."""
    model: str = ""
    """Name of the model that answers, which agents send in their requests."""
    adapters: tuple[sampling_pb2.AdapterRef, ...] = ()
    """Its policies. A version of 0 is the newest revision at each turn. None: the base model."""
    rewards: Rewards = field(default_factory=Rewards)
    """Set before the session is closed."""
    metadata: dict[str, str] = field(default_factory=dict, repr=False)
    """Added to the session's metadata when it is closed."""
    closed: bool = False
    request_id: str = field(default="", repr=False)
    """Request id under which it was opened. A trainer's token and this return its key."""
    start: Start | None = field(default=None, repr=False)
    """The context that it started with. The agent goes on from `start.messages`."""

    @property
    def keyless_url(self) -> str:
        """The base URL with the id instead of the key. The agent must send `api_key`."""
        return self.base_url.replace(self.api_key, self.session_id)

    @property
    def reward(self) -> float | None:
        """Reward of the whole session."""
        return self.rewards.session

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self.rewards.session = reward


# The client's calls about open sessions.

_LEAVE_S = _SIDECAR_S = 10.0


class SessionCalls(RunCalls):
    """Opens, reads and closes sessions at the gateway."""

    @asynccontextmanager
    async def session(  # noqa: PLR0913 - keywords, each with a default
        self,
        *,
        model: str = "",
        adapters: Sequence[AdapterChoice | str] = (),
        columns: Sequence[Column] = (),
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        sampling_policy: SamplingPolicy | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        purpose: Purpose = "train",
        request_id: str = "",
        reward_timeout_ms: int | None = None,
        run_id: str = "",
        budget: Budget | None = None,
        record_messages: bool | None = None,
        start: Start | None = None,
    ) -> AsyncIterator[Session]:
        """Holds a session open. Leaving closes it with `session.rewards`.

        After an exception it is closed as FAILED, or LOST if the infrastructure failed
        (`is_infrastructure`), and after a cancellation as ABORTED. A LOST one keeps no rewards.

        Args:
            model: Name of the model that answers. May be empty if the mesh has only one.
            adapters: Its policies: adapters of the model, by name for the newest revision at each
                turn, or as `AdapterChoice`. An empty name is the base model. An agent chooses one
                by the `model` of a request, and the first one answers every other name.
            columns: Further values of each token to record: "sampling_support", "routed_experts".
                Turns fail on engines that do not return them.
            group_id: Shared by the sessions of one prompt. Empty: a group of one.
            sample_index: Index in the group.
            group_size: Number of sessions in the group.
            sampling: Sampling parameters of all turns, by the names of `SamplingParams`.
            sampling_policy: Whether an agent may sample otherwise: a `SamplingPolicy`. None: the
                gateway's setting.
            metadata: Delivered to the trainer with the session.
            export: One trajectory per leaf of the conversation tree, one per turn, or the tree
                itself, each token once, as `SessionResult.tree`.
            purpose: The use of its tokens: "train", "eval" or "other". Consumers get sessions to
                train on, unless their filter says more.
            request_id: Makes the call repeatable, by a trainer that was restarted too: while the
                session is open, it is returned. Once it is closed, `SessionClosedError` is raised
                as long as its gateway remembers that.
            reward_timeout_ms: As of `close_session`, if the block ends without an error.
            run_id: The run of the group: with another one, the `group_id` names another group.
            budget: The calls, sampled tokens and seconds that the agent may use.
            record_messages: Whether the record has messages, too. None: the gateway's setting.
            start: The context that the session starts with. See `start_at`.

        Raises:
            RollmeshError: The gateway refuses.
        """
        request = self.session_request(
            model=model,
            adapters=adapters,
            columns=columns,
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=sampling,
            sampling_policy=sampling_policy,
            metadata=metadata,
            export=export,
            purpose=purpose,
            request_id=request_id,
            run_id=run_id,
            budget=budget,
            record_messages=record_messages,
            start=start,
        )
        session = await self.open_session(request)
        session.start = start
        try:
            yield session
        except BaseException as error:
            if not session.closed:
                outcome: Outcome = "FAILED" if isinstance(error, Exception) else "ABORTED"
                if outcome == "FAILED" and is_infrastructure(error):
                    outcome, session.rewards = "LOST", Rewards()
                with suppress(RepeatConflictError):  # an earlier close, which was kept
                    await shielded(self.close_session(session, outcome=outcome), _LEAVE_S)
            raise
        if not session.closed:
            await self.close_session(session, reward_timeout_ms=reward_timeout_ms)

    @staticmethod
    def session_request(  # noqa: PLR0913 - keywords, each with a default
        *,
        model: str = "",
        adapters: Sequence[AdapterChoice | str] = (),
        columns: Sequence[Column] = (),
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        sampling_policy: SamplingPolicy | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        purpose: Purpose = "train",
        request_id: str = "",
        run_id: str = "",
        budget: Budget | None = None,
        record_messages: bool | None = None,
        start: Start | None = None,
    ) -> gateway_pb2.CreateSessionRequest:
        """Returns the request for a session. The arguments are those of `session`.

        Raises:
            InvalidFieldError: An argument is invalid.
        """
        return filled(
            gateway_pb2.CreateSessionRequest,
            model=model or (start.model if start else ""),
            adapters=choices_of(adapters),
            columns=[chosen(f"columns[{at}]", one, KINDS) for at, one in enumerate(columns)],
            request_id=request_id,
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=read_sampling(sampling),
            sampling_policy=None
            if sampling_policy is None
            else chosen("sampling_policy", sampling_policy, POLICIES),
            metadata=dict(metadata or {}),
            export_mode=chosen("export", export, EXPORT_FORMS),
            purpose=chosen("purpose", purpose, PURPOSES),
            run_id=run_id,
            budget=budget_of(budget),
            record_messages=record_messages,
            start=start.request if start else None,
        )

    async def open_session(
        self, request: gateway_pb2.CreateSessionRequest, *, is_new: bool = False
    ) -> Session:
        """Opens a session, retrying while the gateway is full. The caller closes it.

        A request id that an earlier process gave returns the session that it opened, at whichever
        gateway that is. See `session`.

        Args:
            request: As of `session_request`.
            is_new: Whether no earlier call can have given the request id. Gateways are not asked.
        """
        is_repeat = bool(request.request_id) and not is_new
        if not request.request_id:  # retries must not open another session
            request.request_id = uuid.uuid4().hex
        for one in request.adapters:
            if one.version:
                one.version = self._number(one.version, request.model, one.name)
        sidecar = await retried(lambda _: self._sidecars.any(), _SIDECAR_S)
        opened = await self._opened(request, is_repeat=is_repeat)
        base_url = f"{sidecar}/sessions/{opened.session_key}/v1"
        return Session(
            opened.session_id,
            opened.session_key,
            base_url,
            opened.model,
            tuple(opened.adapters),
            request_id=request.request_id,
        )

    async def find_session(self, request_id: str) -> gateway_pb2.FindSessionResponse | None:
        """Returns the id and the state of the session that a request id opened.

        None if it opened none, or the gateways no longer remember its close.

        Raises:
            RollmeshError: The router or a gateway did not answer for too long.
        """
        return await self._find(request_id)

    async def close_session(
        self,
        session: Session,
        *,
        outcome: Outcome = "COMPLETED",
        metadata: Mapping[str, str] | None = None,
        superseded: bool = False,
        reward_timeout_ms: int | None = None,
    ) -> list[str]:
        """Closes a session with its rewards. Returns the ids of its trajectories.

        If an operator ended the session's key, the session gets its next one first.

        Args:
            session: The session.
            outcome: How it ended.
            metadata: Added to the session's metadata, after `session.metadata`.
            superseded: Whether another session takes its `sample_index`.
            reward_timeout_ms: Time that the collector holds the session back for `set_rewards`,
                milliseconds. None: it is delivered at once.

        Raises:
            InvalidFieldError: A reward names an unknown turn or trajectory, a LOST session has
                rewards, or another argument is invalid. The session stays open.
            RollmeshError: The gateway refuses, or is unavailable for too long.
        """
        request = filled(
            gateway_pb2.CloseSessionRequest,
            session_id=session.session_id,
            session_key=session.api_key,
            outcome=chosen("outcome", outcome, OUTCOMES),
            metadata={**session.metadata, **(metadata or {})},
            rewards=session.rewards.to_proto(session.session_id),
            superseded=superseded,
            reward_timeout_ms=reward_timeout_ms,
        )
        close = partial(self._at_gateway, session.session_id, lambda stub: stub.CloseSession)
        try:
            response = await close(request)
        except SessionKeyWrongError:
            if not session.request_id:
                raise
            await self.renew_key(session)
            request.session_key = session.api_key
            response = await close(request)
        session.closed = True
        return list(response.trajectory_ids)

    async def declare_lineage(self, session: Session, edges: Iterable[tuple[str, str, str]]) -> int:
        """Declares how model requests of a session belong together, before or after their turns.

        Args:
            session: An open session.
            edges: The source and the target of each edge, as the agent named the requests in
                `X-ACP-Model-Request-ID`, and its type, such as "subagent_call".

        Returns:
            Number of edges that the session has now.

        Raises:
            SessionClosedError: The session is closed.
            InvalidFieldError: An edge is invalid.
            RollmeshError: The gateway refuses, or is unavailable for too long.
        """
        request = gateway_pb2.DeclareLineageRequest(
            session_id=session.session_id,
            session_key=session.api_key,
            edges=[
                trajectory_pb2.LineageEdge(source_request_id=one, target_request_id=other, type=how)
                for one, other, how in edges
            ],
        )
        declared = await self._at_gateway(
            session.session_id, lambda stub: stub.DeclareLineage, request
        )
        return int(declared.edges)

    async def revoke_key(self, session: Session) -> None:
        """Ends the key of an open session. The session gets the next key and another base URL.

        An agent that has only the old ones gets 401 from now on. Its running turns are not ended.

        Raises:
            SessionKeyWrongError: The session's key was ended by somebody else.
            RollmeshError: The gateway refuses, or is unavailable for too long.
        """
        id_, key, repeat = session.session_id, session.api_key, uuid.uuid4().hex
        request = gateway_pb2.RevokeSessionKeyRequest(
            session_id=id_, session_key=key, request_id=repeat
        )
        response = await self._at_gateway(id_, lambda stub: stub.RevokeSessionKey, request)
        _rekey(session, response.session_key)

    async def renew_key(self, session: Session) -> None:
        """Gives an open session its current key and base URL, after somebody ended the old ones.

        Raises:
            InvalidFieldError: The session has no request id. It was not opened by a client.
            SessionClosedError: The session is closed.
            RollmeshError: The gateway refuses, or is unavailable for too long.
        """
        if not session.request_id:
            raise InvalidFieldError(
                "request_id", "is empty; give the one under which the session was opened"
            )
        find = gateway_pb2.FindSessionRequest(request_id=session.request_id)
        found = await self._at_gateway(session.session_id, lambda stub: stub.FindSession, find)
        if found.closed or found.session_id != session.session_id:  # another must not be opened
            closed = f"session {session.session_id} is closed"
            raise SessionClosedError(closed, session_id=session.session_id)
        same = gateway_pb2.CreateSessionRequest(request_id=session.request_id, model=session.model)
        opened = await self._at_gateway(session.session_id, lambda stub: stub.CreateSession, same)
        _rekey(session, opened.session_key)


def _rekey(session: Session, key: str) -> None:
    session.base_url = session.base_url.replace(session.api_key, key)
    session.api_key = key


def reason_names(reasons: Iterable[trajectory_pb2.FidelityReason.ValueType]) -> tuple[str, ...]:
    """Returns the names of reasons. `UNKNOWN_99` for a value that only a newer mesh knows."""
    return tuple(name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, reason) for reason in reasons)


def read_images(
    proto: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree,
) -> tuple[trajectory_pb2.TrajectoryImage, ...]:
    """Returns the images of a trajectory or a tree, and the tokens that stand for them.

    Raises:
        InvalidFieldError: They overlap, or are not within the tokens.
    """
    end = 0
    for image in proto.images:
        if image.start < end or not image.tokens:
            raise InvalidFieldError("images", "overlap; the collector's answer is damaged")
        end = image.start + image.tokens
    if end > len(proto.tokens.loss_mask_u8):
        raise InvalidFieldError("images", "are not within the tokens; the answer is damaged")
    return tuple(proto.images)


# A session's conversation tree for tree training: each token once, packed.


@dataclass(frozen=True, slots=True)
class TrajectoryTree:
    """A conversation tree of M nodes and N tokens. A forest if the tools changed.

    The tokens of a node are contiguous and follow those of its parent. A token attends only to its
    own path: `position_ids` count along it, and `attention_mask` hides everything else.
    """

    token_ids: TokenIds
    """uint32 [N]: prompt and sampled ids, exactly as the engine had them."""
    logprobs: Logprobs
    """float32 [N]: under the sampling policy. 0.0 for tokens that were not sampled."""
    loss_mask: Mask
    """bool [N]: true if the token is trained."""
    policy_versions: NDArray[np.int64]
    """int64 [N]: version of the run that sampled the token. -1 for tokens not sampled."""
    policy_runs: NDArray[np.int64]
    """int64 [N]: the trainer's run that sampled the token. -1 for tokens not sampled."""
    position_ids: NDArray[np.int64]
    """int64 [N]: number of tokens before it on its path."""
    node_index: NDArray[np.int64]
    """int64 [N]: node of the token, 0 to M - 1."""
    parents: NDArray[np.int64]
    """int64 [M]: index of each node's parent, below its own. -1 for a root."""
    turn_rewards: NDArray[np.float64]
    """float64 [M]: reward of each node's turn. NaN if it has none."""
    nodes: tuple[trajectory_pb2.TrajectoryNode, ...]
    """Message, lineage, reasons, engine and prompt CRC of each of the M nodes."""
    reasons: tuple[str, ...]
    """Fidelity reasons of the tree. ("EXACT",) if there are none."""
    images: tuple[trajectory_pb2.TrajectoryImage, ...] = ()
    """Its images by ascending start, and the tokens that stand for each. The files are in the
    session's `images`."""
    columns: Columns = field(default=Columns(), repr=False)
    """The columns that the session asked for: sampling support, routed experts."""

    @classmethod
    def from_proto(cls, proto: trajectory_pb2.TrajectoryTree) -> "TrajectoryTree":
        """Reads a tree.

        Raises:
            InvalidFieldError: Arrays differ in length, nodes do not cover them, or a child
                precedes its parent.
        """
        token_ids, logprobs, loss_mask = unpack_tokens(proto.tokens, "tokens")
        parents = np.array(
            [node.parent_index if node.HasField("parent_index") else -1 for node in proto.nodes],
            np.int64,
        )
        bounds = np.array([0, *(node.end for node in proto.nodes)], np.int64)
        sizes = np.diff(bounds)
        if bounds[-1] != len(token_ids) or (sizes < 0).any():
            raise InvalidFieldError("tree.nodes", "do not cover all tokens; the answer is damaged")
        if (parents >= np.arange(len(parents))).any():
            problem = "lists a child before its parent; the answer is damaged"
            raise InvalidFieldError("tree.nodes", problem)
        ends = np.zeros(len(parents) + 1, np.int64)  # of the paths. The last is that of no parent
        for at, parent in enumerate(parents):
            ends[at] = ends[parent] + sizes[at]
        offsets = ends[:-1] - bounds[1:]
        return cls(
            token_ids,
            logprobs,
            loss_mask,
            policy_versions=of_spans(proto, len(token_ids), version_of),
            policy_runs=of_spans(proto, len(token_ids), run_of),
            position_ids=np.arange(bounds[-1]) + np.repeat(offsets, sizes),
            node_index=np.repeat(np.arange(len(parents)), sizes),
            parents=parents,
            turn_rewards=np.array(
                [node.reward if node.HasField("reward") else np.nan for node in proto.nodes],
                np.float64,
            ),
            nodes=tuple(proto.nodes),
            reasons=reason_names(proto.reasons),
            images=read_images(proto),
            columns=Columns.read(proto),
        )

    def leaves(self) -> NDArray[np.int64]:
        """Returns the nodes without children, int64 [L], oldest first."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    def path(self, node: int) -> NDArray[np.int64]:
        """Returns the tokens from the root to the end of a node.

        Returns:
            Indices into the token arrays, int64 [P], ascending: `token_ids[path]` is the sequence
            that the engine had, and `position_ids[path]` is 0 to P - 1.
        """
        runs: list[NDArray[np.int64]] = []
        while node >= 0:
            runs.append(np.arange(self.nodes[node].start, self.nodes[node].end))
            node = int(self.parents[node])
        return np.concatenate([np.empty(0, np.int64), *runs[::-1]])

    def paths(self) -> list[NDArray[np.int64]]:
        """Returns `path` of every leaf with a turn: the trajectories of `export="leaves"`."""
        paths = [self.path(int(leaf)) for leaf in self.leaves()]
        return [one for one in paths if (self.policy_versions[one] >= 0).any()]

    def attention_mask(self) -> NDArray[np.bool_]:
        """Returns which tokens each token attends to: itself and those before it on its path.

        Returns:
            bool [N, N], row: the attending token, column: the visible ones. Dense, N * N bytes.
            Kernels with block masks need only `node_index` and `parents`.
        """
        count = len(self.parents)
        above = np.zeros((count, count), np.bool_)  # [M, M]: row, its ancestors and itself
        for at, parent in enumerate(self.parents):
            if parent >= 0:
                above[at] = above[parent]
            above[at, at] = True
        seen = above[self.node_index[:, None], self.node_index[None, :]]
        return np.tril(seen)  # parents precede their children, so this hides only later tokens


# Closed sessions and their trajectories, as NumPy arrays and plain fields.

_TRAIN = session_pb2.SESSION_PURPOSE_TRAIN


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One root-to-leaf token sequence. All arrays have length N."""

    trajectory_id: str
    token_ids: TokenIds
    """uint32 [N]: prompt and sampled ids, exactly as the engine had them."""
    logprobs: Logprobs
    """float32 [N]: under the sampling policy. 0.0 for tokens that were not sampled."""
    loss_mask: Mask
    """bool [N]: true if the token is trained in this trajectory."""
    policy_versions: NDArray[np.int64]
    """int64 [N]: version of the run that sampled the token. -1 for tokens not sampled."""
    prompt_tokens: int
    """Number of ids before the first sampled one."""
    turns: int
    """Number of sampled turns along the path."""
    lineage: str
    """Origin of the branch: MAIN, SIBLING, BRANCH, ROOT, ..."""
    reasons: tuple[str, ...]
    """Fidelity reasons. ("EXACT",) if there are none."""
    path: trajectory_pb2.Trajectory = field(repr=False)
    """A message that holds only the leaf, the segments and the version spans. A tuple of messages
    would be hundreds of objects per trajectory for the garbage collector to traverse."""
    reward: float | None
    """The trajectory's own reward. None: the session's applies."""
    images: tuple[trajectory_pb2.TrajectoryImage, ...] = ()
    """Its images by ascending start, and the tokens that stand for each. The files are in the
    session's `images`."""
    teacher: Scores | None = None
    """The scores of the consumer's teacher, from `prompt_tokens` on. None without a teacher."""
    columns: Columns = field(default=Columns(), repr=False)
    """The columns that the session asked for: sampling support, routed experts."""
    lineage_source: str = "RULE"
    """Who labelled the branch: DECLARED by the agent's edges, HEADER of a request, RULE."""
    lineage_rule: str = ""
    """The rule that did, such as OTHER_SYSTEM. Empty if none did, or one of an earlier release."""

    @property
    def segments(self) -> tuple[trajectory_pb2.TrajectorySegment, ...]:
        """The nodes along the path."""
        return tuple(self.path.segments)

    @property
    def version_spans(self) -> tuple[sampling_pb2.VersionSpan, ...]:
        """Which engine sampled which tokens, with which policy version and numerics."""
        return tuple(self.path.version_spans)

    @property
    def policy_runs(self) -> NDArray[np.int64]:
        """int64 [N]: the trainer's run that sampled the token. -1 for tokens not sampled."""
        return of_spans(self.path, len(self.token_ids), run_of)

    @classmethod
    def from_proto(cls, proto: trajectory_pb2.Trajectory) -> "Trajectory":
        """Reads a trajectory.

        Raises:
            InvalidFieldError: The arrays differ in length.
        """
        token_ids, logprobs, loss_mask = unpack_tokens(proto.tokens, "tokens")
        teacher = None
        if proto.HasField("teacher"):
            request = engine_pb2.ScoreTokensRequest(
                token_ids_u32le=proto.tokens.token_ids_u32le, start=proto.teacher.start
            )
            teacher = read_scores(request, proto.teacher)
        path = trajectory_pb2.Trajectory(leaf_node_id=proto.leaf_node_id)
        path.segments.MergeFrom(proto.segments)
        path.version_spans.MergeFrom(proto.version_spans)
        return cls(
            proto.trajectory_id,
            token_ids,
            logprobs,
            loss_mask,
            of_spans(proto, len(token_ids), version_of),
            proto.prompt_tokens,
            proto.turns,
            name_of(trajectory_pb2.Lineage.DESCRIPTOR, proto.lineage),
            reason_names(proto.reasons),
            path,
            proto.reward if proto.HasField("reward") else None,
            read_images(proto),
            teacher,
            Columns.read(proto),
            name_of(
                trajectory_pb2.LineageSource.DESCRIPTOR,
                proto.lineage_source or trajectory_pb2.LINEAGE_SOURCE_RULE,
            ),
            name_of(_RULE, proto.lineage_rule) if proto.lineage_rule else "",
        )


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A closed session."""

    session_id: str
    group_id: str
    sample_index: int
    outcome: str
    """COMPLETED, FAILED, ABORTED or LOST. Values that only a newer mesh knows, also of lineages and
    reasons, become `UNKNOWN_99`."""
    reward: float | None
    turns: int
    metadata: dict[str, str]
    trajectories: tuple[Trajectory, ...]
    tree: TrajectoryTree | None = None
    """Replaces the trajectories if the session was opened with `export="tree"`."""
    superseded: bool = False
    """Whether it failed and was retried: another session has its `sample_index`."""
    model: str = ""
    """Name of the model that answered."""
    images: dict[str, session_pb2.SessionImage] = field(default_factory=dict, repr=False)
    """The images of its trajectories or its tree, by the SHA-256 of their bytes: each once, with
    its media type and the file as the agent sent it."""
    purpose: str = "TRAIN"
    """TRAIN, EVAL or OTHER."""
    abandoned: str = ""
    """Why no session took this seat of the group. Then there are no trajectories. Empty for a
    session."""
    run_id: str = ""
    """Id of the run: a group is the sessions with one `run_id` and one `group_id`."""
    numerics: dict[str, sampling_pb2.Numerics] = field(default_factory=dict, repr=False)
    """The numerics of the engines that sampled its tokens, by the ids of the version spans."""
    edges: tuple[trajectory_pb2.DeclaredEdge, ...] = ()
    """The edges that the agent declared between its model requests, with their turns."""
    budgets_spent: tuple[str, ...] = ()
    """The budgets that stopped a request or cut a turn: CALLS, SAMPLED_TOKENS, TIME."""
    recorded: session_pb2.SessionRecord | None = field(default=None, repr=False)
    """A message that holds only the messages and contexts."""
    capture: str = "TOKENS"
    """TOKENS, or LOGPROBS or TEXT, without tokens."""
    origin: session_pb2.SessionOrigin | None = field(default=None, repr=False)
    """The place that it started from. None if it began empty."""

    def conversation(self, trajectory: Trajectory) -> Conversation | None:
        """Returns the messages of a trajectory. None unless the session recorded them.

        Deliveries have them with `SubscribeOptions.messages`.
        """
        leaf = trajectory.path.leaf_node_id
        return conversation_of(self.recorded or session_pb2.SessionRecord(), leaf)

    def sampled(self) -> Iterator[tuple[Trajectory | TrajectoryTree, Mask]]:
        """Yields its trajectories or its tree, each with a mask of the sampled tokens, bool [N].

        A turn on several paths is in the mask of the first of them alone.
        """
        seen = set[int]()
        for part in self.trajectories or ([self.tree] if self.tree else ()):
            mask = part.policy_versions >= 0
            path = part.path.segments if isinstance(part, Trajectory) else ()
            for one in path:
                mask[one.start : one.end] &= one.node_id not in seen
            seen.update(one.node_id for one in path)
            yield part, mask

    @property
    def group(self) -> tuple[str, str]:
        """The ids of its run and its group. Without a group, its own id."""
        return self.run_id, self.group_id or self.session_id

    @classmethod
    def from_proto(cls, proto: session_pb2.SessionRecord) -> "SessionResult":
        """Reads a session."""
        return cls(
            proto.session_id,
            proto.group_id,
            proto.sample_index,
            name_of(session_pb2.SessionOutcome.DESCRIPTOR, proto.outcome),
            proto.reward if proto.HasField("reward") else None,
            proto.turns,
            dict(proto.metadata),
            tuple(map(Trajectory.from_proto, proto.trajectories)),
            TrajectoryTree.from_proto(proto.tree) if proto.HasField("tree") else None,
            proto.superseded,
            proto.model,
            {image.sha256: image for image in proto.images},
            name_of(session_pb2.SessionPurpose.DESCRIPTOR, proto.purpose or _TRAIN),
            proto.abandoned,
            proto.run_id,
            {one.id: one for one in proto.numerics},
            tuple(proto.edges),
            tuple(name_of(session_pb2.BudgetKind.DESCRIPTOR, one) for one in proto.budgets_spent),
            session_pb2.SessionRecord(messages=proto.messages, contexts=proto.contexts),
            name_of(session_pb2.Capture.DESCRIPTOR, proto.capture or session_pb2.CAPTURE_TOKENS),
            proto.origin if proto.HasField("origin") else None,
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """A session or a group. Acknowledge it when the trainer has stored it."""

    delivery_id: str
    """The same on every redelivery."""
    attempt: int
    """1 for the first delivery."""
    sessions: tuple[SessionResult, ...]
    """One, or all of the group in order of sample_index."""
    removed: tuple[collector_pb2.RemovedTrajectories, ...] = ()
    """Trajectories that the subscription's filter removed."""
    partial: bool = False
    """Whether the group has fewer samples than its size."""
    records: tuple[session_pb2.SessionRecord, ...] = field(default=(), repr=False)
    """The sessions as messages, with `SubscribeOptions.records`."""

    @property
    def group_id(self) -> str:
        """Id of the group. Empty for a session without one."""
        return self.sessions[0].group_id

    @property
    def run_id(self) -> str:
        """Id of the run of its sessions."""
        return self.sessions[0].run_id
