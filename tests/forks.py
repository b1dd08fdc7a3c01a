"""Programs that are forked from a process which has their libraries loaded.

Most of the start of `python -m rollmesh.X` is spent on imports, and a test run starts hundreds of
services. A fork has a pid, memory, signals, streams and an exit code of its own, as a started
program has.
"""

import asyncio
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

# Nothing of one service: its metrics would be those of all.
_LOADED = (
    "google.protobuf.json_format",
    "grpc_reflection.v1alpha.reflection",
    "psycopg",
    "rollmesh.chat.templates",
    "rollmesh.mesh.routers",
    "rollmesh.runtime.process.main",
    "rollmesh.v1.collector_pb2_grpc",
    "rollmesh.v1.engine_pb2_grpc",
    "rollmesh.v1.gateway_pb2_grpc",
    "rollmesh.v1.router_pb2_grpc",
    "safetensors.numpy",
    "starlette.applications",
    "uvicorn.protocols.http.httptools_impl",
)
_FORK_S = 120.0  # on a machine that does other work
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(_LOADED))


class Forked:
    """One program, with what tests use of `asyncio.subprocess.Process`."""

    def __init__(
        self, process: ForkServerProcess, stdout: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.stdout = stdout
        self._process = process
        self._writer = writer
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = loop.create_future()
        loop.add_reader(process.sentinel, self._reap)

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str], stderr: Path) -> Self:
        """Runs a module as `python -m` does, in a session of its own."""
        ours, theirs = socket.socketpair()
        stdout, writer = await asyncio.open_connection(sock=ours)
        with theirs:
            process = _CONTEXT.Process(
                target=_run, args=(module, list(arguments), dict(os.environ), stderr, theirs)
            )
            process.start()
        forked = cls(process, stdout, writer)
        try:
            async with asyncio.timeout(_FORK_S):
                await stdout.readline()  # from here on its session is its own
        except BaseException:
            process.kill()  # nobody else would: the exit of this process waits for it
            raise
        return forked

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of a program that has ended."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Returns the exit code. The number of the signal, negative, if one ended it."""
        code = await asyncio.shield(self._ended)
        assert code is not None
        return code

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def close(self) -> None:
        """Ends the reading of its output."""
        self._writer.close()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set_result(self._process.exitcode)


def _run(
    module: str, arguments: list[str], environ: dict[str, str], stderr: Path, stdout: socket.socket
) -> None:
    os.setsid()
    with stdout, stderr.open("ab") as errors:
        os.dup2(stdout.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    os.write(1, b"\n")
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
