"""The edge of a turn: where its body is read."""

import threading
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.openai_chat.protocol import ChatCompletions
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    answering,
    done,
    serving,
    sidecar_of,
)


@pytest.mark.parametrize(("characters", "off_the_loop"), [(1_000, False), (300_000, True)])
async def test_a_large_body_is_read_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, *, characters: int, off_the_loop: bool
) -> None:
    gateway, threads = ScriptedGateway(), list[int]()

    def noted(*request: Any) -> Any:
        threads.append(threading.get_ident())
        return read(*request)

    read = ChatCompletions.read
    monkeypatch.setattr(ChatCompletions, "read", noted)
    gateway.script = answering(done("short"))
    async with (
        serving(gateway) as address,
        sidecar_of(SidecarConfig(gateway=address)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as agent,
    ):
        answer = await agent.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x" * characters}]
        )
    assert answer.choices[0].message.content == "short"
    assert [one != threading.get_ident() for one in threads] == [off_the_loop]
