"""What happens around every RPC: request ids and counts."""

import asyncio
from contextlib import suppress

import grpc
import pytest
from prometheus_client import REGISTRY

from rollmesh.runtime.errors import EnginesBusyError, RemoteError, SessionUnknownError
from rollmesh.runtime.rpc import Context, request_metadata
from rollmesh.runtime.telemetry import current_request
from tests.runtime.services import KINDS, Script, ScriptedService, ask, echo, failing, served

X_REQUEST_ID = (("x-request-id", "r-1"),)


async def say_request_id(request: bytes, context: Context) -> bytes:
    return current_request.get().encode()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_request_id_is_the_callers(kind: str) -> None:
    async with served(ScriptedService(say_request_id)) as (channel, _):
        assert await ask(channel, kind=kind, metadata=X_REQUEST_ID) == b"r-1"


@pytest.mark.parametrize("kind", KINDS)
async def test_without_one_every_call_gets_its_own_request_id(kind: str) -> None:
    async with served(ScriptedService(say_request_id)) as (channel, _):
        found = {await ask(channel, kind=kind) for _ in range(3)}
    assert len(found) == 3
    assert b"" not in found


async def test_a_request_id_is_handed_on_to_the_next_service() -> None:
    async with served(ScriptedService(say_request_id)) as (behind, _):

        async def hand_on(request: bytes, context: Context) -> bytes:
            return await ask(behind, metadata=request_metadata())

        async with served(ScriptedService(hand_on)) as (channel, _):
            assert await ask(channel, metadata=X_REQUEST_ID) == b"r-1"


def counted(name: str, kind: str) -> dict[str, float]:
    """Returns how many calls of a method ended with which code."""
    return {
        sample.labels["code"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "rollmesh_rpcs_total" and sample.labels["method"] == f"/{name}/{kind}"
    }


async def aborting(request: bytes, context: Context) -> bytes:
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")


@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param(echo, "OK", id="an-answer"),
        pytest.param(failing(SessionUnknownError("none")), "NOT_FOUND", id="a-typed-error"),
        pytest.param(failing(EnginesBusyError("all")), "RESOURCE_EXHAUSTED", id="another"),
        pytest.param(failing(KeyError("x")), "INTERNAL", id="an-unexpected-exception"),
        pytest.param(failing(RemoteError("gone", "UNAVAILABLE")), "UNAVAILABLE", id="remote"),
        pytest.param(aborting, "PERMISSION_DENIED", id="a-status-the-handler-set"),
    ],
)
async def test_a_call_is_counted_under_the_code_its_client_sees(
    request: pytest.FixtureRequest, script: Script, code: str, kind: str
) -> None:
    name = request.node.name  # a method of its own, so that its counts begin at none
    seen = "OK"
    async with served(ScriptedService(script, name)) as (channel, _):
        try:
            await ask(channel, kind=kind, name=name)
        except grpc.aio.AioRpcError as error:
            seen = error.code().name
    assert seen == code
    assert counted(name, kind) == {code: 1}
    label = {"method": f"/{name}/{kind}"}
    assert REGISTRY.get_sample_value("rollmesh_rpc_seconds_count", label) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_its_client_cancelled_is_counted_so_and_cleaned_up(
    request: pytest.FixtureRequest, kind: str
) -> None:
    name, arrived, cleaned_up = request.node.name, asyncio.Event(), asyncio.Event()

    async def script(request: bytes, context: Context) -> bytes:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.set()
        return b""

    async with served(ScriptedService(script, name)) as (channel, _):
        task = asyncio.ensure_future(ask(channel, kind=kind, name=name))
        await arrived.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await cleaned_up.wait()
    assert counted(name, kind) == {"CANCELLED": 1}


async def test_a_service_that_is_not_there_is_unimplemented() -> None:
    async with served(ScriptedService()) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, name="rollmesh.test.Unknown")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_too_soon_is_no_unexpected_error(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = failing(grpc.aio.InternalError("Failed execute_batch"))  # as grpcio raises it
    async with served(ScriptedService(left)) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, kind=kind, timeout=1)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, b"again", kind=kind, timeout=1)
    assert [one.getMessage() for one in caplog.records if one.exc_info] == []
