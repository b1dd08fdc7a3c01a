"""`rollmesh gateway --http PORT`: a gateway that serves agents itself, one hop less.

The sidecar's HTTP runs in the process of the gateway. A session of this gateway is answered without
a call over the network, the session of another one as by a sidecar of its own. The other flags are
the gateway's. Settings of the HTTP come from `ROLLMESH_SIDECAR_*` and from `[sidecar]` of --config.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from inspect import isasyncgenfunction
from typing import Any

from rollmesh.chat import ModelFilesError
from rollmesh.chat.templates import TemplateRefusedError
from rollmesh.gateway import GatewayConfig, GatewayService
from rollmesh.mesh import GatewayDirectory
from rollmesh.runtime.access import Identity
from rollmesh.runtime.config import parse_config
from rollmesh.runtime.errors import DeadlineError, RollmeshError
from rollmesh.runtime.process import run_service
from rollmesh.runtime.rpc import LOCK, bind_host, check_exposed, guard_of, status_code_of
from rollmesh.runtime.telemetry import count_rpc
from rollmesh.sidecar import SidecarConfig, serving

_SERVICE = "/rollmesh.v1.GatewayService"


class LocalGateway:
    """Calls a servicer of this process as a stub calls a server.

    A unary method returns a task, which ends with the timeout of the call, and a streaming method
    an async generator. Both raise the servicer's typed errors and are counted among the RPCs.
    """

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        call = _stream if isasyncgenfunction(method) else _unary
        return partial(call, method, f"{_SERVICE}/{name}")


class _Context:
    """The part of a gRPC context that servicers use."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata
        self._is_cancelled = False
        self._callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def cancelled(self) -> bool:
        return self._is_cancelled

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    @contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """Counts the call, and tells the servicer at its end whether the answer was received."""
        started, code = time.perf_counter(), "CANCELLED"
        self._is_cancelled = True
        try:
            yield
            code, self._is_cancelled = "OK", False
        except Exception as error:
            code = status_code_of(error).name if isinstance(error, RollmeshError) else "INTERNAL"
            raise
        finally:
            count_rpc(method, code, time.perf_counter() - started)
            for callback in self._callbacks:
                callback(self)


def _unary(
    method: Callable[..., Any],
    name: str,
    request: Any,
    *,
    timeout: float,
    metadata: Sequence[tuple[str, str]] = (),
) -> asyncio.Task[Any]:
    async def call() -> Any:
        context, limit = _Context(metadata), asyncio.timeout(timeout)
        with context.counted(name):
            try:
                async with limit:
                    return await method(request, context)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineError("the turn took longer than its timeout; try again") from None

    return asyncio.get_running_loop().create_task(call())


async def _stream(
    method: Callable[..., AsyncGenerator[Any, None]],
    name: str,
    request: Any,
    *,
    timeout: float,  # noqa: ARG001, ASYNC109 - gRPC's argument. The caller bounds its stream
    metadata: Sequence[tuple[str, str]] = (),
) -> AsyncGenerator[Any, None]:
    context = _Context(metadata)
    with context.counted(name):
        async with aclosing(method(request, context)) as responses:
            async for response in responses:
                yield response


class ServingGateway(GatewayService):
    """A gateway with the HTTP of a sidecar in its process."""

    def __init__(self, config: GatewayConfig, http: SidecarConfig) -> None:
        """Loads the model's files.

        Raises:
            ConfigError: Other machines reach the HTTP, and the gateway lets everybody call.
            ModelFilesError: A file is missing.
            TemplateRefusedError: The template cannot be continued exactly.
        """
        check_exposed(http, bind_host(http), LOCK, locked=guard_of(config) is not None)
        super().__init__(config)
        self._http = http
        self._serving = AsyncExitStack()

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Runs the gateway, and the HTTP while it runs, and prints `HTTP {"port": ...}`."""
        own = self._http.token_file or self._http.tls_ca_file
        identity = Identity(self._http) if own else None
        local: Any = {address: LocalGateway(self.servicer)}  # it has the methods of a stub
        async with super().running(address), self._serving:
            directory = await self._serving.enter_async_context(
                aclosing(GatewayDirectory(self._http.router, "", identity, local))
            )
            port = await self._serving.enter_async_context(
                serving(self._http, directory, identity, joins=self._http.register)
            )
            print("HTTP", json.dumps({"port": port}), flush=True)
            yield

    async def drain(self) -> None:
        """Leaves the router, ends the HTTP once its running answers are complete, and drains."""
        if self._membership is not None:
            await self._membership.leave()
        await self._serving.aclose()
        await super().drain()


def main() -> int:
    """Returns the exit code."""
    own = argparse.ArgumentParser(prog="rollmesh gateway", add_help=False, allow_abbrev=False)
    own.add_argument("--http", type=int, default=0, metavar="PORT", help="port for agents")
    own.add_argument("--config", default="", help=argparse.SUPPRESS)
    given, flags = own.parse_known_args()
    file = [f"--config={given.config}"] if given.config else []
    if "--help" in flags:
        own.print_help()

    def build(config: GatewayConfig) -> ServingGateway:
        same = [f"--router={config.router}", f"--grace-ms={config.grace_ms}", *file]
        http = [f"--port={given.http}", *same]
        return ServingGateway(config, parse_config(SidecarConfig, "sidecar", http, os.environ))

    try:
        return run_service("gateway", GatewayConfig, build, flags + file, os.environ)
    except (ModelFilesError, TemplateRefusedError) as error:
        print(f"rollmesh gateway: model_path: {error}", file=sys.stderr)
    except OSError as error:
        print(f"rollmesh gateway: http: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
