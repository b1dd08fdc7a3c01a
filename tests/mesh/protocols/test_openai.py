"""The published openai package against a whole mesh of real processes."""

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.meshes import Mesh, delivered, scripted_mesh, until_free

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 6,  "b":7.0}}\n</tool_call>'
PRINTED = CALL.replace('6,  "b":7.0', '6, "b": 7.0')
RULES = [
    ("plain", "  The answer is 42. \n"),
    ("compute", f" I will compute.\n\n{CALL}"),
    ("as printed", PRINTED),
    ("twice", f"{CALL}\n{CALL}"),
    ("</tool_response>", "It is 42."),
    ("broken", '<tool_call>\n{"name": "calculator", "arguments": {"a": 6, "b": \n</tool_call>'),
    ("garbage", "<tool_call>not json</tool_call>"),
    ("stop here", "one two three four"),
    ("at length", "The answer is 42. " * 80),  # a slow engine takes longer than any test
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask(agent: AsyncOpenAI, *messages: Any, **fields: Any) -> Any:
    return await agent.chat.completions.create(model="policy", messages=list(messages), **fields)


async def streamed(agent: AsyncOpenAI, *messages: Any, **fields: Any) -> list[Any]:
    stream = await ask(agent, *messages, stream=True, **fields)
    return [chunk async for chunk in stream]


async def test_a_tool_loop_is_one_trajectory_of_sampled_tokens(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session(metadata={"task": "7"}) as session:
            agent = shared.openai(session)
            messages: list[Any] = [user("compute")]
            first = (await ask(agent, *messages, tools=TOOLS)).choices[0]
            assert first.finish_reason == "tool_calls"
            assert first.message.content == " I will compute."
            (call,) = first.message.tool_calls
            assert (call.function.name, call.function.arguments) == (
                "calculator",
                '{"a": 6,  "b":7.0}',
            )
            messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
            last = (await ask(agent, *messages, tools=TOOLS)).choices[0]
            assert (last.finish_reason, last.message.content) == ("stop", "It is 42.")
            session.reward = 1.0
        result = await delivered(client, session)
    assert (result.outcome, result.reward, result.metadata) == ("COMPLETED", 1.0, {"task": "7"})
    (trajectory,) = result.trajectories
    assert (trajectory.turns, trajectory.lineage) == (2, "MAIN")
    # The template would print the arguments with other whitespace. The second turn reports it.
    assert trajectory.reasons == ("TEMPLATE_REWRITE",)
    # An oracle of its own: the reference implementation's render of the whole conversation, plus
    # the second space in the arguments, which was sampled and which no render would restore.
    from transformers import AutoTokenizer  # it imports torch

    reference = AutoTokenizer.from_pretrained(shared.model)
    whole = [*messages, {"role": "assistant", "content": "It is 42."}]
    whole[1] = {
        "role": "assistant",
        "content": " I will compute.",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "calculator", "arguments": {"a": 6, "b": 7.0}},
            }
        ],
    }
    text = reference.apply_chat_template(whole, tools=TOOLS, tokenize=False).removesuffix("\n")
    text = text.replace(" I will compute.\n<", " I will compute.\n\n<")
    text = text.replace('"arguments": {"a": 6, "b": 7.0}}', '"arguments": {"a": 6,  "b":7.0}}')
    assert reference.decode(trajectory.token_ids.tolist()) == text
    assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {0}
    assert set(trajectory.policy_versions[~trajectory.loss_mask].tolist()) == {-1}


async def test_tokens_leave_as_they_are_sampled(slow: Mesh) -> None:
    async with slow.client() as client, client.session() as session:
        await until_free(client)
        stream = await ask(slow.openai(session), user("at length"), stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        replicas = (await client.replicas()).replicas
        assert sum(replica.leases for replica in replicas) == 1  # the answer is still being sampled
        await stream.close()


async def test_an_overloaded_mesh_says_when_to_come_back(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    first = {"gateway": {"lease_timeout_ms": 2000}}
    async with scripted_mesh(
        tmp_path, tokenizer_dir, RULES, first=first, tokens_per_second=20, lease_capacity=1
    ) as mesh:
        async with mesh.client() as client, client.session() as one, client.session() as two:
            stream = await ask(mesh.openai(one), user("at length"), stream=True)
            await anext(aiter(stream))  # it has its lease
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(mesh.openai(two), user("plain"))
            assert int(caught.value.response.headers["retry-after"]) >= 1
            await stream.close()


async def test_a_close_ends_running_generations(slow: Mesh) -> None:
    async with slow.client() as client:
        async with client.session() as session:
            stream = await ask(slow.openai(session), user("at length"), stream=True)
            await anext(aiter(stream))
            await client.close_session(session)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        result = await delivered(client, session)
        await until_free(client)
    assert (result.turns, result.trajectories) == (0, ())


async def test_a_turn_without_tool_choice_goes_on_in_the_same_conversation(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            first = await ask(agent, user("plain"), tools=TOOLS)
            asked = [user("plain"), first.choices[0].message, user("as printed")]
            second = await ask(agent, *asked, tools=TOOLS, tool_choice="none")
        message = second.choices[0].message
        assert (message.tool_calls, message.content) == (None, PRINTED)
        result = await delivered(client, session)
    (trajectory,) = result.trajectories
    assert (trajectory.turns, trajectory.lineage) == (2, "MAIN")
