"""A tunnel whose call is cut at the worst moments, without a network between its ends."""

import asyncio
import random
import socket
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from rollmesh.internal.v1 import tunnels_pb2
from rollmesh.mesh import Tunnel
from tests.waiting import until

WINDOW = 1024 * 1024
DATA = bytes(range(251)) * 16_000  # about 4 MB, without a period of a chunk


NEVER = 1_000_000


class Link:
    """What a call goes over. It loses all messages about connections after some of each end."""

    def __init__(self, *most: int) -> None:
        self.left = list(most)  # of the near end, and of the far one
        self.is_lossy = asyncio.Event()
        self.is_waiting = asyncio.Event()
        self.is_open = asyncio.Event()
        self.is_open.set()

    def to(self, end: int, queue: asyncio.Queue[tunnels_pb2.TunnelFrame]) -> Any:
        async def write(frame: tunnels_pb2.TunnelFrame) -> None:
            if not self.is_open.is_set():
                self.is_waiting.set()
            await self.is_open.wait()
            self.left[end] -= frame.connection > 0
            if frame.connection and self.left[end] < 0:
                self.is_lossy.set()
            else:
                queue.put_nowait(frame)
                await asyncio.sleep(0)  # others take turns

        return write


@asynccontextmanager
async def call(
    near: Tunnel,
    far: Tunnel,
    held: tuple[Any, Any] = ((), ()),
    link: Link | None = None,
) -> AsyncIterator[dict[str, int]]:
    """Carries a tunnel over a call, whose ends hold `held`. Yields the bytes that came far."""
    came = {"far": 0}
    link = link or Link(NEVER, NEVER)

    async def messages(of: asyncio.Queue[tunnels_pb2.TunnelFrame]) -> AsyncIterator[Any]:
        while True:
            frame = await of.get()
            came["far"] += len(frame.data) if of is outward else 0
            yield tunnels_pb2.AttachResponse(frame=frame)

    outward: asyncio.Queue[tunnels_pb2.TunnelFrame] = asyncio.Queue()
    inward: asyncio.Queue[tunnels_pb2.TunnelFrame] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(near.run(link.to(0, outward), messages(inward), held[1])),
        asyncio.ensure_future(far.run(link.to(1, inward), messages(outward), held[0])),
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


async def test_a_sender_that_leaves_in_the_middle_of_a_write_costs_no_other_connection_bytes() -> (
    None
):
    sent: list[bytes] = []
    is_open, writes = asyncio.Event(), set[asyncio.Task[None]]()

    async def written(frame: tunnels_pb2.TunnelFrame) -> None:
        await is_open.wait()
        sent.append(frame.data)

    async def write(frame: tunnels_pb2.TunnelFrame) -> None:
        """As gRPC: a write goes on without its caller, and another one beside it fails."""
        if any(not one.done() for one in writes):
            raise grpc.aio.BaseError
        writes.add(writing := asyncio.ensure_future(written(frame)))
        await asyncio.shield(writing)

    async def silence() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    is_open.set()
    async with asyncio.timeout(30), Tunnel().kept() as tunnel:
        first, second = tunnel.open(), tunnel.open()
        assert first is not None
        assert second is not None
        running = asyncio.ensure_future(tunnel.run(write, silence()))
        await until(lambda: tunnel.is_up)
        is_open.clear()
        leaving = asyncio.ensure_future(first.send(b"a"))
        await until(lambda: first.sent)
        leaving.cancel()
        await asyncio.wait([leaving])
        sending = asyncio.ensure_future(second.send(b"b"))
        await asyncio.sleep(0.1)
        is_open.set()
        await sending
        assert [one for one in sent if one] == [b"a", b"b"]
        running.cancel()
        await asyncio.wait([running])


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


async def test_a_new_call_finds_the_lost_bytes_before_it_takes_messages() -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        outlet = Outlet(stack)
        near = await stack.enter_async_context(Tunnel().kept())
        far = await stack.enter_async_context(Tunnel(outlet.connect).kept())
        first = near.open()
        assert first is not None
        former, link = Link(NEVER, NEVER), Link(NEVER, NEVER)
        async with call(near, far, link=former):
            await first.send(b"begin")
            await until(lambda: outlet.writers)
            outlet.writers[0].write(DATA[: WINDOW // 2])
            await until(lambda: first.received == WINDOW // 2)
            former.is_open.clear()  # a message is being written when the call ends
            outlet.writers[0].write(DATA[WINDOW // 2 : WINDOW])
            await former.is_waiting.wait()
        held = near.held(), far.held()
        read = b""
        while len(read) < WINDOW // 2:
            read += await first.receive()
        reading = asyncio.ensure_future(first.receive())
        second = near.open()
        assert second is not None
        await second.send(b"a request")
        async with call(near, far, held, link):
            await until(lambda: link.left[0] <= NEVER - 2)
            former.is_open.set()
            read += await reading
            while len(read) < WINDOW:
                read += await first.receive()
            await until(lambda: len(outlet.readers) == 2)
            assert await outlet.readers[1].readexactly(9) == b"a request"
            outlet.writers[1].write(b"an answer")
            assert await second.receive() == b"an answer"
        assert read == DATA[:WINDOW]


def no_connections(*ends: Tunnel) -> bool:
    return not any(len(one) for one in ends)


async def test_calls_cut_after_any_message_lose_and_double_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rollmesh.mesh.tunnels._CHUNK_BYTES", 7)
    monkeypatch.setattr("rollmesh.mesh.tunnels._WINDOW_BYTES", 40)
    request, answer, served = b"", b"", []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await reader.readexactly(len(request)))
        writer.write(answer)
        writer.close()

    async def ask(near: Tunnel, turns: int) -> bytes:
        for _ in range(turns):
            await asyncio.sleep(0)
        connection = near.open()
        assert connection is not None
        await connection.send(request)
        got = b""
        while len(got) < len(answer) and (part := await connection.receive()):
            got += part
        await near.close(connection)
        return got

    path = str(tmp_path / "socket")
    async with asyncio.timeout(240), await asyncio.start_unix_server(serve, path):
        for seed in range(200):
            chance = random.Random(seed)
            request, answer = (chance.randbytes(chance.choice((1, 9, 100))) for _ in range(2))
            served.clear()
            async with AsyncExitStack() as stack:
                near = await stack.enter_async_context(Tunnel().kept())
                connect = partial(asyncio.open_unix_connection, path)
                far = await stack.enter_async_context(Tunnel(connect).kept())
                asking = asyncio.gather(*(ask(near, chance.randrange(99)) for _ in range(3)))
                held: tuple[Any, Any] = ((), ())
                for _ in range(chance.randrange(1, 5)):
                    link = Link(chance.randrange(40), chance.randrange(40))
                    async with call(near, far, held, link):
                        is_lossy = asyncio.ensure_future(link.is_lossy.wait())
                        either: list[asyncio.Future[Any]] = [asking, is_lossy]
                        await asyncio.wait(either, return_when=FIRST_COMPLETED)
                        is_lossy.cancel()
                        for _ in range(chance.randrange(30)):
                            await asyncio.sleep(0)
                    held = near.held(), far.held()
                async with call(near, far, held):
                    assert await asking == [answer] * 3, seed
                    assert served == [request] * 3, seed
                    await until(partial(no_connections, near, far))


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
