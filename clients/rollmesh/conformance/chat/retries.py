"""Repeats of chat completions."""

from typing import Any

from rollmesh.conformance.chat.requests import PATH, request, user
from rollmesh.conformance.retries import Repeats
from rollmesh.conformance.server import Server, Streamed


def _body(server: Server, text: str) -> dict[str, Any]:
    return request(server, user(text))


def _said(body: dict[str, Any]) -> Any:
    return body["choices"]


def _streamed_id(streamed: Streamed) -> Any:
    return streamed.datas()[0].get("id")


RETRIES = Repeats(PATH, _body, _said, _streamed_id).family("chat")
