"""The numerics of engines, from their start to a trainer."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import sampling_pb2
from tests.meshes import Mesh, delivered, scripted_mesh

RULES = [("plain", "The answer is 42."), ("next", "I am not sure.")]


async def test_each_token_refers_to_the_numerics_of_its_engine(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, RULES, logprobs="sampled") as mesh,
        mesh.client() as client,
    ):
        await client.check_temperature(0.7)
        async with client.session() as session:
            create = mesh.openai(session).chat.completions.create
            talk: list[Any] = [{"role": "user", "content": "plain"}]
            first = (await create(model="policy", messages=talk)).choices[0].message.content
            await mesh.restart("gateway")  # it reads the first turn from its journal
            talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "next"}]
            await create(model="policy", messages=talk)
        result = await delivered(client, session)
        (engine,) = [
            one.hello for one in (await client.replicas()).replicas if one.hello.lease_capacity
        ]
    assert result.numerics == {engine.numerics.id: engine.numerics}
    assert engine.numerics.logprobs == sampling_pb2.LOGPROBS_MODE_SAMPLED
    (trajectory,) = result.trajectories
    sampled = [(one.start, one.end) for one in trajectory.segments if one.sampled]
    spans = [(one.start, one.end) for one in trajectory.version_spans]
    assert (len(sampled), spans) == (2, sampled)
    assert {one.numerics_id for one in trajectory.version_spans} == {engine.numerics.id}


async def test_a_trainer_is_told_if_the_engines_log_probs_are_not_its_own(mesh: Mesh) -> None:
    async with mesh.client() as client:
        await client.check_temperature(1.0)
        with pytest.raises(InvalidFieldError, match=r'is 0\.7, .* logprobs = "sampled" under'):
            await client.check_temperature(0.7)
