"""The guard of a server: who calls, and whether the caller may."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from rollmesh.runtime import clock
from rollmesh.runtime.access.certificates import roles_of
from rollmesh.runtime.access.failures import Failures, address_of
from rollmesh.runtime.access.roles import OPEN, TABLE, Role, may_call
from rollmesh.runtime.access.tokens import AcceptedTokens, token_of
from rollmesh.runtime.errors import CallerUnknownError, RoleRefusedError, RollmeshError

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None
_log = logging.getLogger(__name__)
_NOBODY: frozenset[Role] = frozenset()
_MOST_WAITING = 256
"""Refusals that are delayed at a time; further ones are answered at once."""
_MOST_DRAINED = 64
_SILENCE_S = 1.0

_caller: ContextVar[frozenset[Role] | None] = ContextVar("caller", default=None)


def caller_roles() -> frozenset[Role] | None:
    """Returns the roles of who makes the running call; None if the server lets everybody in."""
    return _caller.get()


@dataclass(frozen=True, slots=True)
class Entry:
    """A call at the door of a server."""

    method: str
    """Full name of the method."""
    roles: frozenset[Role]
    """Roles that its token shows."""
    token: bool
    """Whether it has a token."""


class Guard:
    """Lets calls in by the table of roles.

    A caller shows its roles by a bearer token or, where client certificates are required, by the
    URIs of its certificate.
    """

    def __init__(
        self, tokens: AcceptedTokens | None, *, certificates: bool, count: Callable[[str], None]
    ) -> None:
        """Makes a guard.

        Args:
            tokens: The tokens that are accepted; None accepts none.
            certificates: Whether callers show certificates that were verified.
            count: Counts a refused call by its reason.
        """
        self._tokens = tokens
        self._certificates = certificates
        self._count = count
        self._failures = Failures()
        self._waiting = 0

    def meet(self, method: str, metadata: _Metadata) -> Entry:
        """Returns a call with the roles that its token shows."""
        if method in OPEN:
            return Entry(method, _NOBODY, token=False)
        token = token_of(metadata)
        roles = self._tokens.roles(token) if self._tokens and token is not None else _NOBODY
        return Entry(method, roles, token=token is not None)

    def is_refused(self, entry: Entry) -> bool:
        """Returns whether a call is refused whatever its certificate says: nobody parses it."""
        return not self._certificates and not may_call(entry.method, entry.roles)

    async def admit(
        self, entry: Entry, context: _Context, requests: AsyncIterator[Any] | None
    ) -> None:
        """Returns if the caller may make a call; `caller_roles` are its roles then.

        Args:
            entry: From `meet`.
            context: Of the call.
            requests: The stream of requests; None if there is one request.

        Raises:
            CallerUnknownError: It shows no token or certificate that is accepted.
            RoleRefusedError: None of its roles may call the method.
        """
        roles = entry.roles
        if self._certificates:
            roles |= roles_of(context.auth_context())
        if may_call(entry.method, roles):
            _caller.set(roles)
            return
        reason, error = _refusal(entry, roles)
        self._count(reason)
        peer = address_of(context.peer())
        count, delay_ms = self._failures.failed(peer, clock.monotonic_ms())
        if count & (count - 1) == 0:  # 1, 2, 4, ...: a peer that goes on fills no log
            _log.warning("call refused from %s (%s so far): %s", peer, count, error.message)
        if self._waiting < _MOST_WAITING:
            self._waiting += 1
            try:
                await asyncio.sleep(delay_ms / 1000)
                if requests is not None:
                    await _drained(requests)
            finally:
                self._waiting -= 1
        raise error


async def _drained(requests: AsyncIterator[Any]) -> None:
    """Takes what a refused client has sent: a status that overtakes it may lose its reason."""
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        for _ in range(_MOST_DRAINED):
            async with asyncio.timeout(_SILENCE_S):
                await anext(requests)


def _refusal(entry: Entry, roles: frozenset[Role]) -> tuple[str, RollmeshError]:
    """Returns why a call is refused: a word for the metric, and the error."""
    allowed = ", ".join(sorted(TABLE.get(entry.method, ()))) or "nobody"
    if roles:
        return "wrong_role", RoleRefusedError(
            f"role {', '.join(sorted(roles))} may not call {entry.method}, which is for {allowed}",
            roles=",".join(sorted(roles)),
        )
    if entry.token:
        return "unknown_token", CallerUnknownError(
            f"authorization: the token is not accepted here; {entry.method} is for {allowed}"
        )
    return "no_token", CallerUnknownError(
        f"authorization: is missing; {entry.method} is for {allowed}, so give the caller the token "
        "of such a role: --token-file, or ROLLMESH_TOKEN_FILE for clients"
    )
