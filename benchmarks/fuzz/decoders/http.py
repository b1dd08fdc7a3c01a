"""Targets: what the sidecar reads of requests."""

import json
from collections.abc import Sequence

from benchmarks.fuzz.bodies import SEEDS
from benchmarks.fuzz.decoders.target import (
    Target,
    expect,
    framed,
    frames,
    json_value,
    one_frame,
    text_with,
)
from rollmesh.sidecar import (
    PROTOCOLS,
    Head,
    answer_of_response,
    item_of,
    read_head,
    response_id,
    seal,
    sealed_answer,
)
from rollmesh.v1 import trajectory_pb2

_KEY = "rmk-s-k"
_HEAD = Head("s", _KEY, {}, trajectory_pb2.LINEAGE_UNSPECIFIED)
_SEALED = [seal(_KEY, "chatcmpl-s-2", text) for text in ("hm", "")]


def _echoes(route: str) -> list[dict[str, object]]:
    """Returns bodies that echo an answer of the session, with seals that hold."""
    if route.startswith("/v1/messages"):
        thinking = {"type": "thinking", "thinking": "hm", "signature": _SEALED[0]}
        redacted = {"type": "redacted_thinking", "data": _SEALED[1]}
        content: list[object] = [thinking, redacted, {"type": "text", "text": "4"}]
        said: list[object] = [{"role": "assistant", "content": content}]
        return [{"model": "policy", "max_tokens": 4, "messages": said}]
    if route.startswith("/v1/responses"):
        reasoning = {"type": "reasoning", "id": "rs_s-2", "encrypted_content": _SEALED[0]}
        text = [{"type": "output_text", "text": "4"}]
        message = {"type": "message", "id": "msg_s-2", "role": "assistant", "content": text}
        call = {"type": "custom_tool_call", "id": "ctr_s-2_0", "call_id": "c", "input": "x"}
        custom = {"type": "custom", "name": "g", "format": {"type": "text"}}
        call |= {"name": "g"}
        return [
            {"model": "policy", "input": [reasoning, message, call], "tools": [custom]},
            {"model": "policy", "input": "go on", "previous_response_id": "resp_s-2-i"},
        ]
    return []


def _body(route: str) -> Target:
    protocol = PROTOCOLS[route]
    seeds = [json.dumps(body).encode() for body in (*SEEDS[route], *_echoes(route))]

    def read(data: bytes) -> None:
        protocol.read(data, _HEAD)

    return Target(route, read, lambda: seeds, json_value)


def _seal(data: bytes) -> None:
    parts = [part.decode("utf-8", "surrogatepass") for part in _decodable(frames(data))]
    given, text = (*parts, "", "")[:2]
    answer_id = sealed_answer(_KEY, given, text)
    expect(not answer_id or given in _SEALED, f"{given!r} was taken for a seal")
    expect(not (answer_id and text) or given == seal(_KEY, answer_id, text), "another text")


def _decodable(parts: Sequence[bytes]) -> list[bytes]:
    found = (part.decode("utf-8", "replace") for part in parts)
    return [part.encode() for part in found]


def _session(data: bytes) -> None:
    parts = [part.decode("latin-1") for part in frames(data)]
    path, authorization, other = (*parts, "", "", "")[:3]
    headers = [(b"authorization", authorization), (b"x-api-key", other)]
    scope = {
        "headers": [(name, value.encode("latin-1")) for name, value in headers],
        "path_params": {"session": path},
    }
    head = read_head(scope)
    session_id, key = head.session_id, head.session_key
    expect(key.startswith("rmk-"), f"{key!r} is taken for a key")
    given = (path, authorization.partition(" ")[2].strip(), other)
    expect(key in given, f"{key!r} was not given")
    expect(session_id == path or session_id == key.split("-")[1], "another session")


def _ids(data: bytes) -> None:
    given = data.decode("utf-8", "replace")
    kind, item = item_of(given)
    expect(bool(item) == bool(kind), "a kind without an answer")
    answer_id, instructed = answer_of_response(given, "response_id")
    expect(response_id(answer_id, instructed=instructed) == given, "another response")


_HEAD_PARTS = ("Bearer ", "bearer ", "rmk-", "rmk-s-k", "-", " ", "\t", "Basic ", "s", "k")
_ID_PARTS = ("resp_", "rs_", "msg_", "fc_", "ctr_", "-i", "-", "_", "0", "2", "chatcmpl-", "\u0661")
TARGETS = (
    *map(_body, PROTOCOLS),
    Target(
        "seals",
        _seal,
        lambda: [
            framed([one.encode(), text]) for one, text in zip(_SEALED, (b"hm", b""), strict=True)
        ],
        one_frame(text_with((".", "=", "-", "_", "A", "chatcmpl-s-2", "hm"))),
    ),
    Target(
        "session of a request",
        _session,
        lambda: [framed([b"rmk-s-k", b"Bearer x", b""]), framed([b"s", b"Bearer rmk-s-k", b""])],
        one_frame(text_with(_HEAD_PARTS)),
    ),
    Target("ids of responses", _ids, lambda: [b"resp_s-2-i", b"ctr_s-2_0"], text_with(_ID_PARTS)),
)
