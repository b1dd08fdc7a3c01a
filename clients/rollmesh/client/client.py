"""The asynchronous client of one mesh, and the calls that only read."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc

from rollmesh.client.connections import CALL_S, Connections
from rollmesh.client.conversations import Start, Transcript, start_at
from rollmesh.client.deliveries import DeliveryCalls
from rollmesh.client.scores import ScoreCalls
from rollmesh.client.sessions import Session, SessionCalls, SessionResult
from rollmesh.client.states import StateCalls
from rollmesh.client.weights import WeightCalls
from rollmesh.mesh import retried
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.rpc import read_stream, stub_of, typed_errors
from rollmesh.v1 import (
    collector_pb2,
    collector_pb2_grpc,
    gateway_admin_pb2,
    gateway_pb2,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
)
from rollmesh.v1.gateway_admin_pb2_grpc import GatewayAdminServiceStub

_LIST_S = 10.0
_MOST_STORED = 10_000


class ReadCalls(Connections):
    """Reads sessions, and changes nothing."""

    async def transcript(self, session: Session) -> Transcript:
        """Returns the conversation of an open session so far."""
        return Transcript.from_proto(await self.open_session_tree(session.session_id))

    async def open_session_tree(self, session_id: str) -> gateway_pb2.GetSessionResponse:
        """Returns an open session and all nodes of its tree so far, with their messages.

        `running` has the turns that engines are sampling, with the last 2,048 tokens of each.

        Raises:
            SessionUnknownError: It is not open.
            RollmeshError: Its gateway refuses, or is unavailable for too long.
        """
        request = gateway_pb2.GetSessionRequest(
            session_id=session_id, with_messages=True, with_running=True
        )
        found = gateway_pb2.GetSessionResponse()
        while not found.HasField("session") or request.page_token:
            page = await self._at_gateway(session_id, lambda stub: stub.GetSession, request)
            request.page_token = page.next_page_token
            found.MergeFrom(page)
        return found

    async def open_sessions(self) -> list[gateway_pb2.OpenSession]:
        """Returns open sessions of all gateways, at most 1,000 of each.

        A gateway that does not answer is left out.

        Raises:
            RollmeshError: A gateway refuses: the caller is not an operator.
        """
        request = gateway_admin_pb2.ListSessionsRequest(page_size=1000)
        found: list[gateway_pb2.OpenSession] = []
        for address in await self._gateways.addresses():
            stub = stub_of(self._channel(address), GatewayAdminServiceStub)
            try:
                with typed_errors():
                    page = await stub.ListSessions(request, timeout=_LIST_S)
            except RollmeshError as error:
                if error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                continue
            found += page.sessions
        return found

    async def stored_session(self, session_id: str) -> SessionResult:
        """Returns a closed session from the collector, delivered or not.

        Raises:
            SessionUnknownError: The collector does not have it, or has removed it.
        """
        (found,) = await self._stored(collector_pb2.ReadSessionsRequest(session_id=session_id))
        return SessionResult.from_proto(found.session)

    async def start_at(self, session_id: str, node_id: int, *, as_text: bool = False) -> Start:
        """Returns the context of a recorded node, for sessions that go on from there.

        Args:
            session_id: A closed session that recorded its messages.
            node_id: Id of the node that the context ends with.
            as_text: Whether the template makes the ids anew, for a model with another tokenizer or
                template. Otherwise the ids are the recorded ones.

        Raises:
            SessionUnknownError: The collector does not have the session, or has removed it.
            InvalidFieldError: It has no such node, or no messages or ids.
        """
        (found,) = await self._stored(collector_pb2.ReadSessionsRequest(session_id=session_id))
        return start_at(found.session, node_id, as_text=as_text)

    async def stored_group(
        self, group_id: str, run_id: str = ""
    ) -> list[session_pb2.SessionRecord]:
        """Returns the sessions of a group and its abandoned seats, without arrays.

        Superseded sessions belong to no group. The list is empty if the collector has none of the
        group, or has removed it.
        """
        request = collector_pb2.ReadSessionsRequest(
            group_id=group_id, run_id=run_id, without_arrays=True
        )
        found = await retried(lambda _: self._stored(request), CALL_S)
        return [one.session for one in found if one.HasField("session")]

    async def stored_sessions(
        self, *, after: str = "", limit: int = 500, session_id: str = "", arrays: bool = False
    ) -> list[collector_pb2.ReadSessionsResponse]:
        """Returns closed sessions in the order in which they arrived at the collector.

        Args:
            after: `resume_token` of the last response of the page before. Empty begins.
            limit: Maximum number of sessions, 1 to 10,000.
            session_id: Only this session.
            arrays: Whether to return the tokens of trajectories, the bytes of images and messages.

        Returns:
            Responses with a `session`, or with the `damaged_session_id` of one that cannot be read.

        Raises:
            SessionUnknownError: The collector does not have `session_id`, or has removed it.
            InvalidFieldError: `limit` or `after` is invalid.
        """
        if not 1 <= limit <= _MOST_STORED:
            raise InvalidFieldError("limit", f"is {limit}; give 1 to {_MOST_STORED}")
        request = collector_pb2.ReadSessionsRequest(
            session_id=session_id, without_arrays=not arrays, resume_token=after
        )
        return await self._stored(request, limit)

    async def changed_sessions(
        self, *, after: str = "", limit: int = 500
    ) -> list[collector_pb2.ReadChangesResponse]:
        """Returns sessions whose rewards or annotations were set after they could be delivered.

        They come in the order of their last changes, without arrays.

        Args:
            after: `resume_token` of the last response of the call before. Empty begins.
            limit: Maximum number of sessions.

        Raises:
            RollmeshError: The collector is of a release without changes: `code` is UNIMPLEMENTED.
        """
        request = collector_pb2.ReadChangesRequest(resume_token=after)
        return await self._listed(lambda stub: stub.ReadChanges, request, limit)

    async def _stored(
        self, request: collector_pb2.ReadSessionsRequest, limit: int | None = None
    ) -> list[collector_pb2.ReadSessionsResponse]:
        return await self._listed(lambda stub: stub.ReadSessions, request, limit)

    async def _listed(
        self, method: Callable[[Any], Any], request: Any, limit: int | None
    ) -> list[Any]:
        async def read(channel: grpc.aio.Channel) -> list[Any]:
            stub = stub_of(channel, collector_pb2_grpc.CollectorServiceStub)
            found: list[Any] = []
            call = method(stub)(request, timeout=CALL_S)
            async with aclosing(read_stream(call)) as responses:
                async for response in responses:
                    found.append(response)
                    if len(found) == limit:
                        break
            return found

        return await self._collectors.call(read)


class ServerCalls(Connections):
    """Asks the servers for their descriptions."""

    async def server_infos(self) -> dict[str, server_pb2.GetServerInfoResponse]:
        """Returns release and capabilities of the router, a gateway and a collector, by name.

        Raises:
            RollmeshError: One of them cannot be reached.
        """
        request = server_pb2.GetServerInfoRequest()
        found: dict[str, server_pb2.GetServerInfoResponse] = {}

        async def ask(channel: grpc.aio.Channel) -> server_pb2.GetServerInfoResponse:
            stub: server_pb2_grpc.ServerServiceAsyncStub
            stub = server_pb2_grpc.ServerServiceStub(channel)
            with typed_errors():
                return await stub.GetServerInfo(request, timeout=CALL_S)

        found["router"] = await self._routers.info()
        found["gateway"] = await ask(self._channel(await self._gateways.any_address()))
        found["collector"] = await self._collectors.call(ask)
        return found


class Client(
    SessionCalls,
    ReadCalls,
    DeliveryCalls,
    StateCalls,
    ScoreCalls,
    WeightCalls,
    ServerCalls,
):
    """One mesh: its sessions, deliveries, weights and engines. Use it as a context."""
