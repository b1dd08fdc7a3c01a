"""OpenAI's Responses, by the published package, against a whole mesh of real processes."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL: Any = {
    "type": "function",
    "name": "calculator",
    "parameters": {"type": "object", "properties": {}},
}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 6,  "b":7.0}}\n</tool_call>'
PRINTED = CALL.replace('6,  "b":7.0', '6, "b": 7.0')
SHELL = '<tool_call>\n{"name": "apply", "arguments": {"input": "*** Begin\\n+1"}}\n</tool_call>'
SPAWN = '<tool_call>\n{"name": "crew__spawn", "arguments": {"task": "a"}}\n</tool_call>'
RULES = [
    ("plain", "  The answer is 42. \n"),
    ("compute", f" I will compute.\n\n{CALL}"),
    ("as printed", PRINTED),
    ("</tool_response>", "It is 42."),
    ("as json", '{"sum": 42}'),
    ("patch it", SHELL),
    ("spawn one", SPAWN),
    ("at length", "The answer is 42. " * 80),
]


async def ask(agent: AsyncOpenAI, given: Any, *, streamed: bool = False, **fields: Any) -> Any:
    if not streamed:
        return await agent.responses.create(model="policy", input=given, **fields)
    async with agent.responses.stream(model="policy", input=given, **fields) as stream:
        return await stream.get_final_response()


def result(call: Any, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_loop_is_one_exact_trajectory(shared: Mesh, *, streamed: bool) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            given: list[Any] = [{"role": "user", "content": "as printed"}]
            first = await ask(agent, given, tools=[TOOL], streamed=streamed)
            (call,) = first.output
            assert (call.type, call.name, call.arguments) == (
                "function_call",
                "calculator",
                '{"a": 6, "b": 7.0}',
            )
            given += [*first.output, result(call, "42")]
            last = await ask(agent, given, tools=[TOOL], streamed=streamed)
            assert (last.status, last.output_text) == ("completed", "It is 42.")
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.turns, trajectory.reasons) == (2, ("EXACT",))


async def test_chat_and_responses_continue_the_same_path(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            first = await ask(agent, "as printed", tools=[TOOL], instructions="You compute.")
            (call,) = first.output
            function = {"name": call.name, "arguments": call.arguments}
            messages: list[Any] = [
                {"role": "system", "content": "You compute."},
                {"role": "user", "content": [{"type": "text", "text": "as printed"}]},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": call.call_id, "content": "42"},
            ]
            await agent.chat.completions.create(
                model="policy", messages=messages, tools=[CHAT_TOOL]
            )
            given = [
                {"role": "developer", "content": "You compute."},
                {"role": "user", "content": [{"type": "input_text", "text": "as printed"}]},
                *first.output,
                result(call, "42"),
                {"role": "assistant", "content": "It is 42."},
                {"role": "user", "content": "plain"},
            ]
            await ask(agent, given, tools=[TOOL])
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.turns, trajectory.reasons) == (3, ("EXACT",))


async def test_a_previous_response_is_continued_from_the_tree(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            fields: Any = {"tools": [TOOL], "instructions": "You compute."}
            first = await ask(agent, "as printed", **fields)
            output = result(first.output[0], "42")
            last = await ask(agent, [output], previous_response_id=first.id, **fields)
            await ask(agent, "plain", previous_response_id=last.id, streamed=True, **fields)
            # Without instructions of its own a request has none: they are not carried over.
            await ask(agent, "plain", previous_response_id=last.id, tools=[TOOL])
        trajectories = (await delivered(client, session)).trajectories
    assert sorted(one.turns for one in trajectories) == [1, 3]


async def test_a_previous_response_is_itself_even_if_another_sample_is_equal(shared: Mesh) -> None:
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        first, second = [await ask(agent, "plain") for _ in range(2)]
        for one in (first, second, first):
            await ask(agent, "compute", previous_response_id=one.id)
        question = {"role": "user", "content": "compute"}
        for one in (first, second):
            await ask(agent, [{"role": "user", "content": "plain"}, *one.output, question])
        turns = (await client.transcript(session)).turns[2:]
    at_first, at_second, *others = [turn.parent_node_id for turn in turns]
    assert at_first != at_second
    assert others == [at_first, at_first, at_second]


async def test_responses_are_found_by_any_sidecar_and_after_a_restart(shared: Mesh) -> None:
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        stream = await agent.responses.create(
            model="policy", input="compute", tools=[TOOL], stream=True
        )
        *_, last = [event async for event in stream]
        assert last.type == "response.completed"
        made = last.response
        for service in ("sidecar", "gateway"):
            await shared.restart(service)
        found = await agent.responses.retrieve(made.id)
        assert [one.to_dict() for one in found.output] == [one.to_dict() for one in made.output]
        assert (found.status, found.usage, found.model) == ("completed", made.usage, "policy")
        deleted: Any = await agent.responses.with_raw_response.delete(made.id)
        assert deleted.http_response.json() == {
            "id": made.id,
            "object": "response",
            "deleted": True,
        }
        await shared.restart("gateway")
        with pytest.raises(NotFoundError) as caught:
            await agent.responses.retrieve(made.id)
        assert caught.value.code == "answer_unknown"
        with pytest.raises(BadRequestError) as refused:
            await ask(agent, "plain", previous_response_id=made.id)
        assert refused.value.code == "previous_response_not_found"


async def test_a_response_of_another_session_is_unknown(shared: Mesh) -> None:
    async with shared.client() as client, client.session() as one, client.session() as other:
        made = await ask(shared.openai(one), "plain")
        with pytest.raises(NotFoundError):
            await shared.openai(other).responses.retrieve(made.id)
        with pytest.raises(BadRequestError):
            await ask(shared.openai(other), "plain", previous_response_id=made.id)


async def test_items_may_be_referred_to(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            first = await ask(agent, "compute", tools=[TOOL])
            message, call = first.output
            references = [{"type": "item_reference", "id": one.id} for one in (message, call)]
            given = [{"role": "user", "content": "compute"}, *references, result(call, "42")]
            assert (await ask(agent, given, tools=[TOOL])).output_text == "It is 42."
            with pytest.raises(BadRequestError) as caught:
                await ask(agent, [{"type": "item_reference", "id": "msg_0-1"}])
            assert caught.value.param == "input[0].id"
        (trajectory,) = (await delivered(client, session)).trajectories
    assert trajectory.turns == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_custom_tool_and_a_namespace_are_one_path(shared: Mesh, *, streamed: bool) -> None:
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
    tools: list[Any] = [
        {"type": "custom", "name": "apply", "description": "Applies."},
        {"type": "namespace", "name": "crew", "description": "Others.", "tools": [spawn]},
        {"type": "web_search", "external_web_access": True},
    ]
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            first = await ask(agent, "patch it", tools=tools, streamed=streamed)
            (call,) = first.output
            assert (call.type, call.name, call.input) == (
                "custom_tool_call",
                "apply",
                "*** Begin\n+1",
            )
            given: list[Any] = [{"role": "user", "content": "patch it"}, call]
            given += [{**result(call, "done"), "type": "custom_tool_call_output"}]
            last = await ask(agent, given, tools=tools, streamed=streamed)
            given += [*last.output, {"role": "user", "content": "spawn one"}]
            (call,) = (await ask(agent, given, tools=tools, streamed=streamed)).output
            assert (call.type, call.namespace, call.name) == ("function_call", "crew", "spawn")
            given += [call, result(call, "42")]
            await ask(agent, given, tools=tools, streamed=streamed)
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.turns, trajectory.reasons) == (4, ("EXACT",))


async def test_the_size_of_a_prompt_equals_the_turns_usage(shared: Mesh) -> None:
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        fields: Any = {"input": "compute", "tools": [TOOL], "instructions": "You compute."}
        counted = await agent.responses.input_tokens.count(model="policy", **fields)
        made = await agent.responses.create(model="policy", **fields)
        following: Any = {"previous_response_id": made.id, "input": "plain", "tools": [TOOL]}
        counted_next = await agent.responses.input_tokens.count(model="policy", **following)
        made_next = await agent.responses.create(model="policy", **following)
    assert counted.input_tokens == made.usage.input_tokens
    assert counted_next.input_tokens == made_next.usage.input_tokens
