"""What the processes of services do with freed memory."""

import platform
import subprocess
import sys

import pytest

MESSAGES = """
import resource
from rollmesh.runtime.process.host import keep_freed_memory
{call}
def cleared():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    messages = [b"x" * 6_000_000 for _ in range(6)]
    del messages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
cleared()
print(sum(cleared() for _ in range(10)))
"""


def pages(call: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MESSAGES.format(call=call)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_messages_of_megabytes_use_the_memory_of_those_before() -> None:
    assert pages("keep_freed_memory()") < pages("") / 10


LEFT = """
import asyncio, resource
from rollmesh.runtime.process import host
host._PAUSE_S = 0.0
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
async def main():
    pieces = [bytearray(2000) for _ in range(100_000)]
    kept = pieces[::50]
    before = resident()
    pieces.clear()
    freed = host.FreedMemory()
    freed.served({size})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.get_running_loop().shutdown_default_executor()
    print(before - resident())
asyncio.run(main())
"""


def given_back(size: int) -> int:
    """Bytes that leave the process, of 200 MB that were freed here and there."""
    code = LEFT.format(size=size)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_memory_of_large_requests_is_returned_and_small_ones_cost_nothing() -> None:
    assert given_back(4 * 1024 * 1024) > 100_000_000
    assert given_back(1000) < 50_000_000
