"""Reads bodies as the endpoints do."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from rollmesh.runtime.codec import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import PROTOCOLS, Head
from rollmesh.v1 import chat_pb2, gateway_pb2, trajectory_pb2

KEY = "rmk-5e55-secret"
GOOGLE = "models/{model:path}:generateContent"
BARE: Mapping[str, Mapping[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"model": "m", "input": "Hi"},
    "messages": {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}],
    },
    GOOGLE: {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
}  # fmt: skip
"""The shortest body of each path."""


def read(path: str, **more: Any) -> gateway_pb2.ChatRequest:
    """Returns the request to the gateway of the shortest body with these members."""
    members: dict[str, Any] = {**BARE[path]}
    for name, value in more.items():
        outer, _, inner = name.rpartition(".")
        if outer:
            members.setdefault(outer, {})[inner] = value
        else:
            members[name] = value
    return read_bytes(path, orjson.dumps(members))


def read_bytes(path: str, body: bytes, key: str = KEY) -> gateway_pb2.ChatRequest:
    """Returns the request to the gateway of a body."""
    head = Head("5e55", key, {}, trajectory_pb2.LINEAGE_UNSPECIFIED)
    return PROTOCOLS[f"/v1/{path}"].read(body, head).chat


def table(path: str) -> set[str]:
    """Returns the names of all parameters that the sidecar knows."""
    known = PROTOCOLS[f"/v1/{path}"].parameters
    return {*known.served, *known.refused, *known.unused}


def refused_field(path: str, **more: Any) -> str:
    """Returns the field for which such a body is refused."""
    with pytest.raises(InvalidFieldError) as caught:
        read(path, **more)
    return caught.value.field


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(**members: Any) -> dict[str, Any]:
    return {"role": "assistant", **members}


def told(request: gateway_pb2.ChatRequest) -> list[tuple[str, str]]:
    """Roles and texts of the messages."""
    return [
        (chat_pb2.Role.Name(one.role).removeprefix("ROLE_").lower(), text_of(one))
        for one in request.messages
    ]


def counted(counter: str, **labels: str) -> float:
    """Returns a counter of the sidecar."""
    return REGISTRY.get_sample_value(f"rollmesh_sidecar_{counter}_total", labels) or 0.0


def ignored(name: str) -> float:
    """Returns how often a parameter was counted as ignored."""
    return counted("ignored_parameters", name=name)
