"""The contract of the last release, `protos/baseline.txtpb`, and stubs that know no newer one.

`Former` makes its messages and stubs. `FormerPeer` stands between a service of today and another
and makes the one look like one of the last release: what is newer passes in neither direction.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message

from rollmesh.runtime.rpc import open_channel
from tests.paths import ROOT

_PACKAGES = ("rollmesh.v1", "rollmesh.internal.v1")
_BASELINE = ROOT / "protos" / "baseline.txtpb"
_OWN_HEADERS = ("user-agent", "grpc-", "te", "content-type", ":")
_METHODS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class Former:
    """Messages and stubs of the last release."""

    def __init__(self) -> None:
        image = descriptor_pb2.FileDescriptorSet()
        # buf writes more about each file than a set of descriptors has.
        text = _BASELINE.read_text("utf-8")
        text_format.Parse(text, image, allow_unknown_field=True)
        self._pool = descriptor_pool.DescriptorPool()
        for file in image.file:
            self._pool.Add(file)
        own = [file for file in image.file if file.package in _PACKAGES]
        self.messages = [f"{file.package}.{one.name}" for file in own for one in file.message_type]
        """Full names of the messages."""
        self.enums = [f"{file.package}.{one.name}" for file in own for one in file.enum_type]
        """Full names of the enums."""
        self.services = [f"{file.package}.{one.name}" for file in own for one in file.service]
        """Full names of the services."""
        every = (*self.messages, *self.enums, *self.services)
        self._full = {name.rpartition(".")[2]: name for name in every}

    def __getattr__(self, name: str) -> type[Any]:
        """Returns the class of a message."""
        return self.class_of(self._full[name])

    def class_of(self, full_name: str) -> type[Any]:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def service(self, full_name: str) -> Any:
        """Returns the descriptor of a service."""
        return self._pool.FindServiceByName(full_name)

    def enum(self, full_name: str) -> Any:
        """Returns the descriptor of an enum."""
        return self._pool.FindEnumTypeByName(full_name)

    def number(self, enum: str, value: str) -> int:
        """Returns the number of an enum's value."""
        return int(self.enum(self._full[enum]).values_by_name[value].number)

    def method(self, path: str) -> Any:
        """Returns the descriptor of `/rollmesh.v1.Service/Method`. None if it is newer."""
        service, _, name = path.strip("/").partition("/")
        return self.service(service).methods_by_name.get(name) if service in self.services else None

    def stub(self, channel: grpc.aio.Channel, name: str) -> Any:
        """Returns the stub of a service."""
        return _Stub(self, channel, self._full[name])


class _Stub:
    """Calls the methods of a service by their names."""

    def __init__(self, former: Former, channel: grpc.aio.Channel, service: str) -> None:
        self._former, self._channel, self._service = former, channel, service

    def __getattr__(self, name: str) -> Any:
        path = f"/{self._service}/{name}"
        method = self._former.method(path)
        kind = _METHODS[method.client_streaming, method.server_streaming]
        answer = self._former.class_of(method.output_type.full_name)
        return getattr(self._channel, kind)(
            path, request_serializer=_bytes_of, response_deserializer=answer.FromString
        )


@cache
def former() -> Former:
    """Returns the last release's contract."""
    return Former()


class FormerPeer(grpc.GenericRpcHandler):
    """Forwards calls to a server, without what the last release did not know."""

    def __init__(self, target: str) -> None:
        self.address = ""
        """host:port for callers."""
        self.calls = Counter[str]()
        """Forwarded calls, by method."""
        self._target = target
        self._channel: grpc.aio.Channel

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FormerPeer"]:
        """Serves until the block ends."""
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        async with AsyncExitStack() as stack:
            self._channel = await stack.enter_async_context(open_channel(self._target))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            yield self

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = str(handler_call_details.method)
        if not path.startswith("/rollmesh."):  # such as health
            return self._handler(path, bytes, bytes)
        if (method := former().method(path)) is None:
            return None  # UNIMPLEMENTED, as a server of the last release says
        return self._handler(path, _known(method.input_type), _known(method.output_type))

    def _handler(
        self, path: str, request: Callable[[bytes], bytes], answer: Callable[[bytes], bytes]
    ) -> Any:
        """Every call is forwarded as a stream: on the wire a single message is one too."""
        forwarded: Any = self._channel.stream_stream(path, None, answer)

        async def forward(requests: Any, context: Any) -> AsyncIterator[bytes]:
            self.calls[path.rpartition("/")[2]] += 1
            shown = tuple(
                (key, value)
                for key, value in context.invocation_metadata() or ()
                if not key.startswith(_OWN_HEADERS)
            )
            call = forwarded(requests, metadata=shown, timeout=context.time_remaining())
            try:
                async for one in call:
                    yield one
            except grpc.aio.AioRpcError as error:
                trailing = tuple(error.trailing_metadata())
                await context.abort(error.code(), error.details(), trailing)
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward, request_deserializer=request)


def _known(descriptor: Any) -> Callable[[bytes], bytes]:
    """Returns what leaves of a message only what the last release knew."""
    message_class = former().class_of(descriptor.full_name)

    def known(data: bytes) -> bytes:
        message: Any = message_class.FromString(data)
        message.DiscardUnknownFields()
        return bytes(message.SerializeToString())

    return known


def _bytes_of(message: Message) -> bytes:
    return message.SerializeToString()
