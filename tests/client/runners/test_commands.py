import asyncio
import errno
import json
import os
import signal
import stat
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.client import (
    Client,
    CommandError,
    CommandLostError,
    CommandRunner,
    Session,
    rollout,
)
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import session_pb2
from tests.sidecar.scripted_gateway import ScriptedGateway
from tests.waiting import until

SESSION = Session("5e55", "rmk-5e55-secret", "http://127.0.0.1:1/sessions/rmk-5e55-secret/v1")


def python(code: str, *arguments: str, **settings: Any) -> CommandRunner:
    return CommandRunner(argv=[sys.executable, "-c", code, *arguments], **settings)


async def appears(path: Path) -> str:
    """Waits until a file has a whole line."""
    await until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().strip()


async def gone(*pids: int) -> None:
    await until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_an_agent_finds_url_key_model_and_sample_in_its_environment() -> None:
    code = """
import json, os, sys
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ROLLMESH_SESSION_ID", "MORE")
with open(os.environ["ROLLMESH_SAMPLE_FILE"]) as file:
    in_file = json.load(file)
print(json.dumps([[os.environ[n] for n in names], json.load(sys.stdin), in_file, sys.argv[1:]]))
"""
    runner = python(
        code, "{base_url}", "{model}/{session_id}", "${keep}", model="m", env={"MORE": "x"}
    )
    environment, on_stdin, in_file, arguments = await runner({"q": "é"}, SESSION)
    assert environment == [SESSION.base_url, SESSION.api_key, "m", "5e55", "x"]
    assert on_stdin == in_file == {"q": "é"}
    assert arguments == [SESSION.keyless_url, "m/5e55", "${keep}"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        pytest.param("print('log'); print('0.5')", 0.5, id="last line"),
        pytest.param("print('{\"reward\": 1}\\n\\n')", {"reward": 1}, id="object"),
        pytest.param("print('0.5'); print('done')", None, id="no JSON"),
        pytest.param("pass", None, id="silence"),
        pytest.param(
            "import os; open(os.environ['ROLLMESH_RESULT_FILE'], 'w').write('2'); print('1')",
            2,
            id="file wins",
        ),
    ],
)
async def test_the_result_is_the_file_or_the_last_line_of_output(code: str, result: object) -> None:
    assert await python(code)(None, SESSION) == result


@pytest.mark.parametrize(
    ("runner", "text"),
    [
        pytest.param(python("raise ValueError('confused')"), "ended with 1.*confused", id="raises"),
        pytest.param(
            python("import os; os.kill(os.getpid(), 9)"),
            "ended by SIGKILL",
            id="killed from outside",
        ),
        pytest.param(
            python("import os; os.kill(os.getpid(), 40)"), "ended by signal 40$", id="no name"
        ),
        pytest.param(python("print('only out'); exit(3)"), "with 3: only out", id="output alone"),
        pytest.param(CommandRunner(argv=["/no/such/agent"]), "did not start", id="not there"),
        pytest.param(
            python("import os; open(os.environ['ROLLMESH_RESULT_FILE'], 'w').write('x')"),
            "result file is not JSON",
            id="bad result",
        ),
        pytest.param(
            python("print('[' + '1,' * 9999 + '1]')", max_output_bytes=1000),
            "more than 1000 bytes; write the result to the file",
            id="long line",
        ),
    ],
)
async def test_the_error_of_a_failed_command_has_the_end_of_its_output(
    runner: CommandRunner, text: str
) -> None:
    with pytest.raises(CommandError, match=f"(?s){text}"):
        await runner(None, SESSION)


