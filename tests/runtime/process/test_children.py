"""Child processes of a service: started safely beside gRPC, and killed with what they started."""

import asyncio
import sys
from typing import Any

import grpc
import pytest
import uvloop

from rollmesh.runtime.process import start_child

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\nsys.exit(3)"
PARENT = """
import subprocess

child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""
STARTED = 200
"""One in 150 died when uvloop started them."""


async def test_a_program_reads_and_answers_until_its_input_ends() -> None:
    child = await start_child(sys.executable, "-c", ECHO)
    await child.send(b"hello\n")
    assert await child.stdout.readline() == b"HELLO\n"
    assert child.exit_code is None
    child.stdin.write_eof()
    assert await child.stdout.read() == b""
    assert await child.wait() == child.exit_code == 3


async def test_children_of_a_program_are_killed_with_it() -> None:
    child = await start_child(sys.executable, "-c", PARENT)
    assert int(await child.stdout.readline())
    child.kill()
    async with asyncio.timeout(120):
        assert await child.stdout.read() == b""  # its child held the socket too
        assert await child.wait() == -9


def test_a_program_that_has_ended_is_written_to_in_vain() -> None:
    async def written() -> None:
        child = await start_child("/bin/sleep", "600")
        await child.send(b"never read")  # so that its end resets the connection
        child.kill()
        await child.wait()
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await child.send(b"hello\n")

    uvloop.run(written())


async def test_a_program_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await start_child("/no/such/program")


def test_programs_start_in_a_process_that_is_busy_with_grpc() -> None:
    assert uvloop.run(exit_codes(STARTED)) == {0}


async def exit_codes(count: int) -> set[int]:
    """Starts programs while a server of this process is called. Returns their exit codes."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    codes: set[int] = set()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/s/m")

        async def load() -> None:
            while True:
                await call(b"x" * 10_000)

        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(load()) for _ in range(2)]
            for _ in range(count):
                child = await start_child("/bin/true")
                await child.stdout.read()
                codes.add(await child.wait())
            for one in loads:
                one.cancel()
    await server.stop(None)
    return codes
