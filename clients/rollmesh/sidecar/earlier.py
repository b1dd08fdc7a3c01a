"""Recognises the last body of a session at the beginning of its next one.

Agents send the complete conversation with every request. The messages of the last body are taken
from its request, and only the rest of the new body is parsed.
"""

import re
from collections import OrderedDict
from threading import Lock
from typing import Any

import orjson

from rollmesh.sidecar import body
from rollmesh.v1 import gateway_pb2

_LEAST_BYTES, _MOST_BYTES = 8 * 1024, 1024 * 1024
"""Bodies that are kept: a smaller one costs little, a larger one has images."""
_KEPT_BYTES = 32 * 1024 * 1024
"""Bodies of all sessions together. The one used least recently goes."""
_MESSAGES = re.compile(rb'"messages"\s*:\s*\[')
_NAME = re.compile(rb'"messages"|\\u00[67]')
"""The name of the list, or an escaped letter, with which it can be written too."""


class Prefixes:
    """The last body of each session, and the request that was read from it."""

    def __init__(self) -> None:
        """Starts empty."""
        self._kept: OrderedDict[str, tuple[bytes, gateway_pb2.ChatRequest]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()  # large bodies are read in threads

    def parse(self, key: str, data: bytes) -> tuple[dict[str, Any], Any]:
        """Returns the values of a body without the known messages, and these messages.

        Args:
            key: Key of the session.
            data: The body.
        """
        kept = self._kept.get(key)
        rest = _rest(kept[0], data) if kept is not None else None
        if kept is None or rest is None:
            return body.parse(data), ()
        return body.parse(rest), kept[1].messages

    def keep(self, key: str, data: bytes, request: gateway_pb2.ChatRequest) -> None:
        """Keeps a body and its request, whose messages do not change any more."""
        with self._lock:
            if key in self._kept:
                self._bytes -= len(self._kept.pop(key)[0])
            if _LEAST_BYTES <= len(data) <= _MOST_BYTES:
                self._kept[key] = data, request
                self._bytes += len(data)
            while self._bytes > _KEPT_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1][0])


def _rest(last: bytes, data: bytes) -> bytes | None:
    """Returns a body without the messages of the last body. None if they differ.

    The bodies must part where the last one ends its messages. That is so if the last body without
    all between the beginning of its messages and this place is still an object without messages.
    """
    at = _common(last, data)
    begin = _MESSAGES.search(last, 0, at)
    if begin is None or last[at : at + 1] != b"]" or data[at : at + 1] != b",":
        return None
    head, end = last[: begin.end()], data[at + 1 :]
    if _NAME.search(end):  # the last of two equal names would count
        return None
    try:
        emptied = orjson.loads(head + last[at:])
    except orjson.JSONDecodeError:
        return None
    return head + end if emptied.get("messages") == [] else None


def _common(one: bytes, other: bytes) -> int:
    """Returns the length of the common beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
