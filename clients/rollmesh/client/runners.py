"""Agent runners: functions that run one agent on one sample in one session, and their registry.

Agents as commands are one process per session, with the base URL and key in its environment. The
protocol is in docs/runners.md. The command's whole process group is killed when the runner ends or
when its own process dies. A process that leaves the group (setsid) cannot be reached.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

from rollmesh.client.failures import InfrastructureError, shielded
from rollmesh.client.reaper import Reaper
from rollmesh.client.sessions import Session
from rollmesh.runtime.errors import InvalidFieldError

AgentRunner: TypeAlias = Callable[[Any, Session], Awaitable[Any]]
"""Runs one agent on one sample in one session.

Returns the reward (a number, `Rewards`, a mapping, or None), or anything else if the rollout has a
reward function, which receives it. If it has a method `closed(client, session_id)`, the rollout
awaits that after it closed a session. The collector may not have the session yet.
"""

_RUNNERS: dict[str, AgentRunner] = {}


def register_runner(name: str, runner: AgentRunner) -> None:
    """Registers a runner under a name.

    Raises:
        InvalidFieldError: The name is registered for another runner.
    """
    if _RUNNERS.get(name, runner) is not runner:
        raise InvalidFieldError("name", f"{name!r} is taken; give another")
    _RUNNERS[name] = runner


def find_runner(runner: str | AgentRunner | None) -> AgentRunner:
    """Returns the runner of a name, or the given function.

    Raises:
        InvalidFieldError: The name is not registered, or the runner is not callable.
    """
    found = _RUNNERS.get(runner) if isinstance(runner, str) else runner
    if found is None:
        given = f"{runner!r} is not registered" if runner else "is not given"
        raise InvalidFieldError("runner", f"{given}; registered are {sorted(_RUNNERS)}")
    if not callable(found):
        raise InvalidFieldError("runner", f"is {found!r:.200}; give a function or a name")
    return found


def agent_name(sample: Any) -> str:
    """Returns the `agent_name` of a sample, empty if it has none."""
    if isinstance(sample, Mapping):
        return str(sample.get("agent_name") or "")
    return str(getattr(sample, "agent_name", None) or "")


# Commands.

_ERROR_BYTES = 2_000
_MAX_RESULT_BYTES = 16 * 1024 * 1024
_DRAIN_S = 2.0
_REAP_S = 5.0
_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: a need of the command is away."""
_NAMES = ("session_id", "sample_file", "result_file")
_REAPER = Reaper()


class CommandError(Exception):
    """A command failed. The message ends with the end of its output."""


class CommandLostError(CommandError, InfrastructureError):
    """A command did not start, was ended by a signal from elsewhere, or exited with 75."""


