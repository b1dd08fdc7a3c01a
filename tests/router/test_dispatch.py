"""A gateway's leases over the wire: the messages of a `Dispatch` stream, and its waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from rollmesh.internal.v1 import leases_pb2, leases_pb2_grpc
from rollmesh.mesh import LeaseClient
from rollmesh.router import Engine, RouterConfig, RouterService, Target
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EnginesBusyError,
    InvalidFieldError,
    NoEngineError,
    OverloadedError,
    RemoteError,
)
from rollmesh.runtime.rpc import Context, RpcInterceptor, open_channel, read_stream
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.waiting import until


class NotingRouter(RouterService, leases_pb2_grpc.LeaseServiceServicer):
    """A router that notes what arrives on streams of leases."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(RouterConfig(data_dir=data_dir))
        self.messages: list[leases_pb2.DispatchRequest] = []
        self.address = ""
        self.released = asyncio.Event()

    async def Dispatch(
        self, request_iterator: AsyncIterator[leases_pb2.DispatchRequest], context: Context
    ) -> AsyncIterator[leases_pb2.DispatchResponse]:
        async def noted() -> AsyncIterator[leases_pb2.DispatchRequest]:
            async for request in request_iterator:
                yield request
                if not request.HasField("ping") or request.releases:
                    self.messages.append(request)  # it has been dealt with
                if request.releases:
                    self.released.set()

        async for response in self.dispatch.Dispatch(noted(), context):
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
    leases_pb2_grpc.add_LeaseServiceServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    async with router.running(router.address):
        await server.start()
        try:
            yield router
        finally:
            await server.stop(0)


