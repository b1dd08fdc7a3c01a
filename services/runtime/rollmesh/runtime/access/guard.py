"""The guard of a server: identifies callers and admits them by their roles."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from rollmesh.runtime import clock
from rollmesh.runtime.access.roles import OPEN, TABLE, Role, may_call, roles_of
from rollmesh.runtime.access.tokens import AcceptedTokens, digest_of, token_of
from rollmesh.runtime.errors import CallerUnknownError, RoleRefusedError, RollmeshError

# Calls that were refused, by the address that they came from.

_FREE = 16
"""Refusals that an address gets at once."""
_HALF_LIFE_MS = 10_000
_FIRST_DELAY_MS, _LONGEST_DELAY_MS = 10, 2_000


class Failures:
    """Counts refused calls, and says how long the next answer to the same address takes.

    Only refusals are delayed, so callers with valid credentials never wait. A count halves
    every ten seconds, and the oldest addresses are forgotten.
    """

    def __init__(self, most: int = 1024) -> None:
        """Takes the number of addresses that are remembered."""
        self._most = most
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def failed(self, peer: str, now_ms: int) -> tuple[int, int]:
        """Counts a refused call.

        Args:
            peer: Address that it came from, without its port.
            now_ms: The time, milliseconds.

        Returns:
            The address's count, rounded, and the delay of the answer, milliseconds.
        """
        count, at_ms = self._counts.pop(peer, (0.0, now_ms))
        count = count * 0.5 ** ((now_ms - at_ms) / _HALF_LIFE_MS) + 1
        self._counts[peer] = (count, now_ms)
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)
        over = round(count) - _FREE
        if over <= 0:
            return round(count), 0
        delay_ms = _FIRST_DELAY_MS * 2 ** min(over - 1, 16)
        return round(count), min(delay_ms, _LONGEST_DELAY_MS)


def address_of(peer: str) -> str:
    """Returns a peer as gRPC names it, `ipv4:10.0.0.1:4711`, without its port."""
    return peer.rpartition(":")[0] or peer


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""Of a call, as its servicer gets it."""
_log = logging.getLogger(__name__)
_NOBODY: frozenset[Role] = frozenset()
_MOST_WAITING = 256
"""Most refusals that are delayed together. Further ones are answered at once."""
_MOST_DRAINED = 64
_SILENCE_S = 1.0

_caller: ContextVar[frozenset[Role] | None] = ContextVar("caller", default=None)
_roles_now: ContextVar[Callable[[], frozenset[Role]] | None] = ContextVar("roles", default=None)


def caller_roles() -> frozenset[Role] | None:
    """Returns the roles of the running call's caller, or None if the server is open."""
    return _caller.get()


def check_caller() -> None:
    """Does nothing while the running call's caller has the roles with which it was let in.

    Raises:
        CallerUnknownError: Its token is not accepted any longer.
    """
    now = _roles_now.get()
    if now is not None and not now() >= (caller_roles() or _NOBODY):
        raise CallerUnknownError("authorization: the token is not accepted any longer")


@dataclass(frozen=True, slots=True)
class Entry:
    """A call at the door of a server."""

    method: str
    """Full name of the method."""
    roles: frozenset[Role]
    """Roles that its token shows."""
    digest: bytes | None
    """Of its token. None if it has none."""


class Guard:
    """Lets calls in by the table of roles.

    A caller shows its roles by a bearer token or, where client certificates are required, by the
    URIs of its certificate.
    """

    def __init__(
        self, tokens: AcceptedTokens | None, *, certificates: bool, count: Callable[[str], None]
    ) -> None:
        """Makes a guard."""
        self._tokens = tokens
        self._certificates = certificates
        self._count = count
        self._failures = Failures()
        self._waiting = 0

    def meet(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Entry:
        """Returns a call with the roles that its token shows."""
        if method in OPEN:
            return Entry(method, _NOBODY, None)
        token = token_of(metadata)
        digest = None if token is None else digest_of(token)
        return Entry(method, self._roles(digest), digest)

    def is_refused(self, entry: Entry) -> bool:
        """Returns whether a call is refused whatever its certificate says, so it is not parsed."""
        return not self._certificates and not may_call(entry.method, entry.roles)

    async def admit(
        self, entry: Entry, context: Context, requests: AsyncIterator[Any] | None
    ) -> None:
        """Returns if the caller may make a call, and sets `caller_roles`.

        Raises:
            CallerUnknownError: It shows no token or certificate that is accepted.
            RoleRefusedError: None of its roles may call the method.
        """
        certified = roles_of(context.auth_context()) if self._certificates else _NOBODY
        roles = entry.roles | certified
        if may_call(entry.method, roles):
            _caller.set(roles)
            _roles_now.set(lambda: self._roles(entry.digest) | certified)
            return
        reason, error = _refusal(entry, roles)
        self._count(reason)
        peer = address_of(context.peer())
        count, delay_ms = self._failures.failed(peer, clock.monotonic_ms())
        if count & (count - 1) == 0:  # 1, 2, 4, ...: a persistent peer must not fill the log
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

    def _roles(self, digest: bytes | None) -> frozenset[Role]:
        return self._tokens.roles_of(digest) if self._tokens and digest is not None else _NOBODY


async def _drained(requests: AsyncIterator[Any]) -> None:
    """Drains a refused client's requests: a status that overtakes them may lose its reason."""
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
    if entry.digest is not None:
        return "unknown_token", CallerUnknownError(
            f"authorization: the token is not accepted here; {entry.method} is for {allowed}"
        )
    return "no_token", CallerUnknownError(
        f"authorization: is missing; {entry.method} is for {allowed}, so give the caller the token "
        "of such a role: --token-file, or ROLLMESH_TOKEN_FILE for clients"
    )
