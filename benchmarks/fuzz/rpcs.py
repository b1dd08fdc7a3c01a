"""Messages to every RPC in any order: valid, changed, other bytes. Streams that are left."""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from benchmarks.fuzz import values
from benchmarks.fuzz.callers import Caller, Callers
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.messages import Messages
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.rpc import from_rpc_error

_DEADLINES_S = (0.05, 0.3, 0.3, 1.0, 3.0)
_OVER_S = 30.0
_REFUSED_S = 8.0
"""A refusal is delayed for up to two seconds."""
_MOST_READ = 40
_RARE = {"ControlEngines"}
"""Calls that stop sampling: too many of them, and the agents beside get no answers."""
_BY_TRANSPORT = {
    "UNAVAILABLE",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "UNIMPLEMENTED",
    "RESOURCE_EXHAUSTED",
}
"""Codes that gRPC itself gives without a reason of ours."""
_OF_CLIENT = "Internal error from Core"
"""What grpcio says of a stream that the server has ended while it was written to."""
_HEALTH = "grpc.health.v1.Health"


class RpcAttack:
    """Calls the RPCs of the services, one after the other."""

    def __init__(
        self,
        rng: random.Random,
        methods: Sequence[tuple[str, MethodDescriptor]],
        callers: Callers,
        messages: Messages,
        seeds: Mapping[str, Sequence[Message]],
        findings: Findings,
    ) -> None:
        """Takes what is called.

        Args:
            rng: The source of choices.
            methods: What is called, with the name of the service that is asked.
            callers: Their channels.
            messages: Makes the messages.
            seeds: Valid messages by the name of a method. May change from call to call.
            findings: Where the outcome is noted.
        """
        self._rng = rng
        self._messages = messages
        self._seeds = seeds
        self._findings = findings
        self._methods = methods
        self._callers = callers

    async def once(self, caller: Caller) -> None:
        """Makes a call that the table of roles lets a caller make."""
        methods = [one for one in self._methods if caller.may_call(_path(one[1]))]
        await self._once(caller, *self._rng.choice(methods), self._rng.choice(_DEADLINES_S))

    async def knock(self, caller: Caller) -> None:
        """Makes a call that the table of roles does not let a caller make."""
        methods = [one for one in self._methods if not caller.may_call(_path(one[1]))]
        await self._once(caller, *self._rng.choice(methods), _REFUSED_S)

    async def _once(
        self, caller: Caller, service: str, method: MethodDescriptor, limit_s: float
    ) -> None:
        if method.name in _RARE and self._rng.random() < 0.8:
            return
        streams = method.client_streaming, method.server_streaming
        if self._rng.random() < 0.03:
            streams = self._rng.random() < 0.5, self._rng.random() < 0.5
        sent = list(self._inputs(method, count=self._count(streams[0])))
        self._findings.sent(len(sent))
        where = method.full_name
        try:
            async with asyncio.timeout(limit_s + _OVER_S):
                outcome = await self._call(caller, service, method, streams, sent, limit_s)
        except TimeoutError:
            self._findings.found("hangs", where, "the call outlived its deadline", *sent)
            return
        self._findings.answered(where, outcome.partition(":")[0])
        if outcome.startswith("untyped"):
            self._findings.found("untyped_errors", where, outcome, *sent)
        if violation := caller.violation(_path(method), outcome):
            self._findings.found("role_violations", where, violation, *sent)

    def _count(self, is_stream: bool) -> int:  # of one thing
        return self._rng.choice((0, 1, 1, 2, 3, 8, 40)) if is_stream else 1

    def _inputs(self, method: MethodDescriptor, count: int) -> Iterator[bytes]:
        rng, seeds = self._rng, self._seeds.get(method.name, ())
        for at in range(count):
            kind = rng.random()
            if seeds and kind < 0.7:
                seed = seeds[min(at, len(seeds) - 1)] if rng.random() < 0.7 else rng.choice(seeds)
                message = seed if kind < 0.15 else self._messages.changed(seed)
            else:
                message = self._messages.made(method.input_type)
            data = message.SerializeToString()
            other = rng.choice(seeds).SerializeToString() if seeds else b""
            yield values.changed_bytes(rng, data, other) if rng.random() < 0.15 else data

    async def _call(
        self,
        caller: Caller,
        service: str,
        method: MethodDescriptor,
        streams: tuple[bool, bool],
        sent: list[bytes],
        limit_s: float,
    ) -> str:
        """Makes a call. Returns its outcome, which begins with `untyped` if it has no reason."""
        rng = self._rng
        kind = "_".join("stream" if one else "unary" for one in streams)
        multi: Any = getattr(self._callers.channel(caller, service), kind)(_path(method))
        request: Any = iter(sent) if streams[0] else sent[0]
        call = multi(request, timeout=limit_s, metadata=caller.metadata)
        leaves = rng.random() < 0.1
        try:
            if leaves:
                await asyncio.sleep(rng.random() * 0.05)
            elif streams[1]:
                read = 0
                async for _ in call:
                    read += 1
                    if read >= _MOST_READ:
                        break
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return _outcome(error, method.containing_service.full_name)
        finally:
            call.cancel()
        return "left" if leaves else "OK"


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _outcome(error: grpc.aio.AioRpcError, service: str) -> str:
    typed = from_rpc_error(error)
    if isinstance(typed, RemoteError):
        known = typed.code in _BY_TRANSPORT or typed.message == _OF_CLIENT
        known = known or (service, typed.code) == (_HEALTH, "NOT_FOUND")
        return typed.code if known else f"untyped: {typed.code} {typed.message}"
    if typed.reason == "INTERNAL":
        return f"untyped: INTERNAL {typed.message}"
    return typed.reason
