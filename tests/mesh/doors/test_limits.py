"""Limits of a session: an error with its reason, never a loss."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.meshes import Mesh, delivered, scripted_mesh

ASK: list[Any] = [{"role": "user", "content": "hello"}]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("limit", ["nodes", "tokens", "bytes"])
async def test_a_full_session_says_so_and_keeps_its_turns(shared: Mesh, limit: str) -> None:
    await shared.restart("gateway", **{f"max_session_{limit}": 2})
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session, max_retries=5)
            await agent.chat.completions.create(model="policy", messages=ASK)
            other: list[Any] = [{"role": "user", "content": "another conversation"}]
            with pytest.raises(openai.BadRequestError) as refused:
                await agent.chat.completions.create(model="policy", messages=other)
        assert refused.value.code == "session_limit"
        assert f"max_session_{limit}" in str(refused.value)
        assert (await delivered(client, session)).trajectories[0].turns == 1


async def test_a_session_whose_record_would_be_too_large_says_so_and_can_be_closed(
    shared: Mesh,
) -> None:
    await shared.restart("gateway", max_session_record_bytes=40_000)
    asks: list[Any] = [[{"role": "user", "content": f"{at} hello " * 20}] for at in range(20)]
    async with shared.client() as client:
        async with client.session() as session:
            chat = shared.openai(session, max_retries=5).chat.completions
            calls = (chat.create(model="policy", messages=ask, max_tokens=8) for ask in asks)
            answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, openai.BadRequestError)]
        answered = [one for one in answers if not isinstance(one, BaseException)]
        assert len(refused) + len(answered) == len(asks)
        assert len(refused) > 0 < len(answered)
        assert all(one.code == "session_limit" for one in refused)
        assert all("max_session_record_bytes" in str(one) for one in refused)
        result = await delivered(client, session)
    assert len(result.trajectories) == len(answered)
    assert sum(9 * len(one.token_ids) for one in result.trajectories) < 40_000


async def test_an_engine_with_another_vocabulary_is_not_the_agents_fault(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, vocabulary_tokens=10) as mesh,
        mesh.client() as client,
        client.session() as session,
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            await mesh.openai(session).chat.completions.create(model="policy", messages=ASK)
    assert (refused.value.status_code, refused.value.code) == (500, "engine_mismatch")


async def test_template_options_that_cannot_be_continued_are_the_agents_fault(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tokenizer_dir.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    template = model / "chat_template.jinja"
    refuses = "{% if count %}{{ raise_exception('no') }}{% endif %}"
    template.write_text(refuses + template.read_text())
    options = {"chat_template_kwargs": {"count": True}}
    async with (
        scripted_mesh(tmp_path, model) as mesh,
        mesh.client() as client,
        client.session() as session,
    ):
        with pytest.raises(openai.BadRequestError, match="chat template"):
            await mesh.openai(session).chat.completions.create(
                model="policy", messages=ASK, extra_body=options
            )
