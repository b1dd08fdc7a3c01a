"""Ctrl-C in the client for programs without an event loop: work ends in order, always."""

import asyncio
import subprocess
import sys
from concurrent.futures import CancelledError

import pytest

from rollmesh.client.sync import LoopThread

_WORK = """
import asyncio, os, signal
from rollmesh.client.sync import LoopThread

thread = LoopThread()
begun = ended = 0

async def work():
    global begun, ended
    begun += 1
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended += 1
"""
_AT_ANY_MOMENT = """
for _ in range(500):
    try:
        thread.run(work())
    except KeyboardInterrupt:
        pass
    assert (begun, ended) == (begun, begun), "left behind"
thread.close()
print(begun)
"""
_AT_THE_END = """
came, tell = os.pipe()
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)

async def done():
    os.kill(os.getpid(), signal.SIGINT)
    os.read(came, 1)  # the interpreter has it, and will call the handler

seen = 0
for _ in range(500):
    try:
        thread.run(done())
    except KeyboardInterrupt:
        seen += 1
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(seen)
"""
_IMPATIENT = """
async def stubborn():
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass

try:
    thread.run(stubborn())
except KeyboardInterrupt:
    print("free", flush=True)
os._exit(0)
"""
_IN_A_BLOCK = """
from contextlib import asynccontextmanager

left = []

@asynccontextmanager
async def block():
    try:
        yield
    except BaseException as error:
        left.append(type(error).__name__)
        raise

for error in (KeyboardInterrupt, SystemExit):
    try:
        with thread.entered(block()):
            raise error
    except error:
        pass
thread.close()
print(*left)
"""
_OWN_HANDLER = """
class Stop(Exception):
    pass

def stop(*_):
    raise Stop

signal.signal(signal.SIGINT, stop)

async def later():
    await asyncio.sleep(0)
    while not waiting.is_set():
        await asyncio.sleep(0)
    await work()

import threading
from concurrent import futures
from rollmesh.client import sync
waiting, wait = threading.Event(), sync.wait

def noted(*arguments):
    waiting.set()
    return wait(*arguments)

sync.wait = noted
try:
    thread.run(later())
except Stop:
    print(begun, ended, signal.getsignal(signal.SIGINT) is stop)
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(_AT_ANY_MOMENT, "500", id="work ends before the interrupt is raised"),
        pytest.param(_AT_THE_END, "500", id="an interrupt of what just ended is not lost"),
        pytest.param(_IMPATIENT, "free", id="a second one waits for nothing"),
        pytest.param(
            _IN_A_BLOCK, "KeyboardInterrupt SystemExit", id="one in a block leaves its context"
        ),
        pytest.param(_OWN_HANDLER, "1 1 True", id="a handler of the caller's own is kept"),
    ],
)
def test_an_interrupt(program: str, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _WORK + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, said), run.stderr


class Dying:
    """A context that somebody ends while it is entered, or while it is open."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.left: list[object] = []

    async def __aenter__(self) -> "Dying":
        task = asyncio.current_task()
        assert task is not None
        if self._at == "entry":
            task.cancel()
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(task.cancel)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.left.append(error[0])


@pytest.mark.parametrize("at", ["entry", "open"])
def test_a_context_whose_task_is_ended_leaves_nobody_waiting(at: str) -> None:
    thread, scope = LoopThread(), Dying(at)
    with pytest.raises(CancelledError), thread.entered(scope):
        pass
    thread.close()
    assert scope.left == ([] if at == "entry" else [asyncio.CancelledError])
