"""Images in a gateway: read once, placed exactly, sent to engines that lack them, and kept."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio

from rollmesh.chat import Tokenizer
from rollmesh.runtime.codec import check_session
from rollmesh.runtime.rpc import from_rpc_error, open_channel
from rollmesh.v1 import (
    chat_pb2,
    collector_pb2,
    collector_pb2_grpc,
    gateway_pb2,
    session_pb2,
    template_pb2,
)
from tests.chat.images.pictures import picture
from tests.gateway.live import LiveMesh
from tests.messages import close_of, said

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOL = chat_pb2.ROLE_TOOL
CAT, DOG, OWL = picture(64, 64), picture(96, 64, seed=1), picture(64, 32, seed=2)
"""Of 4, 6 and 2 ids."""


def seeing(
    *parts: str | bytes, role: chat_pb2.Role.ValueType = chat_pb2.ROLE_USER
) -> chat_pb2.ChatMessage:
    """A message with texts and images. A text of 64 characters is the hash of an image."""
    return chat_pb2.ChatMessage(role=role, content=[part(one) for one in parts])


def part(one: str | bytes) -> chat_pb2.ContentPart:
    if isinstance(one, bytes):
        return chat_pb2.ContentPart(image=chat_pb2.Media(data=one))
    if len(one) == 64:
        return chat_pb2.ContentPart(image=chat_pb2.Media(sha256=one))
    return chat_pb2.ContentPart(text=one)


@dataclass
class Agent:
    """One session, whose conversation is resent with every turn."""

    mesh: LiveMesh
    opened: gateway_pb2.CreateSessionResponse
    history: list[chat_pb2.ChatMessage] = field(default_factory=list)

    async def ask(self, *messages: chat_pb2.ChatMessage) -> gateway_pb2.ChatAnswer:
        self.history += messages
        answer = await self.post(self.history)
        self.history.append(answer.message)
        return answer

    async def post(
        self, messages: Sequence[chat_pb2.ChatMessage], choices: int = 1
    ) -> gateway_pb2.ChatAnswer:
        response = await self.mesh.stub.Chat(
            gateway_pb2.ChatRequest(
                session_id=self.opened.session_id,
                session_key=self.opened.session_key,
                messages=messages,
                choices=choices,
            )
        )
        return response.answers[0]

    async def close(self) -> session_pb2.SessionRecord:
        """The record that a trainer gets."""
        await self.mesh.stub.CloseSession(close_of(self.opened))
        channel = open_channel(self.mesh.collector)
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        name = f"reader-of-{self.opened.session_id}"
        consumer = collector_pb2.Consumer(name=name, unit=collector_pb2.DELIVERY_UNIT_SESSION)
        await stub.CreateConsumer(collector_pb2.CreateConsumerRequest(consumer=consumer))
        call = stub.Subscribe()
        await call.write(
            collector_pb2.SubscribeRequest(hello=collector_pb2.SubscribeHello(consumer=name))
        )
        await call.write(
            collector_pb2.SubscribeRequest(grant=collector_pb2.GrantCredits(credits=100))
        )
        try:
            async for response in call:
                for record in response.delivery.sessions:
                    if record.session_id == self.opened.session_id:
                        return record
        finally:
            call.cancel()
            await channel.close()
        raise AssertionError("the session did not come")


async def agent_of(
    mesh: LiveMesh,
    mode: gateway_pb2.ExportMode.ValueType = gateway_pb2.EXPORT_MODE_LEAVES,
) -> Agent:
    request = gateway_pb2.CreateSessionRequest(export_mode=mode)
    return Agent(mesh, await mesh.stub.CreateSession(request))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, vision_dir: Path
) -> AsyncIterator[LiveMesh]:
    async with LiveMesh(tmp_path_factory.mktemp("mesh"), vision_dir) as running:
        yield running


def places(mesh: LiveMesh, vision_dir: Path, at: int = -1) -> list[tuple[bytes, int]]:
    """The images of a generation and their numbers of ids, which are where the engine is told."""
    pad = Tokenizer(vision_dir).special_id("<|image_pad|>")
    generation = mesh.generations[at]
    prompt = np.array(generation.prompt)
    told = np.zeros(len(prompt), bool)
    for one in generation.images:
        told[one.offset : one.offset + one.length] = True
        assert sha256(one.data).hexdigest() == one.sha256
    assert np.array_equal(prompt == pad, told)
    return [(one.data, one.length) for one in generation.images]


async def test_an_image_is_read_placed_and_delivered_once(mesh: LiveMesh, vision_dir: Path) -> None:
    agent = await agent_of(mesh)
    await agent.ask(seeing("What is ", CAT, " this?"))
    assert places(mesh, vision_dir) == [(CAT, 4)]
    await agent.ask(seeing(DOG, CAT))
    assert places(mesh, vision_dir) == [(CAT, 4), (DOG, 6), (CAT, 4)]
    first, second = mesh.generations[-2:]
    assert second.prompt[: len(first.prompt + first.sampled)] == first.prompt + first.sampled
    await agent.ask(said("And now?"))
    *branch, _, _ = agent.history
    await agent.post([*branch[:2], seeing(OWL)])
    assert places(mesh, vision_dir) == [(CAT, 4), (OWL, 2)]
    record = await agent.close()
    check_session(record, "session")
    assert {one.sha256: one.data for one in record.images} == {
        sha256(one).hexdigest(): one for one in (CAT, DOG, OWL)
    }
    assert {one.media_type for one in record.images} == {"image/png"}
    main, other = record.trajectories
    assert (main.turns, other.turns) == (3, 2)
    names = [sha256(one).hexdigest() for one in (CAT, DOG, CAT, OWL)]
    assert [one.sha256 for one in main.images] == names[:3]
    assert [one.sha256 for one in other.images] == [names[0], names[3]]
    pad = Tokenizer(vision_dir).special_id("<|image_pad|>")
    for trajectory in record.trajectories:
        ids = np.frombuffer(trajectory.tokens.token_ids_u32le, "<u4")
        told = np.zeros(len(ids), bool)
        for one in trajectory.images:
            told[one.start : one.start + one.tokens] = True
        assert np.array_equal(ids == pad, told)


async def test_a_tree_has_its_images_too(mesh: LiveMesh) -> None:
    agent = await agent_of(mesh, gateway_pb2.EXPORT_MODE_TREE)
    await agent.ask(seeing(CAT))
    await agent.ask(seeing("r", DOG, role=TOOL))
    await agent.post([seeing(CAT), agent.history[1], seeing(CAT, role=TOOL)])
    record = await agent.close()
    check_session(record, "session")
    names = [sha256(one).hexdigest() for one in (CAT, DOG, CAT)]
    assert [one.sha256 for one in record.tree.images] == names
    assert len(record.images) == 2


async def test_an_answered_image_may_be_named_by_its_hash(mesh: LiveMesh, vision_dir: Path) -> None:
    agent = await agent_of(mesh)
    name = sha256(CAT).hexdigest()
    with pytest.raises(grpc.RpcError) as caught:
        await agent.post([seeing(name)])
    error = from_rpc_error(caught.value)
    assert (error.reason, error.metadata["sha256"]) == ("IMAGE_UNKNOWN", name)
    first = await agent.post([seeing(CAT)])
    await agent.post([seeing(name), first.message, seeing(name, "again")])
    assert places(mesh, vision_dir) == [(CAT, 4), (CAT, 4)]
    stored = await mesh.stub.GetAnswer(
        gateway_pb2.GetAnswerRequest(
            session_id=agent.opened.session_id,
            session_key=agent.opened.session_key,
            answer_id=first.answer_id,
            with_messages=True,
        )
    )
    assert list(stored.messages) == [seeing(name)]
    assert len((await agent.close()).trajectories) == 1


async def test_images_outlive_the_gateway_and_the_engines_caches(
    mesh: LiveMesh, vision_dir: Path
) -> None:
    agent = await agent_of(mesh)
    await agent.ask(seeing(CAT, "a", DOG))
    for backend in mesh.servicers:
        backend.forget_images()
    await mesh.start_gateway()
    await agent.ask(said("b"))
    assert places(mesh, vision_dir) == [(CAT, 4), (DOG, 6)]
    for backend in mesh.servicers:
        backend.forget_images()
    await agent.ask(seeing(sha256(DOG).hexdigest(), OWL))
    assert places(mesh, vision_dir) == [(CAT, 4), (DOG, 6), (DOG, 6), (OWL, 2)]
    record = await agent.close()
    (trajectory,) = record.trajectories
    assert (trajectory.turns, len(trajectory.images), len(record.images)) == (3, 4, 3)


@pytest.mark.parametrize(
    ("message", "reason", "field", "problem"),
    [
        pytest.param(seeing("a", CAT[:-30]), "INVALID_IMAGE", "[1].image", "broken", id="broken"),
        pytest.param(
            seeing(picture(2010, 2)), "INVALID_IMAGE", "[0].image", "2010 x 2", id="too-long"
        ),
        pytest.param(
            seeing(picture(300, 300)), "INVALID_IMAGE", "[0].image", "300 x 300", id="pixels"
        ),
        pytest.param(
            seeing(picture(200, 200, kind="JPEG")),
            "INVALID_IMAGE",
            "[0].image",
            "bytes",
            id="bytes",
        ),
        pytest.param(seeing("f" * 63 + "F"), "INVALID_IMAGE", "[0].image.sha256", "SHA", id="hash"),
        pytest.param(
            chat_pb2.ChatMessage(
                role=chat_pb2.ROLE_USER,
                content=[
                    chat_pb2.ContentPart(image=chat_pb2.Media(data=CAT, media_type="image/webp"))
                ],
            ),
            "INVALID_IMAGE",
            "[0].image",
            "said to be image/webp",
            id="lying",
        ),
        pytest.param(
            chat_pb2.ChatMessage(
                role=chat_pb2.ROLE_USER,
                content=[chat_pb2.ContentPart(image=chat_pb2.Media(uri="http://a/b"))],
            ),
            "UNSUPPORTED_PART",
            "[0].image",
            "URI",
            id="uri",
        ),
        pytest.param(
            seeing(CAT, role=chat_pb2.ROLE_ASSISTANT),
            "UNSUPPORTED_PART",
            "[0].image",
            "assistant messages",
            id="assistant",
        ),
        pytest.param(seeing(*[CAT] * 9), "INVALID_IMAGE", "", "hold 9 images", id="many"),
        pytest.param(
            seeing(*[picture(32, 32, seed=seed) for seed in range(5)]),
            "SESSION_LIMIT",
            "",
            "5 images",
            id="session",
        ),
    ],
)
async def test_an_image_that_cannot_be_shown_is_named_and_nothing_is_kept(
    message: chat_pb2.ChatMessage,
    reason: str,
    field: str,
    problem: str,
    mesh: LiveMesh,
) -> None:
    await mesh.start_gateway(
        max_image_pixels=70_000,
        max_image_bytes=5_000,
        max_conversation_images=8,
        max_session_images=4,
    )
    agent = await agent_of(mesh)
    with pytest.raises(grpc.RpcError, match=problem) as caught:
        await agent.post([said("a"), said("b", chat_pb2.ROLE_ASSISTANT), message])
    error = from_rpc_error(caught.value)
    assert error.reason == reason
    if field:
        assert error.metadata["field"] == f"messages[2].content{field}"
    await agent.post([said("a")])
    assert not (await agent.close()).images


async def test_an_error_names_the_part_as_the_caller_did(mesh: LiveMesh) -> None:
    agent = await agent_of(mesh)
    message = seeing(b"no")
    message.content[0].image.field = "input[7].image_url"
    with pytest.raises(grpc.RpcError, match=r"input\[7\]\.image_url: is not a PNG") as caught:
        await agent.post([message])
    assert from_rpc_error(caught.value).metadata["field"] == "input[7].image_url"


async def test_a_model_without_images_names_the_part(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with LiveMesh(tmp_path, tokenizer_dir) as mesh:
        agent = await agent_of(mesh)
        with pytest.raises(grpc.RpcError, match="takes no images") as caught:
            await agent.post([seeing("a", CAT)])
        assert from_rpc_error(caught.value).metadata["field"] == "messages[0].content[1].image"
        info = await mesh.stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest())
        assert not info.template.image_roles


async def test_the_gateway_says_which_messages_may_hold_images(mesh: LiveMesh) -> None:
    info = await mesh.stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest())
    assert isinstance(info.template, template_pb2.TemplateProfile)
    assert list(info.template.image_roles) == [chat_pb2.ROLE_USER, TOOL]


async def test_choices_of_one_request_share_its_new_images(
    mesh: LiveMesh, vision_dir: Path
) -> None:
    await mesh.start_gateway(max_session_images=1)
    agent = await agent_of(mesh)
    await agent.post([seeing(CAT)], choices=3)
    assert places(mesh, vision_dir) == [(CAT, 4)]
    record = await agent.close()
    assert (len(record.trajectories), len(record.images)) == (3, 1)
