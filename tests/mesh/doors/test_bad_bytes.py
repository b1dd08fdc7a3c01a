"""Malformed bytes, empty messages and unknown enum numbers, sent to every RPC."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.internal.v1 import leases_pb2, members_pb2, tunnels_pb2
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import from_rpc_error, open_channel
from rollmesh.v1 import (
    collector_pb2,
    collector_pb2_grpc,
    engine_pb2,
    router_pb2,
    sampling_pb2,
)
from tests.collector.collectors import SESSION, create_or_update
from tests.engine.engines import CONFIG
from tests.mesh.protocols.test_openai import ask, user
from tests.meshes import Mesh, delivered
from tests.served import SERVED

TIMEOUT_S = 120
UNDECODABLE = b"\xff"
UNKNOWN = 99
_HEADER = engine_pb2.UpdateWeightsHeader(
    policy_version=7,
    pause_mode=engine_pb2.PAUSE_MODE_KEEP,
    safetensors_bytes=8,
    model="policy",
)
_PUSH = router_pb2.PushWeightsHeader(
    policy_version=7,
    pause_mode=engine_pb2.PAUSE_MODE_KEEP,
    safetensors_bytes=8,
    model="policy",
)
_ADAPTER = engine_pb2.AdapterHeader(
    adapter=sampling_pb2.AdapterRef(name="stranger", version=7),
    config_json=json.dumps(CONFIG),
    safetensors_bytes=8,
    model="policy",
)
FIRST: dict[str, Message] = {
    "Register": members_pb2.RegisterRequest(
        hello=router_pb2.ReplicaHello(
            replica_id="stranger",
            kind=router_pb2.REPLICA_KIND_GATEWAY,
            address="127.0.0.1:1",
            model="policy",
        )
    ),
    "Attach": tunnels_pb2.AttachRequest(caller_id="stranger"),
    "Dispatch": leases_pb2.DispatchRequest(hello=leases_pb2.DispatchHello(gateway_id="stranger")),
    "PushWeights": router_pb2.PushWeightsRequest(header=_PUSH),
    "PushAdapter": router_pb2.PushAdapterRequest(header=_ADAPTER),
    "LoadAdapter": engine_pb2.LoadAdapterRequest(header=_ADAPTER),
    "Generations": engine_pb2.GenerationsRequest(abort=[1]),
    "UpdateWeights": engine_pb2.UpdateWeightsRequest(header=_HEADER),
    "Subscribe": collector_pb2.SubscribeRequest(
        hello=collector_pb2.SubscribeHello(consumer="stranger")
    ),
}
"""What begins each stream of requests well."""


MESH = {"max_adapters": 2}


async def outcome(channel: grpc.aio.Channel, method: MethodDescriptor, *requests: bytes) -> str:
    """Returns how a call with these bytes ends: OK, or its code and reason."""
    kind = "_".join(
        "stream" if streaming else "unary"
        for streaming in (method.client_streaming, method.server_streaming)
    )
    multi: Any = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    call = multi(list(requests) if method.client_streaming else requests[0], timeout=TIMEOUT_S)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        field = typed.field if isinstance(typed, InvalidFieldError) else ""
        return f"{error.code().name} {typed.reason} {field}".rstrip()
    finally:
        call.cancel()
    return "OK"


@asynccontextmanager
async def left_standing(mesh: Mesh) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """Yields channels to the services. After it all must serve and work, without a traceback."""
    async with AsyncExitStack() as stack:
        channels = {
            name: await stack.enter_async_context(open_channel(mesh.processes[name].address))
            for name in SERVED
        }
        collector = collector_pb2_grpc.CollectorServiceStub(channels["collector"])
        await create_or_update(collector, name="stranger", unit=SESSION)
        yield channels
        for name, channel in channels.items():
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVED[name][0].full_name)
            answer = await stub.Check(request, timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
    for name in SERVED:
        lines = (mesh.folder / f"{name}.log").read_text().splitlines()
        assert [line for line in lines if "Traceback" in line] == []
        assert all(json.loads(line) for line in lines)
    async with mesh.client() as client:
        async with client.session() as session:
            await ask(mesh.openai(session), user("hello"))
        assert (await delivered(client, session)).session_id == session.session_id


def methods() -> Iterator[tuple[str, MethodDescriptor]]:
    return (
        (name, method)
        for name, services in SERVED.items()
        for one in services
        for method in one.methods
    )


async def test_bytes_that_are_no_message_end_their_call_and_nothing_else(mesh: Mesh) -> None:
    async with left_standing(mesh) as channels:
        ends = {
            method.full_name: await outcome(channels[name], method, UNDECODABLE)
            for name, method in methods()
        }
        ends |= {
            f"{method.full_name} in mid-stream": await outcome(
                channels[name], method, FIRST[method.name].SerializeToString(), UNDECODABLE
            )
            for name, method in methods()
            if method.client_streaming
        }
    assert set(ends.values()) == {"INVALID_ARGUMENT UNDECODABLE request"}, ends


async def test_an_empty_message_is_answered_or_refused_with_a_reason(mesh: Mesh) -> None:
    async with left_standing(mesh) as channels:
        first = {
            method.full_name: await outcome(channels[name], method, b"")
            for name, method in methods()
        }
        later = {
            method.full_name: await outcome(
                channels[name], method, FIRST[method.name].SerializeToString(), b""
            )
            for name, method in methods()
            # An empty message begins no generation, and keeps a tunnel up.
            if method.client_streaming and method.name not in {"Generations", "Attach"}
        }
    codes = {end.partition(" ")[0] for end in first.values()}
    refusals = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAUTHENTICATED"}
    assert codes <= {"OK", *refusals}, first
    assert {end.rpartition(" ")[0] for end in later.values()} == {"INVALID_ARGUMENT INVALID_FIELD"}


def enums(kind: Descriptor) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yields the path to every enum of a message."""
    for field in kind.fields:
        if field.enum_type is not None:
            yield (field,)
        elif field.message_type is not None:
            for path in enums(field.message_type):
                yield (field, *path)


def with_unknown(kind: Descriptor, path: Sequence[FieldDescriptor]) -> tuple[bytes, str]:
    """Returns a message with a number at a path that its enum does not have, and where it is."""
    message, names = GetMessageClass(kind)(), list[str]()
    part: Any = message
    for field in path[:-1]:
        inner = getattr(part, field.name)
        part = inner.add() if field.is_repeated else inner
        names.append(f"{field.name}[0]" if field.is_repeated else field.name)
    last = path[-1]
    if last.is_repeated:
        getattr(part, last.name).append(UNKNOWN)
    else:
        setattr(part, last.name, UNKNOWN)
    return message.SerializeToString(), ".".join((*names, last.name))


async def test_a_number_that_no_enum_has_is_refused_by_its_field_wherever_it_is(
    mesh: Mesh,
) -> None:
    async with left_standing(mesh) as channels:
        for name, method in methods():
            for path in enums(method.input_type):
                data, field = with_unknown(method.input_type, path)
                said = await outcome(channels[name], method, data)
                assert said == f"INVALID_ARGUMENT INVALID_FIELD {field}", method.full_name
