"""Images through a whole mesh of real processes, by the published clients of each protocol."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import pytest_asyncio
from PIL import Image

from rollmesh.chat import Tokenizer
from rollmesh.client import Session
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2, trajectory_pb2
from tests.chat.images.pictures import data_url, picture
from tests.lazily import anthropic
from tests.meshes import Mesh, delivered, scripted_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>'
RULES = [("compute", CALL), ("</tool_response>", "It is a cat."), ("plain", "You are welcome.")]
CAT, DOG, OWL = picture(64, 64), picture(96, 64, seed=1), picture(64, 32, seed=2)
"""Of 4, 6 and 2 ids."""
PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(tmp_path_factory: pytest.TempPathFactory, vision_dir: Path) -> AsyncIterator[Mesh]:
    """A mesh whose model takes images."""
    folder = tmp_path_factory.mktemp("seeing")
    async with scripted_mesh(folder, vision_dir, RULES) as mesh:
        yield mesh


class Agent(ABC):
    """An agent that resends its conversation with every turn."""

    text = "text"
    """Type of a part with text."""

    def __init__(self, client: Any) -> None:
        self.history: list[Any] = []
        self._client = client
        self._call = ""

    async def ask(self, data: bytes | None, text: str) -> None:
        """Says an image and a text, and keeps the answer."""
        shown = [] if data is None else [self.part(data)]
        self.history.append({"role": "user", "content": [*shown, self._said(text)]})
        await self._post()

    async def give(self, data: bytes) -> None:
        """Gives an image as the result of the last call, and keeps the answer."""
        self.history.append(self._result([self._said("Seen: "), self.part(data)]))
        await self._post()

    def _said(self, text: str) -> dict[str, Any]:
        return {"type": self.text, "text": text}

    @staticmethod
    @abstractmethod
    def part(data: bytes) -> dict[str, Any]:
        """Returns the part of an image."""

    @abstractmethod
    def _result(self, content: list[Any]) -> dict[str, Any]: ...

    @abstractmethod
    async def _post(self) -> None: ...


class Chat(Agent):
    @staticmethod
    def part(data: bytes) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "auto"}}

    def _result(self, content: list[Any]) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self._call, "content": content}

    async def _post(self) -> None:
        tool: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
        answer = await self._client.chat.completions.create(
            model="policy", messages=self.history, tools=[tool]
        )
        message = answer.choices[0].message
        self.history.append(message)
        self._call = message.tool_calls[0].id if message.tool_calls else ""


class Responses(Agent):
    text = "input_text"

    @staticmethod
    def part(data: bytes) -> dict[str, Any]:
        return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}

    def _result(self, content: list[Any]) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": self._call, "output": content}

    async def _post(self) -> None:
        tool: Any = {"type": "function", "name": "look", "parameters": PARAMETERS}
        answer = await self._client.responses.create(
            model="policy", input=self.history, tools=[tool]
        )
        self.history += answer.output
        self._call = next((one.call_id for one in answer.output if one.type == "function_call"), "")


class Messages(Agent):
    @staticmethod
    def part(data: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        return {"type": "image", "source": source}

    def _result(self, content: list[Any]) -> dict[str, Any]:
        result = {"type": "tool_result", "tool_use_id": self._call, "content": content}
        return {"role": "user", "content": [result]}

    async def _post(self) -> None:
        tool: Any = {"name": "look", "input_schema": PARAMETERS}
        answer = await self._client.messages.create(
            model="policy", max_tokens=200, messages=self.history, tools=[tool]
        )
        self.history.append({"role": "assistant", "content": answer.content})
        self._call = next((one.id for one in answer.content if one.type == "tool_use"), "")


def anthropic_of(mesh: Mesh, session: Session) -> anthropic.AsyncAnthropic:
    client = anthropic.AsyncAnthropic(
        base_url=session.base_url.removesuffix("/v1"), api_key="static", max_retries=0
    )
    mesh.stack.push_async_callback(client.close)
    return client


def agent_of(mesh: Mesh, session: Session, protocol: str) -> Agent:
    if protocol == "messages":
        return Messages(anthropic_of(mesh, session))
    client = mesh.openai(session)
    return Chat(client) if protocol == "chat" else Responses(client)


async def record_of(mesh: Mesh, session: Session) -> session_pb2.SessionRecord:
    """What the collector stores of a session."""
    channel = open_channel(mesh.address("collector"))
    try:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        request = collector_pb2.ReadSessionsRequest(session_id=session.session_id)
        (response,) = [one async for one in stub.ReadSessions(request)]
        return response.session
    finally:
        await channel.close()


def check(
    trajectory: trajectory_pb2.Trajectory, vision_dir: Path, *shown: tuple[bytes, int]
) -> None:
    """Asserts that the ids that stand for images are exactly those that the trajectory names."""
    pad = Tokenizer(vision_dir).special_id("<|image_pad|>")
    ids = np.frombuffer(trajectory.tokens.token_ids_u32le, "<u4")
    told = np.zeros(len(ids), bool)
    for one in trajectory.images:
        told[one.start : one.start + one.tokens] = True
    assert np.array_equal(ids == pad, told)
    assert [(one.sha256, one.tokens) for one in trajectory.images] == [
        (hashlib.sha256(data).hexdigest(), tokens) for data, tokens in shown
    ]


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
async def test_three_turns_and_a_branch_with_images_are_exact(
    seeing: Mesh, vision_dir: Path, protocol: str
) -> None:
    async with seeing.client() as client:
        async with client.session() as session:
            agent = agent_of(seeing, session, protocol)
            await agent.ask(CAT, "compute")
            begun = list(agent.history)
            await agent.give(DOG)
            await seeing.restart("gateway")
            await agent.ask(CAT, "plain")
            agent.history = begun
            await agent.give(OWL)
        await delivered(client, session)
    record = await record_of(seeing, session)
    assert sorted(one.data for one in record.images) == sorted((CAT, DOG, OWL))
    main, branch = record.trajectories
    assert (main.turns, branch.turns) == (3, 2)
    assert list(main.reasons) == [trajectory_pb2.FIDELITY_REASON_EXACT]
    check(main, vision_dir, (CAT, 4), (DOG, 6), (CAT, 4))
    check(branch, vision_dir, (CAT, 4), (OWL, 2))


async def test_protocols_continue_one_path_with_images(seeing: Mesh, vision_dir: Path) -> None:
    async with seeing.client() as client:
        async with client.session() as session:
            chat, responses = (agent_of(seeing, session, name) for name in ("chat", "responses"))
            await chat.ask(CAT, "plain")
            await responses.ask(CAT, "plain")
            openai_client = seeing.openai(session)
            opening: Any = {"role": "user", "content": [Responses.part(DOG), _said("plain")]}
            first = await openai_client.responses.create(model="policy", input=[opening])
            going_on: Any = {"role": "user", "content": [Responses.part(OWL), _said("plain")]}
            second = await openai_client.responses.create(
                model="policy", previous_response_id=first.id, input=[going_on]
            )
            counted = await openai_client.responses.input_tokens.count(
                model="policy",
                previous_response_id=second.id,
                input=[{"role": "user", "content": [_said("plain")]}],
            )
            assert second.usage is not None
            assert counted.input_tokens > second.usage.input_tokens
        await delivered(client, session)
    record = await record_of(seeing, session)
    assert sorted(len(one.images) for one in record.trajectories) == [1, 1, 2]
    check(record.trajectories[2], vision_dir, (DOG, 6), (OWL, 2))


def _said(text: str) -> Any:
    return {"type": "input_text", "text": text}


@pytest.mark.parametrize(
    ("protocol", "status"), [("chat", 429), ("responses", 429), ("messages", 529)]
)
async def test_an_image_whose_decoder_the_machine_kills_may_be_tried_again(
    seeing: Mesh, protocol: str, status: int
) -> None:
    gateway = psutil.Process(seeing.processes["gateway"].pid)
    async with seeing.client() as client, client.session() as session:
        agent = agent_of(seeing, session, protocol)
        asking = asyncio.create_task(agent.ask(slow(), "plain"))
        while not asking.done():  # as the kernel does while memory is short
            for one in gateway.children():
                with suppress(psutil.NoSuchProcess):
                    if "rollmesh.runtime.decoding_worker" in one.cmdline():
                        one.kill()
            await asyncio.wait({asking}, timeout=0.01)
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
            await asking
        assert caught.value.status_code == status
        assert int(caught.value.response.headers["retry-after"]) > 0
        await agent_of(seeing, session, protocol).ask(CAT, "plain")


def slow() -> bytes:
    """A file whose decoding takes a while."""
    file = io.BytesIO()
    Image.effect_noise((3000, 3000), 50).save(file, "JPEG", progressive=True)
    return file.getvalue()
