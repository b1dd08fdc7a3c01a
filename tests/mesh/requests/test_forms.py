"""Forms of answers that a request asks for, with the published openai package: through a mesh with
the scripted engine, whose script keeps them, and through one with the real model, which is made to.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from rollmesh.chat import Tokenizer
from tests.mesh.protocols.test_openai import ask, streamed, user
from tests.meshes import Mesh, delivered

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "op": {"enum": ["plus", "minus"]}},
    "required": ["a", "op"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("calculator", "look_up")
]


def call(name: str, number: int) -> str:
    arguments = f'{{"a": {number}, "op": "plus"}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE, TWO = call("calculator", 6), f"{call('calculator', 6)}\n{call('look_up', 7)}"
pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = [
    ("one", ONE),
    ("two", TWO),
    ("text between", f"First. {call('calculator', 6)} Then. {call('look_up', 7)}"),
    ("value", '{"n": 4}'),
    ("</tool_response>", "It is 42."),
]
NAMED: Any = {"type": "function", "function": {"name": "calculator"}}


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        pytest.param("auto", "tool_calls", id="auto"),
        pytest.param("required", "tool_calls", id="required"),
        pytest.param(NAMED, "stop", id="named"),
    ],
)
async def test_a_call_ends_as_openai_ends_it(shared: Mesh, choice: Any, finish: str) -> None:
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        whole = (await ask(agent, user("one"), tools=TOOLS, tool_choice=choice)).choices[0]
        assert [one.function.name for one in whole.message.tool_calls] == ["calculator"]
        assert whole.finish_reason == finish
        chunks = await streamed(agent, user("one"), tools=TOOLS, tool_choice=choice)
        assert chunks[-1].choices[0].finish_reason == finish


async def test_constrained_answers_are_marked_and_a_choice_begins_no_root(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            first = await ask(agent, user("one"), tools=TOOLS, tool_choice="required")
            answered = first.choices[0].message.model_dump(exclude_none=True)
            result = {
                "role": "tool",
                "tool_call_id": answered["tool_calls"][0]["id"],
                "content": "42",
            }
            await ask(agent, user("one"), answered, result, tools=TOOLS, tool_choice="auto")
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.turns, trajectory.lineage) == (2, "MAIN")
    assert trajectory.reasons == ("CONSTRAINED",)
    reasons = [segment.reasons for segment in trajectory.segments if segment.sampled]
    assert [len(one) for one in reasons] == [1, 0]


async def test_a_retry_is_told_from_a_request_with_another_form(shared: Mesh) -> None:
    """A body that says it is a retry gets the former answer only where its form is the same."""
    again = {"X-Stainless-Retry-Count": "1"}
    form = {"type": "json_object"}
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        first = await ask(agent, user("value"), tools=TOOLS, response_format=form)
        same = await ask(
            agent, user("value"), tools=TOOLS, response_format=form, extra_headers=again
        )
        assert same.id == first.id
        seen = {first.id}
        empty = {"name": "x", "schema": {"type": "object", "properties": {}}}
        for other in (
            {"response_format": None},
            {"tool_choice": "required"},
            {"tool_choice": NAMED},
            {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
            {"parallel_tool_calls": False},
            {"response_format": {"type": "json_schema", "json_schema": empty}},
            {"response_format": {"type": "json_schema", "json_schema": empty | {"strict": True}}},
        ):
            fields = {"response_format": form} | other
            answer = await ask(agent, user("value"), tools=TOOLS, extra_headers=again, **fields)
            assert answer.id not in seen, other
            seen.add(answer.id)


@pytest.mark.parametrize("said", ["two", "text between"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_an_answer_is_cut_where_a_second_call_begins(
    shared: Mesh, tokenizer_dir: Path, said: str, *, streams: bool
) -> None:
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)
            if streams:
                chunks = await streamed(agent, user(said), **fields)
                deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
                pieces = [one for delta in deltas for one in delta.tool_calls or []]
                assert {piece.index for piece in pieces} == {0}
                assert "".join(one.function.arguments or "" for one in pieces).count("6") == 1
                assert chunks[-1].choices[0].finish_reason == "tool_calls"
            else:
                choice = (await ask(agent, user(said), **fields)).choices[0]
                (only,) = choice.message.tool_calls
                assert json.loads(only.function.arguments) == {"a": 6, "op": "plus"}
                assert choice.finish_reason == "tool_calls"
                assert choice.message.content == ("First. Then." if said != "two" else None)
        (trajectory,) = (await delivered(client, session)).trajectories
    assert trajectory.reasons == ("STOP_STRING",)
    sampled = trajectory.token_ids[trajectory.loss_mask]
    text = Tokenizer(tokenizer_dir).rust.decode(sampled.tolist())
    assert text.rstrip().endswith("</tool_call>" if said == "two" else "Then.")
    assert "look_up" not in text


async def test_one_call_that_ends_by_itself_is_exact(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            await ask(shared.openai(session), user("one"), tools=TOOLS, parallel_tool_calls=False)
        (trajectory,) = (await delivered(client, session)).trajectories
    assert trajectory.reasons == ("EXACT",)
    assert trajectory.token_ids[-1] == 2  # its end token was sampled and is kept


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        pytest.param("tool_choice", {"tool_choice": "required"}, id="no tools"),
        pytest.param("tool_choice", {"tool_choice": NAMED}, id="named without tools"),
        pytest.param(
            "tool_choice",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}},
            id="no such tool",
        ),
    ],
)
async def test_a_choice_that_cannot_be_met_is_refused(
    shared: Mesh, param: str, fields: Any
) -> None:
    async with shared.client() as client, client.session() as session:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(shared.openai(session), user("one"), **fields)
    assert caught.value.param == param


WIDE = {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(2000)}}


async def test_a_schema_that_would_hold_everybody_up_is_refused(shared: Mesh) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE}}
    async with shared.client() as client, client.session() as session:
        with pytest.raises(openai.BadRequestError, match="2000 optional properties") as caught:
            await ask(shared.openai(session), user("one"), response_format=form)
    assert caught.value.param == "response_format"
    assert caught.value.code == "invalid_constraint"


class Point(BaseModel):
    """What an agent wants back."""

    x: int = Field(ge=0, le=99)
    name: str = Field(max_length=8)
    kind: Literal["near", "far"]


class TestOnTheRealModel:
    """Random weights at temperature 1: what keeps its form here was made to."""

    pytestmark: ClassVar[list[Any]] = [
        pytest.mark.vllm,
        pytest.mark.asyncio(loop_scope="session"),
    ]

    async def test_pydantic_models_are_parsed(self, vllm_mesh: Mesh) -> None:
        async with vllm_mesh.client() as client, client.session() as session:
            for seed in range(6):
                answer = await vllm_mesh.openai(session).chat.completions.parse(
                    model="policy",
                    messages=[{"role": "user", "content": "Where?"}],
                    response_format=Point,
                    seed=seed,
                    max_tokens=400,
                )
                assert isinstance(answer.choices[0].message.parsed, Point)
                assert answer.choices[0].finish_reason == "stop"

    async def test_required_and_named_give_calls_of_the_tools(self, vllm_mesh: Mesh) -> None:
        fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 500, "parallel_tool_calls": False}
        async with vllm_mesh.client() as client, client.session() as session:
            agent = vllm_mesh.openai(session)
            for seed in range(4):
                for choice in ("required", NAMED):
                    answer = await ask(agent, user("Go"), tool_choice=choice, seed=seed, **fields)
                    message = answer.choices[0].message
                    (only,) = message.tool_calls
                    value = json.loads(only.function.arguments)
                    assert set(value) == {"a", "op"}
                    assert isinstance(value["a"], int)
                    assert message.content is None
                    assert choice == "required" or only.function.name == "calculator"

    async def test_the_limit_cuts_a_forced_call(self, vllm_mesh: Mesh) -> None:
        async with vllm_mesh.client() as client:
            async with client.session() as session:
                answer = await ask(
                    vllm_mesh.openai(session),
                    user("Go"),
                    tools=TOOLS,
                    tool_choice=NAMED,
                    max_tokens=5,
                )
                assert answer.choices[0].finish_reason == "length"
            record = await delivered(client, session)
        (trajectory,) = record.trajectories
        assert {"CONSTRAINED", "LENGTH_CUT"} <= set(trajectory.reasons)

    async def test_a_schema_that_cannot_be_kept_is_refused_by_its_parameter(
        self, vllm_mesh: Mesh
    ) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}}
        for more, problem in (({"strict": True}, "multipleOf"), ({"schema": {"type": 7}}, "Type")):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}
            async with vllm_mesh.client() as client, client.session() as session:
                with pytest.raises(openai.BadRequestError, match=problem) as caught:
                    await ask(vllm_mesh.openai(session), user("Go"), response_format=form)
            assert caught.value.param == "response_format"
            assert caught.value.code == "invalid_constraint"
