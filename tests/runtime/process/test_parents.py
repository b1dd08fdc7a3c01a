"""A child ends with its parent, whichever way the parent ends."""

import asyncio
import os
import sys
import time

import psutil
import pytest

from rollmesh.runtime.process import end_with_parent

PARENT = """
import multiprocessing
import sys
import time

from tests.runtime.process.test_parents import child

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    time.sleep(600)
"""


def child() -> None:
    """Says its id, and waits for ever."""
    end_with_parent()
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    time.sleep(600)


@pytest.mark.parametrize("how", ["kill", "terminate"])
async def test_a_child_ends_with_its_parent(how: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    born = psutil.Process(int(await process.stdout.readline()))
    getattr(process, how)()
    assert (await asyncio.to_thread(psutil.wait_procs, [born], 60))[1] == []
    await process.wait()
