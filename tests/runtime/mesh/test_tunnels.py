"""A tunnel whose call is cut at the worst moments, without a network between its ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvloop

from rollmesh.internal.v1 import tunnels_pb2
from rollmesh.mesh.tunnels import Tunnel
from tests.waiting import until

WINDOW = 1024 * 1024
DATA = bytes(range(251)) * 16_000  # about 4 MB, without a period of a chunk


@asynccontextmanager
async def call(
    near: Tunnel, far: Tunnel, held: tuple[Any, Any] = ((), ())
) -> AsyncIterator[dict[str, int]]:
    """Carries a tunnel over a call, whose ends hold `held`. Yields the bytes that came far."""
    came = {"far": 0}

    async def messages(of: asyncio.Queue[tunnels_pb2.TunnelFrame]) -> AsyncIterator[Any]:
        while True:
            frame = await of.get()
            came["far"] += len(frame.data) if of is outward else 0
            yield tunnels_pb2.AttachResponse(frame=frame)

    outward: asyncio.Queue[tunnels_pb2.TunnelFrame] = asyncio.Queue()
    inward: asyncio.Queue[tunnels_pb2.TunnelFrame] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(near.run(outward.put, messages(inward), held[1])),
        asyncio.ensure_future(far.run(inward.put, messages(outward), held[0])),
    ]
    try:
        yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Outlet:
    """What the far end connects to: pairs of sockets, of which a test has the other ends."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.readers: list[asyncio.StreamReader] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=far, limit=4096)
        self.readers.append(reader)
        self.writers.append(writer)
        self._stack.push_async_callback(writer.wait_closed)
        self._stack.callback(writer.close)
        return await asyncio.open_connection(sock=near)


async def arrived(came: dict[str, int], size: int) -> None:
    await until(lambda: came["far"] >= size)


async def test_bytes_that_were_received_and_not_passed_on_are_not_sent_again() -> None:
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        outlet = Outlet(stack)
        near = await stack.enter_async_context(Tunnel().kept())
        far = await stack.enter_async_context(Tunnel(outlet.connect).kept())
        connection = near.open()
        assert connection is not None
        async with call(near, far) as came:
            sending = asyncio.ensure_future(connection.send(DATA))
            await arrived(came, WINDOW)  # the window is full, and nobody reads
        held = near.held(), far.held()
        async with call(near, far, held):
            read = await outlet.readers[0].readexactly(len(DATA))
            await sending
            await near.close(connection)
            assert read == DATA


async def test_a_window_that_was_emptied_between_two_calls_is_used_again() -> None:
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        outlet = Outlet(stack)
        near = await stack.enter_async_context(Tunnel().kept())
        far = await stack.enter_async_context(Tunnel(outlet.connect).kept())
        connection = near.open()
        assert connection is not None
        async with call(near, far):
            await connection.send(b"begin")
            await until(lambda: outlet.writers)
            outlet.writers[0].write(DATA)
            await until(lambda: connection.received == WINDOW)  # and nobody has asked for any
        held = near.held(), far.held()
        read = b""
        while len(read) < WINDOW:  # after both have told
            read += await connection.receive()
        reading = asyncio.ensure_future(connection.receive())
        async with call(near, far, held):
            read += await reading
            while len(read) < len(DATA):
                read += await connection.receive()
            await near.close(connection)
        assert read == DATA


async def test_a_connection_of_a_forgotten_tunnel_does_not_end_its_namesake() -> None:
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        outlet = Outlet(stack)
        far = await stack.enter_async_context(Tunnel(outlet.connect).kept())
        former = await stack.enter_async_context(Tunnel().kept())
        first = former.open()
        assert first is not None
        async with call(former, far) as came:
            await first.send(b"lost")
            await arrived(came, 4)
        far.forget()
        near = await stack.enter_async_context(Tunnel().kept())
        second = near.open()
        assert second is not None
        assert second.number == first.number
        async with call(near, far):
            sending = asyncio.ensure_future(second.send(DATA))
            await until(lambda: len(outlet.readers) == 2)
            read = await outlet.readers[1].readexactly(len(DATA))
            await sending
            await near.close(second)
            assert read == DATA


def test_a_server_that_has_closed_a_connection_ends_that_one_alone() -> None:
    async def closed() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        far.close()
        reader, writer = await asyncio.open_connection(sock=near)
        writer.transport.abort()
        await reader.read()
        return reader, writer

    async def sent() -> None:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            near = await stack.enter_async_context(Tunnel().kept())
            far = await stack.enter_async_context(Tunnel(closed).kept())
            async with call(near, far):
                for _ in range(3):
                    connection = near.open()
                    assert connection is not None
                    await connection.send(b"a request")
                    assert not await connection.receive()
                    await near.close(connection)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as services run
        runner.run(sent())
