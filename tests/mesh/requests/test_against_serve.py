"""The same requests to a mesh around the real model and to `vllm serve` with the same model."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.mesh.requests.serve import Servers
from tests.mesh.requests.serve_requests import CASES, GONE, PLAIN, Case

_CUT = "\ufffd"

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    text: str
    body: str


async def send(client: httpx2.AsyncClient, case: Case) -> Answer:
    merged = {**PLAIN, **case.fields}
    body = {name: value for name, value in merged.items() if value is not GONE}
    answer = await client.post("/chat/completions", json=body)
    text = answer_text(answer.text, streamed=body.get("stream") is True)
    return Answer(answer.status_code, text, answer.text)


def answer_text(body: str, *, streamed: bool) -> str:
    """What the answer says, calls included.

    One that is cut within a character ends with U+FFFD here, and before it in vLLM.
    """
    if not streamed:
        with suppress(ValueError, KeyError):
            messages = [choice["message"] for choice in json.loads(body)["choices"]]
            return "|".join(
                f"{(one['content'] or '').rstrip(_CUT)}{calls(one)}" for one in messages
            )
        return ""
    chunks = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data")]
    deltas = [
        choice["delta"]
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in json.loads(chunk).get("choices", [])
    ]
    return "".join(delta.get("content") or "" for delta in deltas).rstrip(_CUT)


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    found = [call["function"] for call in message.get("tool_calls") or []]
    return [(one["name"], one["arguments"]) for one in found]


@pytest.mark.parametrize("name", CASES)
async def test_a_request_ends_as_in_vllm_or_it_is_said_why(servers: Servers, name: str) -> None:
    case = CASES[name]
    theirs, ours = await send(servers.vllm, case), await send(servers.mesh, case)
    both = f"vLLM: {theirs.status} {theirs.body[:500]}\nmesh: {ours.status} {ours.body[:500]}"
    assert (ours.status != theirs.status) == bool(case.why), both
    assert ours.status == (case.status or theirs.status), both
    if ours.status == theirs.status == 200:
        assert bool(case.text) or ours.text == theirs.text, both


async def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 150
