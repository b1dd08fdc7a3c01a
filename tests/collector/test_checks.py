"""What the collector refuses, each time with the name of the field."""

import asyncio
import hashlib
from math import inf, nan
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.runtime.codec import pack_logprobs
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import from_rpc_error
from rollmesh.v1 import collector_pb2, session_pb2
from tests.collector.collectors import (
    GROUP,
    TIMEOUT_S,
    ingest,
    subscribing,
)
from tests.collector.records import record, trajectory, tree_record, with_images, with_messages


def logprobs(last: float) -> bytes:
    """Six, the last of which is given."""
    return pack_logprobs(np.array([0, 0, -0.5, -0.5, -0.5, last], np.float32))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_an_ingest_of_nothing_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Ingest(collector_pb2.IngestRequest(), timeout=TIMEOUT_S)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == "sessions"


HELLO = {"hello": {"consumer": "taken"}}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        pytest.param([{"grant": {"credits": 1}}], "hello", id="no hello"),
        pytest.param([{"hello": {}}], "hello.consumer", id="no name"),
        pytest.param([{"hello": {"consumer": "c" * 129}}], "hello.consumer", id="long name"),
        pytest.param([{"hello": {"consumer": "\n"}}], "hello.consumer", id="unprintable name"),
        pytest.param([HELLO, {"grant": {"credits": 0}}], "grant.credits", id="no credits"),
        pytest.param([HELLO, {"grant": {"credits": 65_537}}], "grant.credits", id="many credits"),
        pytest.param([HELLO, HELLO], "part", id="hello twice"),
        pytest.param(
            [HELLO, {"version": {"policy_version": -1}}],
            "version.policy_version",
            id="negative version",
        ),
    ],
)
async def test_an_ill_formed_subscription_is_refused_by_field(
    stub: Any, messages: list[dict[str, Any]], field: str
) -> None:
    async with subscribing(stub, "taken", GROUP) as taken:
        await taken.opened()
    call = stub.Subscribe()
    for message in messages:
        await call.write(collector_pb2.SubscribeRequest(**message))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        pytest.param("tree", {"trajectories": [trajectory("s")]}, id="beside-trajectories"),
        pytest.param(
            "tree.tokens.logprobs_f32le", {"tree.tokens.logprobs_f32le": b"four"}, id="arrays"
        ),
        pytest.param(
            "tree.tokens.loss_mask_u8", {"tree.tokens.loss_mask_u8": b"\2" * 6}, id="mask"
        ),
        pytest.param("tree.nodes[1]", {"tree.nodes.1.start": 3}, id="gap"),
        pytest.param("tree.nodes[2]", {"tree.nodes.2.end": 7}, id="behind-the-end"),
        pytest.param(
            "tree.nodes[1].scaffold_tokens", {"tree.nodes.1.scaffold_tokens": 3}, id="scaffold"
        ),
        pytest.param("tree.nodes[1].parent_index", {"tree.nodes.1.parent_index": 1}, id="parent"),
        pytest.param("tree.nodes[1].node_id", {"tree.nodes.1.node_id": 1}, id="id-twice"),
        pytest.param("tree.nodes[0].node_id", {"tree.nodes.0.node_id": 0}, id="no-id"),
        pytest.param("tree.nodes", {"tree.nodes.2.end": 5}, id="not-covered"),
        pytest.param("tree.nodes[0].reward", {"tree.nodes.0.reward": 1.0}, id="agent-rewarded"),
        pytest.param("tree.nodes[1].reward", {"tree.nodes.1.reward": nan}, id="reward-no-number"),
        pytest.param("tree.version_spans", {"tree.version_spans.1.end": 7}, id="versions"),
        pytest.param(
            "tree.tokens.logprobs_f32le",
            {"tree.tokens.logprobs_f32le": logprobs(nan)},
            id="logprobs",
        ),
        pytest.param(
            "tree.version_spans[1].policy_version",
            {"tree.version_spans.1.policy_version": -1},
            id="negative-version",
        ),
    ],
)
async def test_a_tree_that_contradicts_itself_is_refused(
    stub: Any, field: str, change: dict[str, Any]
) -> None:
    await refused_by_field(stub, tree_record("s"), field, change)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        pytest.param("images[1].sha256", {"images.1.sha256": sha256(b"cat")}, id="twice"),
        pytest.param("images[0].data_bytes", {"images.0.data_bytes": 4}, id="size"),
        pytest.param("images[0].sha256", {"images.0.data": b"cow"}, id="other-bytes"),
        pytest.param("trajectories[0].images[1]", {"trajectories.0.images.1.start": 0}, id="same"),
        pytest.param(
            "trajectories[0].images[1]", {"trajectories.0.images.1.start": 6}, id="behind"
        ),
        pytest.param("trajectories[0].images[1]", {"trajectories.0.images.1.tokens": 0}, id="none"),
        pytest.param(
            "trajectories[0].images[1]", {"trajectories.0.images.1.tokens": 2}, id="trained"
        ),
        pytest.param(
            "trajectories[0].images[0].sha256",
            {"trajectories.0.images.0.sha256": sha256(b"cow")},
            id="unknown",
        ),
    ],
)
async def test_images_that_are_not_those_of_the_record_are_refused(
    stub: Any, field: str, change: dict[str, Any]
) -> None:
    await refused_by_field(stub, with_images(record("s"), b"cat", b"dog"), field, change)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("session_id", {"session_id": ""}),
        ("outcome", {"outcome": 0}),
        ("sample_index", {"sample_index": 2, "group_size": 2}),
        ("reward", {"reward": nan}),
        ("reward", {"reward": -inf}),
        ("trajectories[0].reward", {"trajectories.0.reward": inf}),
        ("trajectories[1].trajectory_id", {"trajectories": [trajectory("s")]}),
        ("trajectories[0].session_id", {"trajectories.0.session_id": "x"}),
        ("trajectories[0].prompt_tokens", {"trajectories.0.prompt_tokens": 7}),
        ("trajectories[0].segments", {"trajectories.0.segments.1.end": 5}),
        ("trajectories[0].segments[0].reward", {"trajectories.0.segments.0.reward": 1.0}),
        ("trajectories[0].segments[1].reward", {"trajectories.0.segments.1.reward": inf}),
        ("trajectories[0].version_spans", {"trajectories.0.version_spans.0.end": 7}),
        (
            "trajectories[0].version_spans[0].policy_version",
            {"trajectories.0.version_spans.0.policy_version": -1},
        ),
        *(
            (f"trajectories[0].tokens.{name}", {f"trajectories.0.tokens.{name}": value})
            for name, value in [
                ("token_ids_u32le", bytes(5)),
                ("loss_mask_u8", b"\2" * 6),
                ("logprobs_f32le", b""),
                *(("logprobs_f32le", logprobs(last)) for last in (nan, inf, -inf, 2e-4)),
            ]
        ),
    ],
)
async def test_a_bad_session_names_its_field_and_stores_nothing(
    stub: Any, field: str, change: dict[str, Any]
) -> None:
    await refused_by_field(stub, record("s"), field, change)
    stats = await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
    assert stats.sessions == 0


