"""The client's calls about open sessions."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rollmesh.client.arguments import ExportForm, export_mode, filled, outcome_of, read_sampling
from rollmesh.client.connections import Connections, GatewayMethod
from rollmesh.client.retries import retried
from rollmesh.client.sessions.session import Outcome, Session
from rollmesh.client.sessions.transcripts import Transcript
from rollmesh.client.shielding import shielded
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    SessionClosedError,
    SessionKeyWrongError,
)
from rollmesh.v1 import gateway_pb2

_LEAVE_S = 10.0
_SIDECAR_S = 10.0


class SessionCalls(Connections):
    """Opens, reads and closes sessions at the gateway."""

    @asynccontextmanager
    async def session(  # noqa: PLR0913 - keywords, each with a default
        self,
        *,
        model: str = "",
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

        After an exception it is closed as FAILED, after a cancellation as ABORTED.

        Args:
            model: Name of the model that answers; may be empty if the mesh has only one.
            group_id: Shared by the sessions of one prompt; empty: a group of one.
            sample_index: Index in the group.
            group_size: Number of sessions in the group.
            sampling: Defaults of all turns, by the names of `SamplingParams`.
            metadata: Delivered to the trainer with the session.
            export: One trajectory per leaf of the conversation tree, one per turn, or the tree
                itself, each token once, as `SessionResult.tree`.
            request_id: Makes the call repeatable, by a trainer that was restarted too: while the
                session is open, it is returned; once it is closed, `SessionClosedError` is raised
                as long as its gateway remembers that.
            reward_timeout_ms: As of `close_session`, if the block ends without an error.

        Raises:
            RollmeshError: The gateway refuses.
        """
        request = self.session_request(
            model=model,
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
                with suppress(RepeatConflictError):  # an earlier close, which was kept
                    await shielded(self.close_session(session, outcome=outcome), _LEAVE_S)
            raise
        if not session.closed:
            await self.close_session(session, reward_timeout_ms=reward_timeout_ms)

    @staticmethod
    def session_request(  # noqa: PLR0913 - keywords, each with a default
        *,
        model: str = "",
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        request_id: str = "",
    ) -> gateway_pb2.CreateSessionRequest:
        """Returns the request for a session; the arguments are those of `session`.

        Raises:
            InvalidFieldError: An argument is invalid.
        """
        return filled(
            gateway_pb2.CreateSessionRequest,
            model=model,
            request_id=request_id,
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=read_sampling(sampling),
            metadata=dict(metadata or {}),
            export_mode=export_mode(export),
        )

    async def open_session(self, request: gateway_pb2.CreateSessionRequest) -> Session:
        """Opens a session, retrying while the gateway is full; the caller closes it.

        A request id that an earlier process gave returns the session that it opened, at whichever
        gateway that is; see `session`.
        """
        is_repeat = bool(request.request_id)
        if not is_repeat:  # retries must not open another session
            request.request_id = uuid.uuid4().hex
        sidecar = await retried(lambda _: self._sidecars.any(), _SIDECAR_S)
        opened = await self._opened(request, is_repeat=is_repeat)
        base_url = f"{sidecar}/sessions/{opened.session_key}/v1"
        return Session(
            opened.session_id,
            opened.session_key,
            base_url,
            opened.model,
            request_id=request.request_id,
        )

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

        If an operator ended the session's key, the session gets its next one first.

        Args:
            session: The session.
            outcome: How it ended.
            metadata: Added to the session's metadata.
            superseded: Whether another session takes its `sample_index`.
            reward_timeout_ms: Time that the collector holds the session back for `set_rewards`,
                milliseconds. None: it is delivered at once.

        Raises:
            InvalidFieldError: A reward names an unknown turn or trajectory, or another argument is
                invalid; the session stays open.
            RollmeshError: The gateway refuses, or is unavailable for too long.
        """
        request = filled(
            gateway_pb2.CloseSessionRequest,
            session_id=session.session_id,
            outcome=outcome_of(outcome),
            metadata=dict(metadata or {}),
            rewards=session.rewards.to_proto(session.session_id),
            superseded=superseded,
            reward_timeout_ms=reward_timeout_ms,
        )
        response = await self._with_key(session, lambda stub: stub.CloseSession, request)
        session.closed = True
        return list(response.trajectory_ids)

    async def revoke_key(self, session: Session) -> None:
        """Ends the key of an open session; the session gets the next key and another base URL.

        An agent that has only the old ones gets 401 from now on. Its running turns are not ended.

        Raises:
            SessionKeyWrongError: The session's key was ended by somebody else.
            RollmeshError: The gateway refuses, or is unavailable for too long.
        """
        old = session.api_key
        request = gateway_pb2.RevokeSessionKeyRequest(
            session_id=session.session_id, session_key=old, request_id=uuid.uuid4().hex
        )
        response = await self._at_gateway(
            session.session_id, lambda stub: stub.RevokeSessionKey, request
        )
        _rekey(session, response.session_key)

    async def renew_key(self, session: Session) -> None:
        """Gives an open session its current key and base URL, after somebody ended the old ones.

        Raises:
            InvalidFieldError: The session has no request id; it was not opened by a client.
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
            raise SessionClosedError(
                f"session {session.session_id} is closed", session_id=session.session_id
            )
        request = gateway_pb2.CreateSessionRequest(
            request_id=session.request_id, model=session.model
        )
        opened = await self._at_gateway(
            session.session_id, lambda stub: stub.CreateSession, request
        )
        _rekey(session, opened.session_key)

    async def _with_key(self, session: Session, method: GatewayMethod, request: Any) -> Any:
        """Makes a call with a session's key; if that was ended, with the next one."""
        request.session_key = session.api_key
        try:
            return await self._at_gateway(session.session_id, method, request)
        except SessionKeyWrongError:
            if not session.request_id:
                raise
            await self.renew_key(session)
            if session.api_key == request.session_key:
                raise
        request.session_key = session.api_key
        return await self._at_gateway(session.session_id, method, request)

    async def transcript(self, session: Session) -> Transcript:
        """Returns the conversation of an open session so far."""
        request = gateway_pb2.GetSessionRequest(session_id=session.session_id, with_messages=True)
        found = await self._with_key(session, lambda stub: stub.GetSession, request)
        return Transcript.from_proto(found)


def _rekey(session: Session, key: str) -> None:
    session.base_url = session.base_url.replace(session.api_key, key)
    session.api_key = key
