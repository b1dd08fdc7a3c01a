"""A service from start to stop, in this process."""

import asyncio
import ssl
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollmesh.runtime import clock
from rollmesh.runtime.access import write_private
from rollmesh.runtime.errors import OverloadedError, RemoteError, StartingError
from rollmesh.runtime.rpc import (
    Context,
    PortInUseError,
    ServerConfig,
    open_channel,
    serve,
    typed_errors,
)
from rollmesh.v1 import server_pb2, server_pb2_grpc
from tests.runtime.services import (
    KINDS,
    NAME,
    OTHER,
    ScriptedService,
    answer_of,
    ask,
    begin,
    served,
)
from tests.trial_certificates import copy_certificates
from tests.waiting import until

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


def health_of(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def status_of(channel: grpc.aio.Channel, name: str) -> object:
    request = health_pb2.HealthCheckRequest(service=name)
    return (await health_of(channel).Check(request, timeout=60)).status


@asynccontextmanager
async def listening(
    service: ScriptedService, **settings: Any
) -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Event]]:
    """Serves a service that has not started. Yields a channel to it and what stops it."""
    service.address = asyncio.get_running_loop().create_future()
    config, stop = ServerConfig(**settings), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = serve(service, config, announce=lambda _: service.announced.set(), stop=stop)
        group.create_task(serving)
        try:
            async with open_channel(await service.address) as channel:
                yield channel, stop
        finally:
            service.may_start.set()
            stop.set()


@pytest.mark.parametrize("name", ["", NAME, OTHER])
async def test_health_is_not_serving_until_the_service_has_started(name: str) -> None:
    service = ScriptedService()
    async with listening(service) as (channel, _):
        assert await status_of(channel, name) == NOT_SERVING
        service.may_start.set()
        await service.announced.wait()
        assert await status_of(channel, name) == SERVING


@pytest.mark.parametrize("name", ["", NAME, OTHER])
async def test_a_watcher_of_health_sees_start_and_stop_and_does_not_hold_it_up(name: str) -> None:
    service, hour_ms = ScriptedService(), 3_600_000
    async with listening(service, grace_ms=hour_ms) as (channel, stop):
        request = health_pb2.HealthCheckRequest(service=name)
        call = health_of(channel).Watch(request)
        assert (await call.read()).status == NOT_SERVING
        service.may_start.set()
        assert (await call.read()).status == SERVING
        stop.set()
        assert (await call.read()).status == NOT_SERVING
        assert await call.read() == grpc.aio.EOF


async def test_health_is_not_serving_while_calls_finish() -> None:
    service, go_on = ScriptedService(), asyncio.Event()

    async def script(request: bytes, context: Context) -> bytes:
        await go_on.wait()
        return b"finished"

    service.script = script
    service.may_start.set()
    async with listening(service) as (channel, stop):
        watch = health_of(channel).Watch(health_pb2.HealthCheckRequest())
        call = begin(channel)
        assert await call.read() == b"first"
        stop.set()
        while (await watch.read()).status != NOT_SERVING:
            pass
        go_on.set()
        assert await call.read() == b"finished"