async def test_a_logprob_that_rounding_put_above_0_is_taken(stub: Any) -> None:
    session = record("s")
    session.trajectories[0].tokens.logprobs_f32le = logprobs(5e-5)
    assert not await ingest(stub, session)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("messages[1].data_bytes", {"messages.1.data": b"longer than it says"}),
        ("contexts[0].data_bytes", {"contexts.0.data_bytes": 1}),
        ("messages[1].node_id", {"messages.1.node_id": 1}),
        ("messages[0].parent_node_id", {"messages.0.parent_node_id": 2}),
        ("messages[1].context_index", {"messages.1.context_index": 1}),
    ],
)
async def test_messages_that_form_no_tree_are_refused(
    stub: Any, field: str, change: dict[str, Any]
) -> None:
    await refused_by_field(stub, with_messages(record("s")), field, change)


async def test_a_session_of_text_has_no_tokens(stub: Any) -> None:
    session = with_messages(record("s"))
    session.capture = session_pb2.CAPTURE_TEXT
    await refused_by_field(stub, session, "trajectories[0].tokens", {})
    (row,) = session.trajectories
    row.ClearField("tokens")
    await refused_by_field(stub, session, "trajectories[0].segments[0]", {})
    row.ClearField("version_spans")
    row.prompt_tokens = 0
    del row.segments[0]
    row.segments[0].start = row.segments[0].end = 0
    await ingest(stub, session)
    async with subscribing(stub, "plain", credits_=1) as stream:
        await ingest(stub, record("t"))
        assert await stream.delivered(1) == ["t"]
    rules = collector_pb2.DeliveryFilter(captures=[session_pb2.CAPTURE_TEXT])
    async with subscribing(stub, "text", credits_=1, filter=rules, messages=True) as stream:
        (delivery,) = await stream.deliveries(1)
    row.tokens.SetInParent()
    assert delivery.sessions == [session]


async def refused_by_field(
    stub: Any, session: session_pb2.SessionRecord, field: str, change: dict[str, Any]
) -> None:
    """Changes a session by paths and sees it refused with the field's name."""
    for path, value in change.items():
        *owners, name = path.split(".")
        owner: Any = session
        for part in owners:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        if isinstance(value, list):
            getattr(owner, name).extend(value)
        else:
            setattr(owner, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ingest(stub, session)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidFieldError)
    assert error.field == f"sessions[0].{field}"
