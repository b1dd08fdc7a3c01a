"""What the processes of services do with freed memory."""

import platform
import subprocess
import sys

import pytest

MESSAGES = """
import resource
from rollmesh.runtime.memory import keep_freed_memory
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
