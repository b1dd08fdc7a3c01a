"""What a gateway's leases cost: the messages of one `Dispatch` stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rollmesh.mesh.leases import LeaseClient
from rollmesh.router.config import RouterConfig
from rollmesh.router.leases import Engine, LeaseTable
from rollmesh.router.members import Members
from rollmesh.router.servicer import RouterServicer
from rollmesh.router.weights.models import Models
from rollmesh.runtime.errors import EngineFaultError, InvalidFieldError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.runtime.rpc.interceptors import Context, RpcInterceptor
from rollmesh.v1 import router_pb2, router_pb2_grpc


class NotingRouter(RouterServicer):
    """A router that notes what arrives on streams of leases."""

    def __init__(self, data_dir: Path) -> None:
        self.table = LeaseTable()
        members = Members(10_000)
        models = Models(self.table, members, data_dir)
        super().__init__(self.table, members, models, RouterConfig(data_dir=data_dir))
        self.messages: list[router_pb2.DispatchRequest] = []
        self.address = ""
        self.released = asyncio.Event()

    async def Dispatch(
        self, request_iterator: AsyncIterator[router_pb2.DispatchRequest], context: Context
    ) -> AsyncIterator[router_pb2.DispatchResponse]:
        async def noted() -> AsyncIterator[router_pb2.DispatchRequest]:
            async for request in request_iterator:
                yield request
                self.messages.append(request)  # it has been dealt with
                if request.releases:
                    self.released.set()

        async for response in super().Dispatch(noted(), context):
            yield response

    @property
    def leases(self) -> int:
        return sum(engine.leases for engine in self.table.engines.values())


@asynccontextmanager
async def noting_router(data_dir: Path) -> AsyncIterator[NotingRouter]:
    router = NotingRouter(data_dir)
    router.table.add_engine(Engine("a", "127.0.0.1:9", "policy", 64))
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield router
    finally:
        await server.stop(0)


async def test_each_turn_of_a_busy_gateway_costs_one_message(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router:
        async with LeaseClient(router.address, "g") as leases:
            for _ in range(20):
                async with leases.lease(session_id="s", deadline_ms=20_000):
                    pass
            async with leases.lease(session_id="s", deadline_ms=20_000):
                hello, *messages = router.messages
        assert hello.HasField("hello")
        assert all(message.HasField("acquire") for message in messages)
        assert [len(message.releases) for message in messages] == [0] + [1] * (len(messages) - 1)
        assert len(messages) >= 20


async def test_leases_that_end_together_share_one_message(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        async with AsyncExitStack() as stack:
            for number in range(10):
                lease = leases.lease(session_id=f"s{number}", deadline_ms=20_000)
                await stack.enter_async_context(lease)
            assert router.leases == 10
        async with asyncio.timeout(60):
            await router.released.wait()
        assert router.leases == 0
        assert [len(message.releases) for message in router.messages if message.releases] == [10]


async def find_fault(leases: LeaseClient, held: list[str]) -> None:
    async with leases.lease(session_id="s", deadline_ms=20_000) as grant:
        held.append(grant.engine_id)
        raise EngineFaultError("it lies")


async def test_a_faulty_engine_is_given_back_with_its_fault(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        router.table.add_engine(Engine("b", "127.0.0.1:8", "policy", 64))
        held: list[str] = []
        with pytest.raises(EngineFaultError):
            await find_fault(leases, held)
        (faulty,) = held
        async with leases.lease(session_id="s", deadline_ms=20_000) as other:
            assert other.engine_id != faulty
        assert router.table.engines[faulty].fault == "it lies"
        assert router.table.engines[faulty].leases == 0


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (router_pb2.DispatchRequest(), "part"),
        (router_pb2.DispatchRequest(hello=router_pb2.DispatchHello()), "hello"),
    ],
)
async def test_a_message_that_says_nothing_new_is_refused(
    tmp_path: Path, message: router_pb2.DispatchRequest, field: str
) -> None:
    async def requests() -> AsyncIterator[router_pb2.DispatchRequest]:
        yield router_pb2.DispatchRequest(hello=router_pb2.DispatchHello())
        yield message

    async with noting_router(tmp_path) as router, open_channel(router.address) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Dispatch(requests(), timeout=60)
        with pytest.raises(InvalidFieldError) as caught, typed_errors():
            await call.read()
    assert caught.value.field == field
