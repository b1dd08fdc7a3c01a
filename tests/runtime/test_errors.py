"""Typed errors over a real connection."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rollmesh.runtime.errors import (
    EnginesBusyError,
    InvalidFieldError,
    InvalidSamplingError,
    RemoteError,
    RollmeshError,
    SessionClosedError,
    StoreFullError,
)
from rollmesh.runtime.rpc import (
    DOMAIN,
    Context,
    from_status,
    open_channel,
    read_stream,
    to_status,
    typed_errors,
)
from rollmesh.v1 import errors_pb2
from tests.paths import ROOT
from tests.runtime.services import KINDS, Script, ScriptedService, ask, begin, failing, served


def classes(root: type[RollmeshError]) -> Iterator[type[RollmeshError]]:
    yield root
    for child in root.__subclasses__():
        yield from classes(child)


RUNTIME_ERRORS = [
    cls for cls in classes(RollmeshError) if cls.__module__.startswith("rollmesh.runtime")
]


def sample(cls: type[RollmeshError]) -> RollmeshError:
    if issubclass(cls, InvalidFieldError):
        return cls("turns[2].ids", "are too many; send fewer", limit=7)
    if issubclass(cls, RemoteError):
        return cls("gone", "UNAVAILABLE")
    return cls("it is so; do this", retry_delay_ms=1500, session_id="s-1", turn=3)


async def through_a_server(error: Exception, kind: str = "unary_unary") -> RollmeshError:
    """Returns what a client catches when a handler raises `error`."""
    async with served(ScriptedService(failing(error))) as (channel, _):
        with pytest.raises(RollmeshError) as caught, typed_errors():
            await ask(channel, kind=kind)
    return caught.value


@pytest.mark.parametrize("cls", RUNTIME_ERRORS, ids=lambda cls: cls.__name__)
async def test_an_error_comes_back_as_itself(cls: type[RollmeshError]) -> None:
    sent = sample(cls)
    got = await through_a_server(sent)
    assert type(got) is cls
    assert (got.message, got.reason, got.code) == (sent.message, cls.reason, sent.code)
    assert (got.metadata, got.retry_delay_ms) == (sent.metadata, sent.retry_delay_ms)
    assert getattr(got, "field", None) == getattr(sent, "field", None)
    assert getattr(got, "status_code", None) == getattr(sent, "status_code", None)


def test_every_error_of_the_runtime_stands_where_the_table_is_made() -> None:
    assert {cls.__module__ for cls in RUNTIME_ERRORS} == {"rollmesh.runtime.errors"}


def test_no_two_errors_share_a_reason() -> None:
    reasons = [cls.reason for cls in RUNTIME_ERRORS]
    assert sorted(reasons) == sorted(set(reasons))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_crosses_every_kind_of_call(kind: str) -> None:
    got = await through_a_server(SessionClosedError("s-1 is closed"), kind)
    assert isinstance(got, SessionClosedError)


async def test_answers_before_the_error_of_a_stream_arrive() -> None:
    service = ScriptedService(failing(InvalidSamplingError("top_p", "is 2; give at most 1")))
    async with served(service) as (channel, _):
        async with aclosing(read_stream(begin(channel))) as stream:
            assert await anext(stream) == b"first"
            with pytest.raises(InvalidSamplingError):
                await anext(stream)


def test_the_contract_has_every_reason_and_no_other() -> None:
    names = {f"ERROR_REASON_{cls.reason}" for cls in RUNTIME_ERRORS} | {"ERROR_REASON_UNSPECIFIED"}
    assert names == set(errors_pb2.ErrorReason.keys())


def test_the_comment_of_every_reason_begins_with_its_code() -> None:
    text = (ROOT / "protos/rollmesh/v1/errors.proto").read_text()
    found = re.findall(r"((?:  //.*\n)+)  ERROR_REASON_(\w+) = [1-9]", text)
    codes = {reason: comment.removeprefix("  // ").split(".")[0] for comment, reason in found}
    expected = {cls.reason: cls.code for cls in RUNTIME_ERRORS if cls is not RemoteError}
    assert codes == expected | {RemoteError.reason: "Any code"}


async def test_on_the_wire_an_error_has_its_reason_its_details_and_its_delay() -> None:
    error = EnginesBusyError("all places are taken", retry_delay_ms=1250, engines=4)
    async with served(ScriptedService(failing(error))) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    first, typed, second = status_pb2.Status.FromString(details).details
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    facts = errors_pb2.ErrorDetails()
    assert typed.Unpack(facts)
    assert facts == errors_pb2.ErrorDetails(reason=errors_pb2.ERROR_REASON_ENGINES_BUSY)
    assert first.Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (
        "rollmesh",
        "ENGINES_BUSY",
        {"engines": "4"},
    )
    assert second.Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1250


def test_without_a_delay_there_is_no_retry_info() -> None:
    info, typed = to_status(StoreFullError("full")).details
    assert info.type_url.endswith("google.rpc.ErrorInfo")
    assert typed.type_url.endswith("rollmesh.v1.ErrorDetails")


def test_the_facts_of_an_error_are_typed() -> None:
    error = InvalidFieldError(
        "rewards", "is bad", session_id="s", trajectory_id="s/4", node_id=4, policy_version=7
    )
    details = errors_pb2.ErrorDetails()
    assert to_status(error).details[1].Unpack(details)
    assert details == errors_pb2.ErrorDetails(
        reason=errors_pb2.ERROR_REASON_INVALID_FIELD,
        field="rewards",
        session_id="s",
        trajectory_id="s/4",
        node_id=4,
        policy_version=7,
    )


def test_facts_that_are_no_numbers_are_left_to_the_metadata() -> None:
    details = errors_pb2.ErrorDetails()
    status = to_status(RollmeshError("odd", node_id=2**40, policy_version="new"))
    assert status.details[1].Unpack(details)
    assert details == errors_pb2.ErrorDetails(reason=errors_pb2.ERROR_REASON_INTERNAL)
    assert from_status(status).metadata == {"node_id": str(2**40), "policy_version": "new"}


@pytest.mark.parametrize("cls", RUNTIME_ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_inside_a_response_comes_back_as_itself(cls: type[RollmeshError]) -> None:
    sent = sample(cls)
    got = from_status(to_status(sent))
    assert (type(got), got.message, got.metadata) == (cls, sent.message, sent.metadata)
    assert (got.retry_delay_ms, got.code) == (sent.retry_delay_ms, sent.code)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_exception_is_internal_and_says_nothing(kind: str) -> None:
    got = await through_a_server(KeyError("the secret prompt"), kind)
    assert (type(got), got.code) == (RollmeshError, "INTERNAL")
    assert "secret" not in f"{got.message} {got.metadata}"
    assert "KeyError" not in got.message


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(InvalidFieldError("tools", "x" * 20_000), id="long-message"),
        pytest.param(InvalidFieldError("tools", "🙂" * 20_000), id="four-bytes-each"),
        pytest.param(InvalidFieldError("tools", "bad", name="🙂" * 20_000), id="long-value"),
        pytest.param(
            InvalidFieldError("tools", "bad", **{f"name_{at}": "x" * 2000 for at in range(20)}),
            id="many-values",
        ),
    ],
)
async def test_an_error_too_large_for_a_trailer_still_arrives(error: InvalidFieldError) -> None:
    got = await through_a_server(error)
    assert isinstance(got, InvalidFieldError)
    assert got.field == "tools"
    assert got.message.startswith(error.message[:100])


async def test_any_name_may_stand_in_the_metadata() -> None:
    sent = InvalidFieldError("messages", "is bad", message="3", retry_delay_ms="never")
    got = await through_a_server(sent)
    assert got.metadata == sent.metadata


@asynccontextmanager
async def foreign(script: Script) -> AsyncIterator[grpc.aio.Channel]:
    """Serves without interceptors."""
    server = grpc.aio.server()
    ScriptedService(script).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def plain(request: bytes, context: Context) -> bytes:
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")


async def other_domain(request: bytes, context: Context) -> bytes:
    status = status_pb2.Status(code=grpc.StatusCode.PERMISSION_DENIED.value[0], message="no")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="STORE_FULL", domain="other"))
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError


async def garbled(request: bytes, context: Context) -> bytes:
    trailers = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no", trailers)


@pytest.mark.parametrize("script", [plain, other_domain, garbled], ids=lambda s: s.__name__)
async def test_a_status_that_is_not_ours_is_remote(script: Script) -> None:
    async with foreign(script) as channel:
        with pytest.raises(RemoteError) as caught, typed_errors():
            await ask(channel)
    assert caught.value.code == "PERMISSION_DENIED"
    assert caught.value.message == "no"


async def test_a_reason_from_a_newer_peer_keeps_its_message_and_reason() -> None:
    async def newer(request: bytes, context: Context) -> bytes:
        status = status_pb2.Status(code=grpc.StatusCode.ABORTED.value[0], message="moved")
        info = error_details_pb2.ErrorInfo(reason="SESSION_MOVED", domain=DOMAIN)
        info.metadata["to"] = "gateway-7"
        status.details.add().Pack(info)
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError

    async with foreign(newer) as channel:
        with pytest.raises(RollmeshError) as caught, typed_errors():
            await ask(channel)
    got = caught.value
    assert (got.message, got.metadata) == ("moved", {"to": "gateway-7"})
    assert got.reason == "SESSION_MOVED"


async def test_an_address_without_a_server_is_a_remote_error() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(RemoteError) as caught, typed_errors():
            await ask(channel)
    assert caught.value.code == "UNAVAILABLE"


async def test_a_remote_error_that_is_passed_on_keeps_its_status() -> None:
    got = await through_a_server(RemoteError("gone", "UNAVAILABLE"))
    assert isinstance(got, RemoteError)
    assert got.code == "UNAVAILABLE"


async def test_a_status_that_a_handler_sets_itself_passes() -> None:
    async with served(ScriptedService(plain)) as (channel, _):
        with pytest.raises(RemoteError) as caught, typed_errors():
            await ask(channel)
    assert caught.value.code == "PERMISSION_DENIED"