@dataclass(frozen=True, kw_only=True)
class CommandRunner:
    """An `AgentRunner` that runs a command for each session."""

    argv: Sequence[str]
    """The command. `{base_url}`, `{model}`, `{session_id}`, `{sample_file}` and `{result_file}` are
    replaced. Command lines are public, so the key is in the environment only: an agent that uses
    `{base_url}` must send `OPENAI_API_KEY`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment, which it overrides. The protocol's names come last."""
    cwd: Path | None = None
    """Working directory. None makes a temporary one."""
    model: str = ""
    """Name of the model for the agent. Empty means the session's."""
    encode: Callable[[Any], Any] = lambda sample: sample
    """Converts a sample to JSON values."""
    grace_s: float = 10.0
    """Time from SIGTERM to SIGKILL, seconds, limited by the rollout's grace."""
    max_output_bytes: int = 64 * 1024
    """Bytes kept from the end of standard output and of standard error, each."""

    def __post_init__(self) -> None:
        """Checks the command.

        Raises:
            InvalidFieldError: `argv` is not a sequence of strings, or a variable is not a string.
        """
        words = [] if isinstance(self.argv, str) else list(self.argv)
        if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
            raise InvalidFieldError("argv", f"is {self.argv!r:.200}; give a list of strings")
        for name, value in self.env.items():
            if not isinstance(value, str):
                raise InvalidFieldError(f"env.{name}", f"is {value!r:.200}; give a string")

    async def __call__(self, sample: Any, session: Session) -> Any:
        """Runs the command and returns its result as JSON values, None if it gives none.

        Raises:
            CommandError: It exited with a code other than 0, or gave an unreadable result.
            CommandLostError: It did not start, was ended by a signal, or exited with 75.
            InvalidFieldError: The sample is not JSON.
        """
        try:
            given = json.dumps(self.encode(sample))
        except (TypeError, ValueError) as error:
            raise InvalidFieldError("sample", f"{error}; give the runner an `encode`") from error
        async with AsyncExitStack() as stack:
            try:
                made = tempfile.TemporaryDirectory(prefix="rollmesh-", ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
                (folder / "sample.json").write_text(given)
                tails = await stack.enter_async_context(_tails(self.max_output_bytes))
                process = await self._start(folder, session, *tails)
            except OSError as error:
                raise CommandLostError(f"{self.argv[0]} did not start: {error}") from error
            await self._until_ended(process)
            output, errors = tails
            with suppress(TimeoutError):  # a process outside the group may hold the pipes open
                async with asyncio.timeout(_DRAIN_S):
                    await asyncio.gather(output.ended.wait(), errors.ended.wait())
            if process.returncode:
                is_lost = process.returncode < 0 or process.returncode == _TRY_AGAIN
                kind = CommandLostError if is_lost else CommandError
                raise kind(_why(self.argv, process.returncode, errors, output))
            return _result(folder / "result.json", output)

    async def _start(
        self, folder: Path, session: Session, output: "_Tail", errors: "_Tail"
    ) -> asyncio.subprocess.Process:
        files = {"sample_file": folder / "sample.json", "result_file": folder / "result.json"}
        filled = {
            "base_url": session.keyless_url,
            "model": self.model or session.model,
            "session_id": session.session_id,
            **{name: str(path) for name, path in files.items()},
        }
        argv = [_filled(argument, filled) for argument in self.argv]
        (folder / "work").mkdir()
        with (folder / "sample.json").open("rb") as stdin:
            try:
                return await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=stdin,
                    stdout=output.write_end,
                    stderr=errors.write_end,
                    cwd=self.cwd or folder / "work",
                    env=self._environment(session, filled),
                    start_new_session=True,
                )
            finally:
                output.close_write_end()
                errors.close_write_end()

    def _environment(self, session: Session, filled: Mapping[str, str]) -> dict[str, str]:
        return {
            **inherited(self.env),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": self.model or session.model,
            **{f"ROLLMESH_{name.upper()}": filled[name] for name in _NAMES},
        }

    async def _until_ended(self, process: asyncio.subprocess.Process) -> None:
        """Waits for the process and then kills the rest of its group."""
        try:
            _REAPER.watch(process.pid)
            try:
                await process.wait()
            except asyncio.CancelledError:
                _signal(process, signal.SIGTERM)
                with suppress(TimeoutError):  # a second cancellation does not wait
                    async with asyncio.timeout(self.grace_s):
                        await process.wait()
                raise
        finally:
            _signal(process, signal.SIGKILL)
            _REAPER.forget(process.pid)
            await shielded(process.wait(), _REAP_S)


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child of this process, which has these variables too."""
    return {**os.environ, **env}  # noqa: TID251 - passed on unchanged, as a shell does


class _Tail(asyncio.Protocol):
    """The read end of a pipe, which keeps the last bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.data = bytearray()
        self.cut = False
        """Whether earlier bytes were dropped."""
        self.ended = asyncio.Event()
        self._max_bytes = max_bytes
        self.read_end, self.write_end = os.pipe()

    def itself(self) -> Self:
        return self

    def close_write_end(self) -> None:
        """Closes this process's copy of the write end."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def data_received(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > self._max_bytes:
            del self.data[: -self._max_bytes]
            self.cut = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


@asynccontextmanager
async def _tails(max_bytes: int) -> AsyncIterator[tuple[_Tail, _Tail]]:
    with ExitStack() as stack:
        tails = list[_Tail]()
        for _ in range(2):
            tails.append(tail := _Tail(max_bytes))
            stack.callback(tail.close_write_end)
            pipe = os.fdopen(tail.read_end, "rb", buffering=0)
            reading = asyncio.get_running_loop().connect_read_pipe(tail.itself, pipe)
            stack.callback((await reading)[0].close)
        yield tails[0], tails[1]


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError):  # the group is empty
        os.killpg(process.pid, number)


def _filled(argument: str, values: Mapping[str, str]) -> str:
    """Replaces the known names. Other braces belong to the command."""
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument


def _why(argv: Sequence[str], code: int, errors: _Tail, output: _Tail) -> str:
    by = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
    ended = f"ended with {code}" if code > 0 else f"was ended by {by}"
    said = bytes(errors.data or output.data)[-_ERROR_BYTES:].decode(errors="replace").strip()
    return f"{argv[0]} {ended}" + (f": {said}" if said else "")


def _result(path: Path, output: _Tail) -> Any:
    """Returns the result file, or else the last line of output if it is JSON."""
    if path.exists():
        if path.stat().st_size > _MAX_RESULT_BYTES:
            raise CommandError(
                f"the result file has more than {_MAX_RESULT_BYTES} bytes; write less"
            )
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise CommandError(f"the result file is not JSON: {error}") from error
    text = bytes(output.data).rstrip()
    if output.cut and b"\n" not in text:
        size = len(output.data)
        raise CommandError(
            f"the last line of output has more than {size} bytes; write the result to the file"
        )
    try:
        return json.loads(text[text.rfind(b"\n") + 1 :])
    except ValueError:
        return None
