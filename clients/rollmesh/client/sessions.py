"""Sessions: opened for an agent, closed with their reward."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any, TypeAlias

from google.protobuf import json_format

from rollmesh.client.retries import retried
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

Sampling: TypeAlias = types_pb2.SamplingParams | Mapping[str, Any] | None
"""Sampling defaults: the proto, or its fields by name: `{"temperature": 1.0}`."""


class Outcome(StrEnum):
    """How a session ended."""

    COMPLETED = "completed"
    """The agent finished its work."""
    FAILED = "failed"
    """The agent or its environment failed; the reward may be absent."""
    ABORTED = "aborted"
    """The runner ended it: a time limit, a cancellation."""


_OUTCOMES = {
    Outcome.COMPLETED: types_pb2.SESSION_OUTCOME_COMPLETED,
    Outcome.FAILED: types_pb2.SESSION_OUTCOME_FAILED,
    Outcome.ABORTED: types_pb2.SESSION_OUTCOME_ABORTED,
}


class Session:
    """An open session; an agent reaches it through `base_url` and `api_key`."""

    def __init__(
        self,
        gateway: "gateway_pb2_grpc.GatewayServiceAsyncStub",
        request: gateway_pb2.CreateSessionRequest,
        opened: gateway_pb2.CreateSessionResponse,
        sidecar_url: str,
        timeout_s: float,
    ) -> None:
        """Made by `Client.session` and `Client.open_session`."""
        self._gateway = gateway
        self._sidecar_url = sidecar_url
        self._timeout_s = timeout_s
        self.id = opened.session_id
        """Id of the session."""
        self.key = opened.session_key
        """The key that opens this session and nothing else."""
        self.group_id = request.group_id
        """Id of the group; empty where the session is its own group."""
        self.sample_index = request.sample_index
        """Place in the group."""
        self.outcome: Outcome | None = None
        """How it was closed; None while it is open."""
        self.reward: float | None = None
        """The reward it was closed with."""

    @property
    def base_url(self) -> str:
        """The URL that an OpenAI SDK takes as `base_url`.

        Raises:
            InvalidFieldError: The client was made without a sidecar.
        """
        if not self._sidecar_url:
            raise InvalidFieldError("sidecar", "is not set; give host:port of one to Client")
        return f"{self._sidecar_url}/sessions/{self.id}/v1"

    @property
    def api_key(self) -> str:
        """The key that an OpenAI SDK takes as `api_key`."""
        return self.key

    async def close(
        self,
        *,
        reward: float | None = None,
        outcome: Outcome | str = Outcome.COMPLETED,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[str, ...]:
        """Closes the session; durable at the gateway before it returns. A repeat changes nothing.

        Args:
            reward: Reward of the whole session.
            outcome: How it ended.
            metadata: Added to the metadata it was opened with.

        Returns:
            The ids of its trajectories.

        Raises:
            RollmeshError: It could not be closed.
        """
        ended = read_outcome(outcome)
        request = gateway_pb2.CloseSessionRequest(
            session_id=self.id,
            outcome=_OUTCOMES[ended],
            reward=reward,
            metadata=metadata,
        )
        response = await retried(
            lambda timeout: self._gateway.CloseSession(request, timeout=timeout), self._timeout_s
        )
        if self.outcome is None:
            self.outcome, self.reward = ended, reward
        return tuple(response.trajectory_ids)


def read_outcome(outcome: Outcome | str) -> Outcome:
    """Returns the outcome of that name.

    Raises:
        InvalidFieldError: There is none.
    """
    try:
        return Outcome(outcome)
    except ValueError:
        known = ", ".join(Outcome)
        raise InvalidFieldError("outcome", f"is {outcome!r}; give one of {known}") from None


def read_sampling(sampling: Sampling) -> types_pb2.SamplingParams | None:
    """Returns the proto of sampling defaults.

    Raises:
        InvalidFieldError: A name is unknown or a value has the wrong form.
    """
    if sampling is None or isinstance(sampling, types_pb2.SamplingParams):
        return sampling
    try:
        return json_format.ParseDict(dict(sampling), types_pb2.SamplingParams())
    except json_format.ParseError as error:
        raise InvalidFieldError("sampling", str(error)) from error


async def open_session(
    gateway: "gateway_pb2_grpc.GatewayServiceAsyncStub",
    request: gateway_pb2.CreateSessionRequest,
    sidecar_url: str,
    timeout_s: float,
) -> Session:
    """Opens a session, trying again while the gateway is away or full.

    Raises:
        RollmeshError: It could not be opened.
    """
    if not request.request_id:  # makes the call repeatable: one session however often it is tried
        request.request_id = uuid.uuid4().hex
    opened = await retried(
        lambda timeout: gateway.CreateSession(request, timeout=timeout), timeout_s
    )
    return Session(gateway, request, opened, sidecar_url, timeout_s)


@asynccontextmanager
async def closing(session: Session) -> AsyncIterator[Session]:
    """Closes the session at the end of the block, if the block did not.

    COMPLETED after a normal end, FAILED after an exception, ABORTED after a cancellation.
    """
    try:
        yield session
    except BaseException as error:
        if session.outcome is None:
            failed = isinstance(error, Exception)
            await session.close(outcome=Outcome.FAILED if failed else Outcome.ABORTED)
        raise
    if session.outcome is None:
        await session.close()
