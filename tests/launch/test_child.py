"""A process of a mesh is started again when it ends, whatever its children do."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from rollmesh.launch import Child, EndedEarlyError, ProcessSpec
from tests.waiting import until

PROGRAM = """
import subprocess
import sys
import time

out = sys.stdout.fileno()
orphan = subprocess.Popen(["sleep", "600"], stdout=out, start_new_session={apart})
print("ORPHAN", orphan.pid, flush=True)
print('READY {{"port": 1}}', flush=True)
{then}
"""
FOR_EVER = "time.sleep(600)"


class Scripted(Child):
    """A child that runs a program of the test."""

    def __init__(self, program: str, *, grace_ms: int = 0) -> None:
        spec = ProcessSpec("engine-0", "engine", "127.0.0.1:1", (), grace_ms=grace_ms)
        super().__init__(spec, dict(os.environ))
        self.program = program
        self.lines: list[bytes] = []

    def _command(self) -> tuple[str, ...]:
        return sys.executable, "-c", self.program

    @property
    def orphans(self) -> list[psutil.Process]:
        said = [int(line.split()[1]) for line in self.lines if line.startswith(b"ORPHAN")]
        return [psutil.Process(pid) for pid in said if psutil.pid_exists(pid)]


async def started(child: Scripted, times: int) -> None:
    async def is_up() -> bool:
        return child.lines.count(b'READY {"port": 1}\n') == times

    await until(is_up)


@pytest.mark.parametrize("apart", [False, True], ids=["in its group", "in another session"])
async def test_a_killed_process_is_started_again_while_its_child_holds_the_pipe(
    apart: bool,
) -> None:
    child = Scripted(PROGRAM.format(apart=apart, then=FOR_EVER))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        await started(child, 1)
        first = child.orphans
        assert child.process is not None
        child.process.kill()
        await started(child, 2)
        if not apart:  # what left the group is its own: nothing but its parent's death tells it
            assert (await asyncio.to_thread(psutil.wait_procs, first, 60))[1] == []
        await child.stop()
    for orphan in child.orphans:
        orphan.kill()
    assert child.starts == 2


async def test_a_stop_does_not_wait_for_an_orphan() -> None:
    child = Scripted(PROGRAM.format(apart=False, then=FOR_EVER), grace_ms=3_600_000)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        await started(child, 1)
        orphans = child.orphans
        await child.stop()
    assert (await asyncio.to_thread(psutil.wait_procs, orphans, 60))[1] == []


async def test_the_last_lines_of_a_process_are_read() -> None:
    child = Scripted(PROGRAM.format(apart=False, then="print('last words', flush=True)"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        await started(child, 2)
        await child.stop()
    assert b"last words\n" in child.lines


class Sleeping(Scripted):
    """A child that starts quickly."""

    def _command(self) -> tuple[str, ...]:
        return "sleep", "600"


async def test_a_stop_leaves_the_exit_code_of_a_killed_process_to_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for turn in range(200):  # the process ends at another moment of the stop each time
        child = Sleeping("")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child.keep(child.lines.append))
            while child.process is None:  # noqa: ASYNC110 - the very moment of its start
                await asyncio.sleep(0)
            os.kill(child.process.pid, signal.SIGKILL)
            for _ in range(100 * (turn % 50)):
                pass
            await child.stop()
        assert child.process.returncode == -signal.SIGKILL
    # gRPC's poller may tell here that the loop of an earlier test was closed
    told = [one.getMessage() for one in caplog.records if one.name == "asyncio"]
    assert [one for one in told if "PollerCompletionQueue" not in one] == []


LOUD = """
import sys
import time

print("x" * 70_000 + "READY", flush=True)
print("y" * 1_000_000, flush=True)
print("READY", flush=True)
print('READY {"port": ', flush=True)
print("READY [1]", flush=True)
print('READY {"port": "1"}', flush=True)
print("READY " + "[" * 60_000, flush=True)
sys.stdout.buffer.write(b"READY \\xff\\n")
print("short", flush=True)
print('READY {"port": 1}', flush=True)
print("z" * 70_000, end="", flush=True)
time.sleep(600)
"""


async def test_lines_that_cannot_be_read_are_skipped_with_one_line_in_the_log_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = Scripted(LOUD)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        async with asyncio.timeout(60):
            await child.ready.wait()
        await until(lambda: sum("too long" in text for text in caplog.messages) == 3)
        await child.stop()
    assert child.said == {"port": 1}
    assert child.starts == 1
    assert child.lines[-2:] == [b"short\n", b'READY {"port": 1}\n']
    assert max(map(len, child.lines)) <= 65_536
    assert [text.split(":")[0] for text in caplog.messages] == ["line skipped"] * 9


async def test_a_restarted_process_is_not_ready_before_its_ready_line(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    child = Scripted(
        f"""
import pathlib
import time

print("LOADING", flush=True)
while not pathlib.Path({str(gate)!r}).exists():
    time.sleep(0.01)
print('READY {{"port": 1}}', flush=True)
time.sleep(600)
"""
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        gate.touch()
        await started(child, 1)
        assert child.said == {"port": 1}
        gate.unlink()
        assert child.process is not None
        child.process.kill()
        await until(lambda: child.lines.count(b"LOADING\n") == 2)
        assert child.said == {}
        gate.touch()
        await started(child, 2)
        assert child.said == {"port": 1}
        await child.stop()


@pytest.mark.parametrize("yields", range(12))
async def test_a_stop_while_a_process_is_started_ends_it(yields: int) -> None:
    child = Sleeping("")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        for _ in range(yields):  # another moment of the start each time
            await asyncio.sleep(0)
        await child.stop()
    assert child.process is None or child.process.returncode == -signal.SIGTERM
    assert child.starts in {0, 1}


async def test_a_stop_between_two_starts_ends_the_wait_and_starts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = Scripted("print('READY {\"port\": 1}', flush=True)")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        await until(lambda: caplog.messages.count("process ended") == 4)
        await child.stop()
        starts = child.starts
    assert child.starts == starts


class Missing(Scripted):
    """A child whose program may be missing."""

    missing = False

    def _command(self) -> tuple[str, ...]:
        return ("/no/such/program",) if self.missing else super()._command()


async def test_a_process_that_the_system_does_not_start_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = Missing(PROGRAM.format(apart=False, then=FOR_EVER))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep(child.lines.append))
        await started(child, 1)
        child.missing = True
        assert child.process is not None
        child.process.kill()
        await until(lambda: caplog.messages.count("process not started") == 2)
        child.missing = False
        await started(child, 2)
        await child.stop()
    assert child.starts == 2


async def test_a_process_that_the_system_never_started_has_ended_early() -> None:
    child = Missing("")
    child.missing = True
    with pytest.raises(EndedEarlyError, match="engine-0 ended with code 127"):
        await child.keep(child.lines.append)
