"""Tokens of every role, and calls with one of them."""

from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from rollmesh.runtime.access import CallerConfig, Identity, make_tokens, write_private
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import open_channel, typed_errors

STRANGER = "a stranger"
INTRUDER = "an intruder"
"""Presents a token that nobody accepts."""
_TIMEOUT_S = 30


class Locks:
    """A folder of tokens, and what callers of each role show."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_tokens(folder)
        write_private(folder, {f"{INTRUDER}.token": b"guessed" * 8})

    def flags(self, role: str) -> dict[str, object]:
        """The flags of a service that accepts the tokens and presents that of a role."""
        accepts = {} if role == "sidecar" else {"tokens_dir": self.folder / "accepted"}
        return {"token_file": self.token_file(role), **accepts}

    def token_file(self, role: str) -> Path:
        return self.folder / f"{role}.token"

    def identity(self, role: str) -> Identity:
        file = "" if role == STRANGER else str(self.token_file(role))
        return Identity(CallerConfig(token_file=file))

    def channel(self, address: str, role: str) -> grpc.aio.Channel:
        return open_channel(address, identity=self.identity(role))


async def reason_of_call(
    channel: grpc.aio.Channel, name: str, method: MethodDescriptor, request: bytes = b""
) -> str:
    """Calls a method with one empty request. Returns the reason of its error, empty without one."""
    kind = (
        f"{'stream' if method.client_streaming else 'unary'}_"
        f"{'stream' if method.server_streaming else 'unary'}"
    )
    call: Any = getattr(channel, kind)(name)(
        [request] if method.client_streaming else request, timeout=_TIMEOUT_S
    )
    try:
        with typed_errors():
            if method.server_streaming:
                await anext(aiter(call), None)
            else:
                await call
    except RollmeshError as error:
        return error.reason
    finally:
        call.cancel()
    return ""