async def test_reflection_lists_the_services_if_it_is_on() -> None:
    async with served(ScriptedService(), reflection=True) as (channel, _):
        untyped_channel: Any = channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(untyped_channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        names = {
            service.name
            async for answer in call
            for service in answer.list_services_response.service
        }
    assert names >= {NAME, OTHER, "grpc.health.v1.Health"}


@pytest.mark.parametrize(
    "method", ["reflection.v1alpha.ServerReflection/ServerReflectionInfo", "health.v1.Health/List"]
)
async def test_reflection_is_off_by_default(method: str) -> None:
    async with served(ScriptedService()) as (channel, _):
        # As one message: a stream that is refused while it writes may lose the status in grpc.
        call: Any = channel.unary_unary(f"/grpc.{method}")
        with pytest.raises(RemoteError) as caught, typed_errors():
            await call(b"", timeout=60)
        assert caught.value.code == "UNIMPLEMENTED"


async def test_a_message_of_many_megabytes_passes() -> None:
    async with served(ScriptedService()) as (channel, _):
        assert len(await ask(channel, b"x" * 20_000_000)) == 20_000_000


@pytest.mark.parametrize(("advertise", "seen"), [("", "127.0.0.1:{port}"), ("a:1", "a:1")])
async def test_a_service_learns_how_others_reach_it(advertise: str, seen: str) -> None:
    service = ScriptedService(address=asyncio.get_running_loop().create_future())
    assert service.address is not None
    service.may_start.set()
    async with served(service, advertise=advertise) as (_, bound):
        assert await service.address == seen.format(port=bound.port)


async def test_a_stop_drains_then_lets_calls_finish_then_closes() -> None:
    service = ScriptedService()

    async def until_drained(request: bytes, context: Context) -> bytes:
        await service.drained.wait()
        service.events.append("answered")
        return b"finished"

    service.script = until_drained
    service.may_start.set()
    async with listening(service) as (channel, stop):
        call = begin(channel)
        assert await call.read() == b"first"
        stop.set()
        assert await call.read() == b"finished"
    assert service.events == ["started", "drained", "answered", "closed"]


async def test_a_stop_cancels_a_start(caplog: pytest.LogCaptureFixture) -> None:
    class Starting(ScriptedService):
        @asynccontextmanager
        async def running(self, address: str) -> AsyncIterator[None]:
            self.announced.set()
            try:
                await asyncio.Event().wait()
                yield
            finally:
                self.events.append("unwound")

    service, stop = Starting(), asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        serving = group.create_task(
            serve(service, ServerConfig(), announce=lambda _: None, stop=stop)
        )
        await service.announced.wait()
        stop.set()
        assert await serving is None
    assert service.events == ["unwound"]
    # gRPC's poller may tell here that the loop of an earlier test was closed
    told = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert [one for one in told if "PollerCompletionQueue" not in one] == []


@pytest.mark.parametrize("stops", [False, True], ids=["alone", "with a stop"])
async def test_a_start_that_fails_raises_its_own_error(stops: bool) -> None:
    stop = asyncio.Event()

    class Failing(ScriptedService):
        @asynccontextmanager
        async def running(self, address: str) -> AsyncIterator[None]:
            if stops:
                stop.set()
            raise OverloadedError("no room")
            yield

    with pytest.raises(OverloadedError, match="no room"):
        await serve(Failing(), ServerConfig(), announce=lambda _: None, stop=stop)


async def test_a_stop_at_the_end_of_a_start_stops_a_running_service() -> None:
    service, stop = ScriptedService(), asyncio.Event()
    service.address = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        serving = serve(service, ServerConfig(), announce=lambda _: None, stop=stop)
        group.create_task(serving)
        await service.address
        service.may_start.set()
        stop.set()
    assert service.events in (["started"], ["started", "drained", "closed"])


async def test_drain_and_calls_share_one_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hour_ms = 3_600_000
    passed_ms = 0
    real = clock.monotonic_ms
    monkeypatch.setattr(clock, "monotonic_ms", lambda: real() + passed_ms)

    class Slow(ScriptedService):
        async def drain(self) -> None:
            nonlocal passed_ms
            await super().drain()
            passed_ms = hour_ms

    async def for_ever(request: bytes, context: Context) -> bytes:
        await asyncio.Event().wait()
        return request

    service = Slow(for_ever)
    service.may_start.set()
    async with asyncio.timeout(60), listening(service, grace_ms=hour_ms) as (channel, stop):
        call = begin(channel)
        assert await call.read() == b"first"
        stop.set()
        with pytest.raises(grpc.RpcError):
            await call.read()


async def test_a_drain_that_does_not_end_is_cut_after_the_grace() -> None:
    class Clinging(ScriptedService):
        async def drain(self) -> None:
            await asyncio.Event().wait()

    service = Clinging()
    async with served(service, grace_ms=50) as (channel, _):
        await ask(channel)
    assert service.events == ["started", "closed"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_taken_port_is_refused_by_name(host: str) -> None:
    stop = asyncio.Event()
    async with served(ScriptedService()) as (_, bound):
        config = ServerConfig(host=host, port=bound.port)
        with pytest.raises(PortInUseError, match=f"port.*{bound.port}"):
            await serve(ScriptedService(), config, announce=lambda _: stop.set(), stop=stop)


async def test_a_failure_ends_the_service_and_is_returned() -> None:
    service = ScriptedService()
    service.failure.put_nowait("the model died")
    config, stop = ServerConfig(), asyncio.Event()
    assert await serve(service, config, announce=lambda _: None, stop=stop) == "the model died"
    assert service.events == ["started", "drained", "closed"]


def metrics_at(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


async def test_the_metrics_endpoint_counts_rpcs() -> None:
    service = ScriptedService(name="rollmesh.test.Counted")
    async with served(service, metrics_port=0) as (channel, bound):
        await ask(channel, name=service.name)
        await ask(channel, name=service.name)
        text = await asyncio.to_thread(metrics_at, bound.metrics_port)
    method = 'method="/rollmesh.test.Counted/unary_unary"'
    assert f'rollmesh_rpcs_total{{code="OK",{method}}} 2.0' in text
    assert f"rollmesh_rpc_seconds_count{{{method}}} 2.0" in text


async def test_the_metrics_endpoint_asks_for_the_token_of_its_file(tmp_path: Path) -> None:
    write_private(tmp_path, {"scraper": b"s" * 32})
    settings = {"metrics_port": 0, "metrics_token_file": str(tmp_path / "scraper")}
    async with served(ScriptedService(), **settings) as (_, bound):
        with pytest.raises(HTTPError, match="401"):
            await asyncio.to_thread(metrics_at, bound.metrics_port)


async def test_a_service_with_a_certificate_serves_its_metrics_over_https(tmp_path: Path) -> None:
    copy_certificates(tmp_path / "certs")
    pair = {
        f"tls_{kind}_file": str(tmp_path / "certs" / f"router.{end}")
        for kind, end in (("certificate", "crt"), ("key", "key"))
    }
    settings: dict[str, Any] = {**pair, "metrics_port": 0}
    async with served(ScriptedService(), **settings) as (_, bound):
        with pytest.raises(OSError):  # noqa: PT011 - the connection is closed, or reset
            await asyncio.to_thread(metrics_at, bound.metrics_port)
        trust = ssl.create_default_context(cafile=tmp_path / "certs" / "ca.crt")
        url = f"https://localhost:{bound.metrics_port}/metrics"
        with await asyncio.to_thread(
            urllib.request.urlopen, url, timeout=60, context=trust
        ) as answer:
            assert b"rollmesh_rpcs_total" in answer.read()


async def test_metrics_are_off_unless_asked_for() -> None:
    async with served(ScriptedService()) as (_, bound):
        assert bound.metrics_port is None


@pytest.mark.parametrize("ended", ["deadline", "cancel"])
async def test_a_call_that_its_client_gave_up_is_cancelled_in_the_handler(ended: str) -> None:
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def script(request: bytes, context: Context) -> bytes:
        assert (context.time_remaining() is not None) == (ended == "deadline")
        arrived.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b""

    async with served(ScriptedService(script)) as (channel, _):
        await channel.channel_ready()  # what follows has all of its time
        timeout = 2 if ended == "deadline" else None
        call = begin(channel, kind="unary_unary", timeout=timeout)
        await arrived.wait()
        if ended == "cancel":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            with pytest.raises(RemoteError) as caught, typed_errors():
                await call
            assert caught.value.code == "DEADLINE_EXCEEDED"
        await cancelled.wait()


async def test_a_request_above_the_limit_is_refused_and_later_calls_work() -> None:
    async with served(ScriptedService(), max_request_bytes=1000) as (channel, _):
        with pytest.raises(RemoteError) as caught, typed_errors():
            await ask(channel, b"x" * 1001)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert await ask(channel, b"x" * 1000)


async def test_a_server_describes_itself_while_its_service_starts() -> None:
    async with listening(ScriptedService()) as (channel, _):
        stub: Any = server_pb2_grpc.ServerServiceStub(channel)
        info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=60)
    assert info.service == NAME
    assert info.api_revision >= 1
    assert list(info.capabilities) == [server_pb2.CAPABILITY_SCORING]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_before_the_service_has_started_gets_a_retry_delay(kind: str) -> None:
    service = ScriptedService()
    async with listening(service) as (channel, _):
        for name in service.names:
            call = begin(channel, kind=kind, name=name)
            with pytest.raises(StartingError) as refused, typed_errors(call):
                await answer_of(call, kind)
            assert refused.value.retry_delay_ms
        service.may_start.set()
        await service.announced.wait()
        for name in service.names:
            assert await ask(channel, kind=kind, name=name) == b"x"


LARGE, SMALL = 300_000, 100_000


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_large_requests_leave_room_for_small_ones_and_are_released(
    kind: str,
) -> None:
    may_answer, reached = asyncio.Event(), asyncio.Semaphore(0)

    async def script(request: bytes, context: Context) -> bytes:
        reached.release()
        await may_answer.wait()
        return b"answer"

    service = ScriptedService(script)
    async with served(service, metrics_port=0, max_bytes_in_flight=1_000_000) as (channel, ports):

        async def held() -> bool:
            text = await asyncio.to_thread(metrics_at, ports.metrics_port)
            return "rollmesh_bytes_in_flight 0.0" not in text

        running = [begin(channel, b"x" * LARGE, kind=kind) for _ in range(2)]
        for _ in running:
            await reached.acquire()
        for _ in range(3):
            with pytest.raises(OverloadedError) as refused, typed_errors():
                await ask(channel, b"x" * LARGE, kind=kind)
            assert refused.value.retry_delay_ms
        running += [begin(channel, b"x" * SMALL, kind=kind) for _ in range(4)]
        for _ in range(4):
            await reached.acquire()
        with pytest.raises(OverloadedError), typed_errors():
            await ask(channel, b"x" * SMALL, kind=kind)
        running.pop().cancel()
        assert await held()
        may_answer.set()
        for call in running:
            assert await call if kind == "unary_unary" else [one async for one in call][-1]
        assert await ask(channel, b"x" * LARGE, kind=kind) == b"answer"

        async def free() -> bool:
            return not await held()

        await until(free)


async def test_a_request_that_is_alone_may_have_any_size() -> None:
    async with served(ScriptedService(), max_bytes_in_flight=1000) as (channel, _):
        for _ in range(2):
            assert await ask(channel, b"x" * LARGE)
