"""The client's calls about open sessions."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rollmesh.client.arguments import ExportForm, export_mode, filled, outcome_of, read_sampling
from rollmesh.client.connections import Connections
from rollmesh.client.sessions.session import Outcome, Session
from rollmesh.client.sessions.transcripts import Transcript
from rollmesh.client.shielding import shielded
from rollmesh.runtime.errors import RepeatConflictError
from rollmesh.v1 import gateway_pb2

_LEAVE_S = 10.0


class SessionCalls(Connections):
    """Opens, reads and closes sessions at the gateway."""

    @asynccontextmanager
    async def session(  # noqa: PLR0913 - keywords, each with a default
        self,
        *,
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        request_id: str = "",
        reward_timeout_ms: int | None = None,
    ) -> AsyncIterator[Session]:
        """Holds a session open; leaving closes it with `session.rewards`.

        It is closed FAILED after an exception and ABORTED after a cancellation.

        Args:
            group_id: The sessions of one prompt share it; empty makes a group of one.
            sample_index: Place in the group.
            group_size: Number of sessions in the group.
            sampling: Defaults of all turns, by the names of `SamplingParams`.
            metadata: Carried to the trainer.
            export: One trajectory for each leaf of the conversation tree, or for each turn; or
                the tree itself, each token once, as `SessionResult.tree`.
            request_id: Makes opening repeatable.
            reward_timeout_ms: As of `close_session`, where the block ends well.

        Raises:
            RollmeshError: The gateway refuses.
        """
        request = self.session_request(
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=sampling,
            metadata=metadata,
            export=export,
            request_id=request_id,
        )
        session = await self.open_session(request)
        try:
            yield session
        except BaseException as error:
            if not session.closed:
                outcome: Outcome = "FAILED" if isinstance(error, Exception) else "ABORTED"
                with suppress(RepeatConflictError):  # an earlier close, which stands
                    await shielded(self.close_session(session, outcome=outcome), _LEAVE_S)
            raise
        if not session.closed:
            await self.close_session(session, reward_timeout_ms=reward_timeout_ms)

    @staticmethod
    def session_request(
        *,
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        request_id: str = "",
    ) -> gateway_pb2.CreateSessionRequest:
        """Returns what asks for a session; the arguments are those of `session`.

        Raises:
            InvalidFieldError: Names the argument that is wrong.
        """
        return filled(
            gateway_pb2.CreateSessionRequest,
            request_id=request_id,
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=read_sampling(sampling),
            metadata=dict(metadata or {}),
            export_mode=export_mode(export),
        )

    async def open_session(self, request: gateway_pb2.CreateSessionRequest) -> Session:
        """Opens a session, trying again while the gateway is full; the caller closes it."""
        if not request.request_id:  # one session, however often it is tried
            request.request_id = uuid.uuid4().hex
        opened = await self._repeated(self._gateway().CreateSession, request)
        base_url = f"http://{self.addresses.sidecar}/sessions/{opened.session_key}/v1"
        return Session(opened.session_id, opened.session_key, base_url)

    async def close_session(
        self,
        session: Session,
        *,
        outcome: Outcome = "COMPLETED",
        metadata: Mapping[str, str] | None = None,
        superseded: bool = False,
        reward_timeout_ms: int | None = None,
    ) -> list[str]:
        """Closes a session with its rewards; returns the ids of its trajectories.

        Args:
            session: The session.
            outcome: How it ended.
            metadata: Added to the session's.
            superseded: Whether another session takes its place in the group.
            reward_timeout_ms: Time for `set_rewards` to come, milliseconds from when the collector
                has the session; it is delivered then, or with them. None delivers it at once.

        Raises:
            InvalidFieldError: A reward is of what the session does not have, or another argument
                is wrong; it stays open.
            RollmeshError: The gateway refuses, or is away for too long.
        """
        request = filled(
            gateway_pb2.CloseSessionRequest,
            session_id=session.session_id,
            session_key=session.api_key,
            outcome=outcome_of(outcome),
            metadata=dict(metadata or {}),
            rewards=session.rewards.to_proto(session.session_id),
            superseded=superseded,
            reward_timeout_ms=reward_timeout_ms,
        )
        response = await self._repeated(self._gateway().CloseSession, request)
        session.closed = True
        return list(response.trajectory_ids)

    async def transcript(self, session: Session) -> Transcript:
        """Returns what was said so far in an open session."""
        request = gateway_pb2.GetSessionRequest(
            session_id=session.session_id, session_key=session.api_key, with_messages=True
        )
        return Transcript.from_proto(await self._repeated(self._gateway().GetSession, request))