async def test_a_command_that_finds_no_room_to_start_is_lost_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe, made = os.pipe, list[int]()

    def full() -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.extend(pipe())
        return made[0], made[1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", full)
        with pytest.raises(CommandLostError, match=r"did not start: .*Too many open files"):
            await python("")(None, SESSION)
    await until(lambda: not any(map(_is_pipe, made)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(CommandLostError, match=r"did not start: .*No such file"):
        await python("")(None, SESSION)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


async def test_a_sample_that_is_not_json_is_named_and_can_be_encoded() -> None:
    with pytest.raises(InvalidFieldError, match="sample"):
        await python("")({1, 2}, SESSION)
    runner = python("import sys; print(sys.stdin.read())", encode=sorted)
    assert await runner({2, 1}, SESSION) == [1, 2]


async def test_a_flood_of_output_is_read_and_forgotten() -> None:
    code = """
import sys
for _ in range(2000):
    sys.stdout.write("x" * 10_000 + "\\n"); sys.stderr.write("y" * 10_000)
print("0.25")
"""
    runner = python(code)
    tracemalloc.start()
    try:
        assert await runner(None, SESSION) == 0.25
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 15_000_000  # of 40 MB


FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
with open({path!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}\\n")
{then}
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def family(path: Path, then: str, child: str = DEAF, **settings: Any) -> CommandRunner:
    return python(FAMILY.format(path=str(path), then=then, child=child), **settings)


async def test_processes_left_by_a_command_are_killed_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    assert await family(path, "print('1.0')")(None, SESSION) == 1.0
    await gone(*map(int, path.read_text().split()))


async def test_a_process_outside_of_the_group_that_holds_the_output_is_not_waited_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pids"
    then = "while os.getpgid(child.pid) == os.getpgid(0): time.sleep(0.01)\nprint('1.0')"
    leaves = "import os, signal; os.setsid(); signal.pause()"
    async with asyncio.timeout(60):
        assert await family(path, then, child=leaves)(None, SESSION) == 1.0
    _, escaped = map(int, path.read_text().split())
    os.kill(escaped, signal.SIGKILL)


async def test_an_agent_that_is_to_end_is_asked_first_then_killed_with_its_children(
    tmp_path: Path,
) -> None:
    path, listens, asked = (tmp_path / name for name in ("pids", "listens", "asked"))
    then = f"""
def end(*_):
    with open({str(asked)!r}, "w") as file:
        file.write("asked\\n")
signal.signal(signal.SIGTERM, end)
with open({str(listens)!r}, "w") as file:
    file.write("listens\\n")
while True:
    signal.pause()
"""
    runner = family(path, then, grace_s=600)
    running = asyncio.ensure_future(runner(None, SESSION))
    await appears(listens)
    running.cancel()
    await appears(asked)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(*map(int, path.read_text().split()))


async def test_an_agent_over_its_time_is_ended_and_its_session_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    runner = python("import signal; signal.pause()")
    summary = await rollout(client, [None], runner=runner, n=1, timeout_s=0.1)
    assert (summary.counts, summary.errors) == ({"ABORTED": 1}, {"AgentTimeLimitError": 1})
    assert gateway.closed[0].outcome == session_pb2.SESSION_OUTCOME_ABORTED


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda pids: pids[:1], id="the agent"),
        pytest.param(lambda pids: pids, id="the agent and its child"),
    ],
)
async def test_a_killed_agent_fails_its_own_session_alone_and_leaves_nothing(
    gateway: ScriptedGateway,
    client: Client,
    tmp_path: Path,
    choose: Callable[[list[int]], list[int]],
) -> None:
    waits = family(tmp_path / "victim", "signal.pause()")
    quick = python("print('1.0')")

    async def run(sample: str, session: Session) -> Any:
        return await (waits if sample == "victim" else quick)(sample, session)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rollout(client, ["victim", "other"], runner=run, n=1))
        pids = list(map(int, (await appears(tmp_path / "victim")).split()))
        for pid in choose(pids):
            os.kill(pid, signal.SIGKILL)
    summary = running.result()
    assert summary.counts == {"LOST": 1, "COMPLETED": 1}
    assert summary.errors == {"CommandLostError": 1}
    await gone(*pids)


async def test_a_cancelled_rollout_leaves_no_process_and_no_open_session(
    gateway: ScriptedGateway, client: Client, tmp_path: Path
) -> None:
    runner = family(tmp_path / "pids", "signal.pause()")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rollout(client, [None], runner=runner, n=1))
        pids = (await appears(tmp_path / "pids")).split()
        running.cancel()
    await gone(*map(int, pids))
    assert [closed.outcome for closed in gateway.closed] == [session_pb2.SESSION_OUTCOME_ABORTED]


async def test_turn_rewards_of_a_command_reach_the_close(
    gateway: ScriptedGateway, client: Client
) -> None:
    result = {"reward": 1, "turn_rewards": {"chatcmpl-5e550001-3": 0.5, "4": 0.25}}
    await rollout(client, [None], runner=python(f"print({json.dumps(result)!r})"), n=1)
    rewards = gateway.closed[0].rewards
    assert (rewards.reward, dict(rewards.turn_rewards)) == (1.0, {3: 0.5, 4: 0.25})


RUNNER = """
import asyncio, sys
from rollmesh.client import Session
from rollmesh.client.runners import CommandRunner

runner = CommandRunner(argv=[sys.executable, "-c", *sys.argv[1:]])
session = Session("5e55", "rmk-5e55-secret", "http://127.0.0.1:1/sessions/rmk-5e55-secret/v1")

async def main():
    await CommandRunner(argv=["true"])(None, session)  # one that ended well is forgotten
    await asyncio.gather(runner(None, session), runner(None, session))

asyncio.run(main())
"""
AGENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(f"{sys.argv[1]}/{os.getpid()}", "w") as file:
    print(os.getpid(), child.pid, file=file)
time.sleep(600)
"""


async def test_agents_and_their_children_die_with_a_killed_runner(
    tmp_path: Path,
) -> None:
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUNNER, AGENT, str(tmp_path)
    )
    await until(lambda: len(list(tmp_path.iterdir())) == 2)
    lines = [await appears(path) for path in tmp_path.iterdir()]
    pids = [int(pid) for line in lines for pid in line.split()]
    reapers = [one for one in psutil.Process(runner.pid).children() if "-I" in one.cmdline()]
    assert len(reapers) == 1
    assert all(_runs(pid) for pid in pids)
    runner.send_signal(signal.SIGKILL)
    await runner.wait()
    await gone(*pids, reapers[0].pid)


FORKS = """
import os, signal, subprocess, sys
from rollmesh.client.reaper import Reaper

def start():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=null, start_new_session=True).pid

reaper, first, second, third = Reaper(), start(), start(), start()
reaper.watch(first)
print(first, second, third, flush=True)
if fork := os.fork():
    os.waitpid(fork, 0)
    os.waitpid(second, 0)
    print("killed", flush=True)
    signal.pause()
else:
    reaper.forget(third)
    reaper.watch(second)
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_fork_of_a_runner_takes_its_own_agents_along_and_no_others() -> None:
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKS, stdout=asyncio.subprocess.PIPE
    )
    assert runner.stdout is not None
    first, second, third = map(int, (await runner.stdout.readline()).split())
    assert await runner.stdout.readline() == b"killed\n"
    assert not _runs(second)
    assert _runs(first)
    runner.kill()
    await runner.wait()
    await gone(first)
    assert _runs(third)
    os.kill(third, signal.SIGKILL)
