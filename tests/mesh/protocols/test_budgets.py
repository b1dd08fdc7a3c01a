"""Budgets of sessions as unmodified SDKs see them: a final answer, or an error without retries."""

import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from rollmesh.client import Budget, Session
from tests.lazily import genai
from tests.meshes import Mesh, delivered

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession"),
]
RULES = [("plain", "The answer is 42."), ("long", "word " * 200)]
FINAL = "I have to stop here: the budget of calls is spent."
MESSAGES: list[Any] = [{"role": "user", "content": "plain"}]
OTHER: list[Any] = [{"role": "user", "content": "plain again"}]


def claude(session: Session, retries: int = 2) -> AsyncAnthropic:
    base = session.base_url.removesuffix("/v1")
    return AsyncAnthropic(base_url=base, api_key=session.api_key, max_retries=retries)


def gemini(session: Session) -> Any:
    base = session.base_url.removesuffix("/v1")
    options = genai.types.HttpOptions(base_url=base)
    return genai.Client(api_key=session.api_key, http_options=options).aio


async def test_every_protocol_ends_with_a_clean_final_answer(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session(budget=Budget(calls=1)) as session:
            agent = shared.openai(session)
            await agent.chat.completions.create(model="policy", messages=MESSAGES)
            chat = await agent.chat.completions.create(
                model="policy", messages=OTHER, logprobs=True, extra_body={"return_token_ids": True}
            )
            assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (
                FINAL,
                "stop",
            )
            stream = await agent.chat.completions.create(
                model="policy", messages=OTHER, stream=True, logprobs=True
            )
            chunks = [one async for one in stream]
            assert "".join(one.choices[0].delta.content or "" for one in chunks) == FINAL
            assert chunks[-1].choices[0].finish_reason == "stop"
            response = await agent.responses.create(model="policy", input="plain again")
            assert (response.output_text, response.status) == (FINAL, "completed")
            async with agent.responses.stream(model="policy", input="plain again") as events:
                assert (await events.get_final_response()).output_text == FINAL
            async with claude(session) as anthropics:
                fields: Any = {"model": "policy", "max_tokens": 64, "messages": OTHER}
                message = await anthropics.messages.create(**fields)
                assert [one.text for one in message.content if one.type == "text"] == [FINAL]
                assert message.stop_reason == "end_turn"
                async with anthropics.messages.stream(**fields) as texts:
                    assert await texts.get_final_text() == FINAL
            google = gemini(session)
            content = await google.models.generate_content(model="policy", contents="plain again")
            assert content.text == FINAL
            parts = await google.models.generate_content_stream(model="policy", contents="again")
            assert "".join([one.text or "" async for one in parts]) == FINAL
        result = await delivered(client, session)
    assert (result.turns, result.budgets_spent) == (1, ("CALLS",))


async def test_every_protocol_refuses_in_its_own_shape_and_no_sdk_tries_again(
    shared: Mesh,
) -> None:
    budget = Budget(calls=1, when_spent="refuse")
    async with shared.client() as client, client.session(budget=budget) as session:
        agent = shared.openai(session, max_retries=2)
        await agent.chat.completions.create(model="policy", messages=MESSAGES)
        for refused in (
            agent.chat.completions.create(model="policy", messages=OTHER),
            agent.chat.completions.create(model="policy", messages=OTHER, stream=True),
            agent.responses.create(model="policy", input="plain again"),
        ):
            with pytest.raises(openai.BadRequestError, match="budget of calls is spent") as error:
                await refused
            assert error.value.code == "budget_spent"
            assert error.value.response.headers["x-should-retry"] == "false"
            assert error.value.response.request.headers["x-stainless-retry-count"] == "0"
        async with claude(session) as anthropics:
            with pytest.raises(anthropic.BadRequestError, match="budget of calls") as stopped:
                await anthropics.messages.create(model="policy", max_tokens=64, messages=OTHER)
            assert stopped.value.response.headers["x-should-retry"] == "false"
            assert json.loads(stopped.value.response.text)["type"] == "error"
        with pytest.raises(genai.errors.ClientError, match="budget of calls is spent") as halted:
            await gemini(session).models.generate_content(model="policy", contents="again")
        assert halted.value.code == 400