async def test_each_turn_of_a_busy_gateway_costs_one_message(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router:
        async with LeaseClient(router.address, "g") as leases:
            for _ in range(20):
                async with leases.lease(session_id="s", deadline_ms=60_000):
                    pass
            async with leases.lease(session_id="s", deadline_ms=60_000):
                hello, *messages = router.messages
        assert hello.HasField("hello")
        assert all(message.HasField("acquire") for message in messages)
        assert [len(message.releases) for message in messages] == [0] + [1] * (len(messages) - 1)
        assert len(messages) >= 20


async def test_leases_that_end_together_share_one_message(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        async with AsyncExitStack() as stack:
            for number in range(10):
                lease = leases.lease(session_id=f"s{number}", deadline_ms=60_000)
                await stack.enter_async_context(lease)
            assert router.leases == 10
        async with asyncio.timeout(60):
            await router.released.wait()
        assert router.leases == 0
        assert [len(message.releases) for message in router.messages if message.releases] == [10]


async def find_fault(leases: LeaseClient, held: list[str]) -> None:
    async with leases.lease(session_id="s", deadline_ms=60_000) as grant:
        held.append(grant.engine_id)
        raise EngineFaultError("it lies; " * 100)


async def test_a_faulty_engine_is_given_back_with_its_fault(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        router.table.add_engine(Engine("b", "127.0.0.1:8", "policy", 64))
        held: list[str] = []
        with pytest.raises(EngineFaultError):
            await find_fault(leases, held)
        (faulty,) = held
        async with leases.lease(session_id="s", deadline_ms=60_000) as other:
            assert other.engine_id != faulty
        assert router.table.engines[faulty].fault == ("it lies; " * 100)[:500]
        assert router.table.engines[faulty].leases == 0


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (leases_pb2.DispatchRequest(), "part"),
        (leases_pb2.DispatchRequest(hello=leases_pb2.DispatchHello()), "hello"),
    ],
)
async def test_an_empty_message_and_a_second_hello_are_refused(
    tmp_path: Path, message: leases_pb2.DispatchRequest, field: str
) -> None:
    async def requests() -> AsyncIterator[leases_pb2.DispatchRequest]:
        yield leases_pb2.DispatchRequest(hello=leases_pb2.DispatchHello())
        yield message

    async with noting_router(tmp_path) as router, open_channel(router.address) as channel:
        call = leases_pb2_grpc.LeaseServiceStub(channel).Dispatch(requests(), timeout=60)
        responses = aiter(read_stream(call))
        assert (await anext(responses)).HasField("welcome")
        with pytest.raises(InvalidFieldError) as caught:
            await anext(responses)
    assert caught.value.field == field


async def test_a_request_waits_in_the_router_and_is_sent_once(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        router.table.add_engine(Engine("a", "127.0.0.1:9", "policy", 1))
        order: list[str] = []

        async def turn(session_id: str) -> None:
            async with leases.lease(session_id=session_id, deadline_ms=60_000):
                order.append(session_id)

        async with asyncio.TaskGroup() as tasks:
            async with leases.lease(session_id="first", deadline_ms=60_000):
                for session_id in ("s", "s", "t"):
                    tasks.create_task(turn(session_id))
                    expected = len(order) + router.table.waiting + 1
                    await until(lambda: router.table.waiting >= expected)  # noqa: B023
                assert router.table.waiting == 3
        assert order == ["s", "t", "s"]  # a session's second request waits for the other session
        asked = [message.acquire.session_id for message in router.messages if message.acquire]
        assert [one for one in asked if one] == ["first", "s", "s", "t"]
        await until(lambda: router.leases == 0)


async def test_a_cancelled_request_leaves_the_queue(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        router.table.remove_engine("a")

        async def wait() -> None:
            async with leases.lease(session_id="s", deadline_ms=60_000):
                pass

        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(wait())
            await until(lambda: router.table.waiting == 1)
            waiting.cancel()
            await until(lambda: router.table.waiting == 0)
        router.table.add_engine(Engine("a", "127.0.0.1:9", "policy", 1))
        async with leases.lease(session_id="t", deadline_ms=60_000) as grant:
            assert grant.engine_id == "a"


async def test_an_expired_wait_has_a_reason_and_a_retry_delay(tmp_path: Path) -> None:
    refused = "rollmesh_router_queue_refusals_total", {"reason": "deadline"}
    before = REGISTRY.get_sample_value(*refused)
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        router.table.add_engine(Engine("a", "127.0.0.1:9", "policy", 1))
        async with leases.lease(session_id="s", deadline_ms=60_000):
            with pytest.raises(EnginesBusyError, match="all 1 engines are full") as busy:
                async with leases.lease(session_id="t", deadline_ms=50):
                    pass
            router.table.remove_engine("a")
            with pytest.raises(NoEngineError, match="none of 0 engines") as none:
                async with leases.lease(session_id="t", deadline_ms=50):
                    pass
            assert REGISTRY.get_sample_value(*refused) == (before or 0) + 2
        assert (busy.value.retry_delay_ms or 0) >= 1000
        assert (none.value.retry_delay_ms or 0) >= 1000
        assert router.table.waiting == 0


async def test_gateways_hear_which_versions_engines_may_have(tmp_path: Path) -> None:
    async with noting_router(tmp_path) as router:
        router.table.fleet.aim("policy", Target(3, "push"), None)
        router.table.fleet.aim("other", Target(9, "push"), None)
        async with LeaseClient(router.address, "g", model="policy") as leases:
            await until(lambda: leases.offered.of("policy").newest == 3)
            router.table.fleet.aim("policy", Target(3, "push"), Target(4, "next"))
            await until(lambda: leases.offered.of("policy").newest == 4)
            epoch = leases.offered.of("policy").epoch
            router.table.fleet.aim("policy", None, None)
            await until(lambda: leases.offered.of("policy").newest is None)
            assert leases.offered.of("policy").epoch > epoch
            assert leases.offered.of("other").newest is None


async def lose(leases: LeaseClient, error: Exception) -> None:
    async with leases.lease(session_id="s", deadline_ms=60_000):
        raise error


@pytest.mark.parametrize(
    ("error", "opens"),
    [
        pytest.param(EngineDeadError("it died"), True, id="dead"),
        pytest.param(RemoteError("connection refused", "UNAVAILABLE"), True, id="unreachable"),
        pytest.param(RemoteError("slow down", "RESOURCE_EXHAUSTED"), False, id="backpressure"),
        pytest.param(InvalidFieldError("stop", "is wrong"), False, id="a-clients-error"),
        pytest.param(asyncio.CancelledError(), False, id="cancelled"),
    ],
)
async def test_lost_turns_alone_open_the_circuit_of_their_engine(
    tmp_path: Path, *, error: Exception, opens: bool
) -> None:
    changes = "rollmesh_router_circuit_changes_total"
    states = ("open", "half-open", "closed")
    before = [REGISTRY.get_sample_value(changes, {"state": one}) or 0 for one in states]
    async with noting_router(tmp_path) as router, LeaseClient(router.address, "g") as leases:
        for _ in range(3):
            with pytest.raises(type(error)):
                await lose(leases, error)
        await until(lambda: router.leases == 0)
        assert len(router.table.fleet.opened) == int(opens)
        async with leases.lease(session_id="s", deadline_ms=60_000):  # a probe, after a second
            pass
        await until(lambda: router.leases == 0)
        assert router.table.engines["a"].circuit.state == router_pb2.CIRCUIT_STATE_CLOSED
    after = [REGISTRY.get_sample_value(changes, {"state": one}) or 0 for one in states]
    assert [now - was for now, was in zip(after, before, strict=True)] == [int(opens)] * 3


async def test_a_gateway_that_does_not_read_loses_its_stream_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.router.dispatch._MAX_UNREAD", 4)
    read = asyncio.Event()

    async def requests() -> AsyncIterator[leases_pb2.DispatchRequest]:
        yield leases_pb2.DispatchRequest(hello=leases_pb2.DispatchHello())
        for at in range(100):
            acquire = leases_pb2.AcquireLease(lease_id=str(at), session_id=f"s{at}")
            yield leases_pb2.DispatchRequest(acquire=acquire)
            await read.wait()

    async with noting_router(tmp_path) as router, LeaseClient(router.address, "h") as leases:
        async with leases.lease(session_id="other", deadline_ms=60_000):
            slow = router.dispatch.Dispatch(requests(), None)  # type: ignore[arg-type]
            responses = aiter(slow)
            assert (await anext(responses)).HasField("welcome")
            await anext(responses)
            assert router.leases == 2
            read.set()
            await until(lambda: router.leases == 1)  # the other's
            with pytest.raises(OverloadedError, match="unread"):
                await anext(responses)
        async with leases.lease(session_id="other", deadline_ms=60_000):
            assert router.leases == 1
