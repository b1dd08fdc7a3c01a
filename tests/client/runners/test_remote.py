import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client, Retries, Session, TimeLimits
from rollmesh.client.rollouts.rollout import rollout
from rollmesh.client.runners.remote import RemoteAgentError, RemoteAgentLostError, RemoteRunner
from rollmesh.v1 import session_pb2
from tests.processes import reserved_port
from tests.sidecar.scripted_gateway import ScriptedGateway
from tests.waiting import until

SESSION = Session("5e55", "rmk-5e55-secret", "http://127.0.0.1:1/sessions/rmk-5e55-secret/v1")
SCRIPT = Path(__file__).parent / "agent_server.py"


class Server:
    """An agent server in a process of its own, on one port through its restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reserved = reserved_port()
        self.port = self._reserved.getsockname()[1]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *flags: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, SCRIPT, str(self.port), self.folder, *flags, stdout=-1
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            assert (await self._process.stdout.readline()).startswith(b"READY")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
        await self.ended()

    async def close(self) -> None:
        await self.kill()
        self._reserved.close()

    async def ended(self) -> None:
        if self._process is not None:
            await self._process.communicate()

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    async def logged(self, start: str, count: int = 1) -> None:
        """Waits until as many things happened whose line starts so."""
        await until(lambda: sum(line.startswith(start) for line in self.log()) >= count)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path)
    yield server
    await server.close()


@asynccontextmanager
async def running(server: Server, **settings: Any) -> AsyncIterator[RemoteRunner]:
    settings = {"token": "open", "poll_s": 5, **settings}
    async with asyncio.timeout(100), RemoteRunner(url=server.url, **settings) as runner:
        yield runner


async def test_a_run_is_submitted_polled_collected_and_forgotten(server: Server) -> None:
    await server.start()
    async with running(server, poll_s=0.05) as runner:
        assert await runner({"result": {"reward": 0.5}}, SESSION) == {"reward": 0.5}
    assert server.log() == ["began 5e55", "completed 5e55", "forgot 5e55"]


@pytest.mark.parametrize(
    ("settings", "sample", "text"),
    [
        pytest.param({"token": "wrong"}, {}, "401.*no token", id="refused"),
        pytest.param({}, {"fail": "confused"}, "agent failed: confused", id="the agent's failure"),
    ],
)
async def test_a_refusal_and_a_failure_say_why(
    server: Server, settings: dict[str, Any], sample: dict[str, Any], text: str
) -> None:
    await server.start()
    async with running(server, **settings) as runner:
        with pytest.raises(RemoteAgentError, match=text):
            await runner(sample, SESSION)


async def test_a_server_that_is_not_up_yet_is_waited_for(server: Server) -> None:
    async with running(server) as runner, asyncio.TaskGroup() as tasks:
        result = tasks.create_task(runner({"result": 1}, SESSION))
        await asyncio.sleep(0)  # it asks before there is anybody
        await server.start()
    assert result.result() == 1


async def test_a_server_that_stays_away_fails_the_attempt(server: Server) -> None:
    async with running(server, away_s=0.3) as runner:
        with pytest.raises(RemoteAgentLostError, match=r"unavailable for 0\.3 s"):
            await runner({}, SESSION)


async def test_a_busy_server_is_asked_again(
    server: Server, gateway: ScriptedGateway, client: Client
) -> None:
    await server.start()
    async with running(server) as runner:
        summary = await rollout(client, [{"result": 1}] * 4, runner=runner, n=4)
    assert (summary.counts, summary.mean_reward) == ({"COMPLETED": 16}, 1.0)


async def test_an_ended_run_is_collected_from_a_server_that_was_killed_and_remembers(
    server: Server, tmp_path: Path
) -> None:
    await server.start("--remember")
    async with running(server) as runner, asyncio.TaskGroup() as tasks:
        go = tmp_path / "go"
        result = tasks.create_task(runner({"wait_for": str(go), "result": 0.5}, SESSION))
        await server.logged("began 5e55")
        await server.kill()
        kept = {"status": "completed", "result": 0.75}  # it ended between two polls
        (tmp_path / "5e55").write_text(json.dumps(kept))
        await server.start("--remember")
    assert result.result() == 0.75
    assert server.log().count("began 5e55") == 1


async def test_runs_of_a_killed_server_are_lost_and_tried_again_in_new_sessions(
    server: Server, gateway: ScriptedGateway, client: Client, tmp_path: Path
) -> None:
    await server.start()
    go = tmp_path / "go"
    async with running(server) as runner, asyncio.TaskGroup() as tasks:
        sample = {"wait_for": str(go), "result": 1}
        retries = Retries(tries=2, delay_s=0.01)
        work = rollout(client, [sample], runner=runner, n=3, retries=retries)
        result = tasks.create_task(work)
        await server.logged("began", 3)
        await server.kill()
        go.touch()
        await server.start()
    summary = result.result()
    assert (summary.counts, summary.retries) == ({"COMPLETED": 3}, 3)
    by_id = {f"5e55{at:04x}": request for at, request in enumerate(gateway.opened, 1)}
    lost = [by_id[closed.session_id] for closed in gateway.closed if closed.superseded]
    counted = [by_id[closed.session_id] for closed in gateway.closed if not closed.superseded]
    assert sorted(request.sample_index for request in lost) == [0, 1, 2]
    assert sorted(request.sample_index for request in counted) == [0, 1, 2]
    assert {request.metadata["attempt"] for request in counted} == {"2"}


async def test_a_submit_whose_reply_was_lost_is_never_begun_twice_in_one_session(
    server: Server,
) -> None:
    await server.start()
    async with running(server) as runner, asyncio.TaskGroup() as tasks:
        result = tasks.create_task(_error_of(runner({"cut": True}, SESSION)))
        await server.ended()
        await server.start()
    assert isinstance(result.result(), RemoteAgentLostError)
    assert server.log().count("cut 5e55") == 1


async def _error_of(work: Any) -> Exception | None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - it is the result
        return error
    return None


async def test_a_run_that_is_to_end_is_cancelled_on_the_server(
    server: Server, gateway: ScriptedGateway, client: Client, tmp_path: Path
) -> None:
    await server.start()
    async with running(server) as runner, asyncio.TaskGroup() as tasks:
        sample = {"wait_for": str(tmp_path / "never")}
        limits = TimeLimits(grace_s=60)
        rolling = tasks.create_task(rollout(client, [sample], runner=runner, n=1, limits=limits))
        await server.logged("began")
        rolling.cancel()
    assert gateway.closed[0].outcome == session_pb2.SESSION_OUTCOME_ABORTED
    await server.logged("cancelled")
