"""The forms in which a closed session reaches the trainer, through a whole mesh."""

import zlib
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2
from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_session_can_be_exported_turn_by_turn(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session(export="turns") as session:
            messages: list[Any] = [{"role": "user", "content": "plain"}]
            for _ in range(2):
                answer = await shared.openai(session).chat.completions.create(
                    model="policy", messages=messages
                )
                messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        result = await delivered(client, session)
    first, second = result.trajectories
    assert (first.turns, second.turns) == (1, 2)
    assert second.loss_mask.sum() == second.segments[-1].end - second.segments[-1].start
    size = len(first.token_ids)
    assert second.token_ids[:size].tolist() == first.token_ids.tolist()


async def test_a_session_can_be_exported_as_its_tree(shared: Mesh) -> None:
    ask: list[Any] = [{"role": "user", "content": "plain"}]
    async with shared.client() as client:
        async with client.session(export="tree") as session:
            session.reward = 0.5
            chat = shared.openai(session).chat.completions
            first = await chat.create(model="policy", messages=ask)
            for word in ("left", "right"):
                more = [*ask, first.choices[0].message, {"role": "user", "content": word}]
                await chat.create(model="policy", messages=more)
        result = await delivered(client, session)
    tree = result.tree
    assert (result.trajectories, result.reward, result.turns) == ((), 0.5, 3)
    assert tree is not None
    assert (tree.reasons, len(tree.nodes), len(tree.paths())) == (("EXACT",), 6, 2)
    for at, node in enumerate(tree.nodes):
        if node.sampled:
            start = node.start + node.scaffold_tokens
            assert tree.loss_mask[start : node.end].all()
            assert (tree.policy_versions[start : node.end] == 0).all()
            prompt = tree.path(at)[: tree.position_ids[start]]
            assert zlib.crc32(tree.token_ids[prompt].tobytes()) == node.prompt_crc32
    assert tree.loss_mask.sum() == (tree.policy_versions >= 0).sum()


async def test_an_unknown_form_is_refused(shared: Mesh) -> None:
    unknown: Any = 9
    request = gateway_pb2.CreateSessionRequest(export_mode=unknown)
    async with shared.client() as client:
        with pytest.raises(InvalidFieldError, match="export_mode"):
            await client.open_session(request)
