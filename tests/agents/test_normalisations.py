"""How agents echo what they were answered, one rule at a time, through a whole mesh.

Each test asks, echoes the answer changed as some client changes it, and asks again. What is still
the same message keeps its tokens: one trajectory.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from rollmesh.client import Session, SessionResult
from tests.agents.dialogues import ODD, call, result
from tests.agents.trajectories import check_main, delivered
from tests.meshes import Mesh, scripted_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

Said = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiplies.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
TEXT = "  The answer is 42. \n"
LATER = "So it is."
ASKS = {
    "text": f"<think>\nI know.\n</think>\n\n{TEXT}",
    "call": f"<think>\nI take it.\n</think>\n\n I will compute.\n\n{call(ODD)}",
    "bare": call(ODD),
    "two calls": f"{call(ODD)}\n{call('{}')}",
    "odd numbers": call(r'{"a": 1E2, "b":1.50,"note":"x/\/\ud83d\ude00\u2028"}'),
    "a key twice": call('{"b":2, "a":1, "b":3}'),
    "no arguments": call("{}"),
    "broken": '<tool_call>\n{"name": "calculator", "arguments": {"a": 6, "b": \n</tool_call>',
}
RULES = [*ASKS.items(), (result("done"), LATER), ("Go on.", LATER)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, thinking_model: Path
) -> AsyncIterator[Mesh]:
    async with scripted_mesh(tmp_path_factory.mktemp("echoes"), thinking_model, RULES) as running:
        yield running


@dataclass
class Agent:
    """Bodies in, answers out. No client between that would tidy them."""

    session: Session
    http: httpx2.AsyncClient

    async def post(self, *messages: Any, **more: Any) -> Said:
        """Posts `more` over a usual body. Returns the message of the answer."""
        body = {"model": "policy", "messages": messages, "tools": TOOLS, **more}
        response = await self.http.post(
            f"{self.session.base_url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {self.session.api_key}"},
            timeout=60,
        )
        assert response.status_code == 200, response.text
        message: Said = response.json()["choices"][0]["message"]
        return message


class Conversation:
    """One session's agent, and the stored session once it is closed."""

    agent: Agent
    result: SessionResult


@asynccontextmanager
async def conversing(mesh: Mesh) -> AsyncIterator[Conversation]:
    conversation = Conversation()
    async with mesh.client() as client, httpx2.AsyncClient(timeout=60) as http:
        async with client.session() as session:
            conversation.agent = Agent(session, http)
            yield conversation
        conversation.result = await delivered(client, session)


def user(content: Any, **more: Any) -> Said:
    return {"role": "user", "content": content, **more}


def part(text: str, **more: Any) -> Said:
    return {"type": "text", "text": text, **more}


def answers_to(echo: Said) -> list[Said]:
    """What an agent sends after an echo: a result for each call, or its next question."""
    calls = echo.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "done"} for one in calls]
    return results or [user("Go on.")]


def without(*keys: str) -> Callable[[Said], Said]:
    return lambda said: {key: value for key, value in said.items() if key not in keys}


def adding(**more: Any) -> Callable[[Said], Said]:
    return lambda said: {**said, **more}


def with_arguments(rewrite: Callable[[str], str]) -> Callable[[Said], Said]:
    """Rewrites the arguments of every call."""

    def change(said: Said) -> Said:
        calls = [
            {**one, "function": {**one["function"], "arguments": rewrite(given)}}
            for one in said["tool_calls"]
            for given in [one["function"]["arguments"]]
        ]
        return {**said, "tool_calls": calls}

    return change


def with_calls(**more: Any) -> Callable[[Said], Said]:
    return lambda said: {**said, "tool_calls": [{**one, **more} for one in said["tool_calls"]]}


def as_the_stream_helper(said: Said) -> Said:
    calls = [
        {**one, "index": at, "function": {**one["function"], "parsed_arguments": None}}
        for at, one in enumerate(said["tool_calls"])
    ]
    return {**said, "annotations": None, "audio": None, "function_call": None, "parsed": None,
            "tool_calls": calls}  # fmt: skip


def as_litellm(said: Said) -> Said:
    """No content where there is none, and the reasoning twice."""
    fields = {"refusal": None, "reasoning_content": said.get("reasoning_content")}
    kept = {key: value for key, value in said.items() if value is not None}
    return {**kept, "provider_specific_fields": fields}


def reversed_keys(said: Said) -> Said:
    calls = [dict(reversed(one.items())) for one in said["tool_calls"]]
    return dict(reversed({**said, "tool_calls": calls}.items()))


def in_parts(said: Said) -> Said:
    text = said["content"]
    return {**said, "content": [part(text[:4]), part(text[4:], cache_control={"type": "x"})]}


def stripped(said: Said) -> Said:
    return {**said, "content": said["content"].strip()}


@pytest.mark.parametrize(
    ("ask", "change", "reasons"),
    [
        pytest.param("text", adding(), (), id="as it was"),
        pytest.param("text", in_parts, (), id="content in parts"),
        pytest.param("text", without("reasoning_content"), (), id="reasoning dropped"),
        pytest.param("text", adding(reasoning_content=None), (), id="reasoning null"),
        pytest.param(
            "text",
            lambda said: {**without("reasoning_content")(said), "reasoning": "I know."},
            (),
            id="reasoning under its other name",
        ),
        pytest.param("text", adding(tool_calls=[]), (), id="tool calls empty"),
        pytest.param("text", adding(tool_calls=None), (), id="tool calls null"),
        pytest.param("text", without("refusal", "annotations"), (), id="own keys dropped"),
        pytest.param("text", adding(audio=None, function_call=None), (), id="dumped"),
        pytest.param("text", adding(made_up={"x": 1}, cache_control={}), (), id="unknown keys"),
        pytest.param("text", stripped, ("LENIENT_ECHO",), id="text stripped"),
        pytest.param("text", adding(name="worker"), ("LENIENT_ECHO",), id="name of the agent"),
        pytest.param("call", adding(), (), id="call as it was"),
        pytest.param("call", as_the_stream_helper, (), id="call from the stream helper"),
        pytest.param("call", as_litellm, (), id="call from litellm"),
        pytest.param("call", reversed_keys, (), id="keys in another order"),
        pytest.param("call", in_parts, (), id="text before a call in parts"),
        pytest.param("call", with_calls(id="mine"), (), id="ids renamed"),
        pytest.param("call", stripped, ("LENIENT_ECHO",), id="text before a call stripped"),
        pytest.param("call", adding(name="worker"), ("LENIENT_ECHO",), id="name and call"),
        pytest.param("bare", adding(content=None), (), id="content null"),
        pytest.param("bare", adding(content=""), (), id="content empty"),
        pytest.param("bare", adding(content=[]), (), id="content of no parts"),
        pytest.param("bare", without("content"), (), id="content missing"),
        pytest.param("bare", as_litellm, (), id="bare call from litellm"),
        pytest.param("two calls", adding(), (), id="two calls"),
        pytest.param(
            "two calls",
            with_arguments(lambda given: json.dumps(json.loads(given), ensure_ascii=False)),
            (),
            id="arguments re-serialised",
        ),
        pytest.param(
            "two calls",
            with_arguments(lambda given: json.dumps(json.loads(given), sort_keys=True, indent=1)),
            (),
            id="arguments sorted and indented",
        ),
        pytest.param(
            "odd numbers",
            with_arguments(lambda _: '{"a": 100.0, "b": 1.5, "note": "x//\U0001f600\u2028"}'),
            (),
            id="numbers and escapes as values",
        ),
        pytest.param(
            "a key twice", with_arguments(lambda _: '{"b": 3, "a": 1}'), (), id="the last key wins"
        ),
        pytest.param(
            "no arguments", with_arguments(lambda _: ""), (), id="no arguments as nothing"
        ),
        pytest.param("broken", adding(), ("MALFORMED_TOOL_CALL",), id="broken arguments kept"),
        pytest.param(
            "broken",
            with_arguments(lambda _: '{"a": 6}'),
            ("LENIENT_ECHO", "MALFORMED_TOOL_CALL"),
            id="broken arguments mended",
        ),
    ],
)
async def test_an_echo_stays_the_message_that_was_sampled(
    mesh: Mesh, ask: str, change: Callable[[Said], Said], reasons: tuple[str, ...]
) -> None:
    async with conversing(mesh) as conversation:
        said = await conversation.agent.post(user(ask))
        echo = change(said)
        last = await conversation.agent.post(user(ask), echo, *answers_to(echo))
    assert last["content"] == LATER
    check_main(mesh, conversation.result, [ASKS[ask], LATER], *reasons)


SYSTEM = {"role": "system", "content": "Be brief."}
DONE = user("Go on.")
# Requests are the first body and the second. `said` stands for the answer to the first.
SAID = object()


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        pytest.param(
            [SYSTEM, user("text")],
            [{"role": "developer", "content": "Be brief."}, user("text"), SAID, DONE],
            {},
            id="developer for system",
        ),
        pytest.param(
            [user([part("te"), part("xt", cache_control={"type": "ephemeral"})])],
            [user("text"), SAID, user([part("Go on.", cache_control={"type": "ephemeral"})])],
            {},
            id="cache marks that move on",
        ),
        pytest.param(
            [user("text")], [user("text"), SAID, SYSTEM, DONE], {}, id="system behind an answer"
        ),
        pytest.param(
            [user("Hello."), user("text")],
            [user("Hello."), user("text"), SAID, user("Well?"), DONE],
            {},
            id="two users in a row",
        ),
        pytest.param(
            [user("text", name="ann")],
            [user("text", name="ann"), SAID, user("Go on.", name="bob")],
            {},
            id="names of users",
        ),
        pytest.param(
            [user("text")],
            [user("text"), SAID, DONE],
            {"tools": [dict(reversed(TOOLS[0].items()))], "tool_choice": "auto"},
            id="tools with their keys in another order",
        ),
        pytest.param(
            [user("text")],
            [user("text"), SAID, DONE],
            {
                "model": "another", "user": "ann", "store": False, "metadata": {"a": "b"},
                "client_metadata": {"x": 1}, "context_management": {}, "output_config": {},
                "prompt_cache_key": "k", "include": [], "service_tier": "auto",
                "parallel_tool_calls": True, "made_up": [1], "temperature": 1.0, "n": 1,
                "stream_options": None, "response_format": {"type": "text"},
            },
            id="keys of the body that change no message",
        ),
    ],
)  # fmt: skip
async def test_a_conversation_goes_on_however_it_is_written(
    mesh: Mesh, first: list[Any], second: list[Any], more: dict[str, Any]
) -> None:
    async with conversing(mesh) as conversation:
        said = await conversation.agent.post(*first)
        await conversation.agent.post(*(said if one is SAID else one for one in second), **more)
    check_main(mesh, conversation.result, [ASKS["text"], LATER])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([part("do"), part("ne")], id="in parts"),
        pytest.param("done", id="as text"),
    ],
)
async def test_results_of_tools_are_text_however_they_come(mesh: Mesh, content: Any) -> None:
    async with conversing(mesh) as conversation:
        post = conversation.agent.post
        said = await post(user("call"))
        tool = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "name": "calculator"}
        later = await post(user("call"), said, {**tool, "content": content})
        final = [user("call"), said, {**tool, "content": "done"}, later, DONE]
        await post(*final)
    check_main(mesh, conversation.result, [ASKS["call"], LATER, LATER])


@pytest.mark.parametrize(
    ("ask", "change"),
    [
        pytest.param("text", adding(content="Another."), id="another text"),
        pytest.param("text", adding(reasoning_content="Another."), id="another reasoning"),
        pytest.param("call", with_arguments(lambda _: '{"a": 7}'), id="other arguments"),
        pytest.param(
            "broken",
            lambda said: adding(reasoning_content="Another.")(
                with_arguments(lambda _: '{"a": 6}')(said)
            ),
            id="mended, with another reasoning",
        ),
        pytest.param("call", without("tool_calls"), id="no call"),
        pytest.param("two calls", lambda said: {**said, "tool_calls": said["tool_calls"][:1]},
                     id="one call of two"),
    ],
)  # fmt: skip
async def test_another_message_branches_and_keeps_the_leaf(
    mesh: Mesh, ask: str, change: Callable[[Said], Said]
) -> None:
    async with conversing(mesh) as conversation:
        echo = change(await conversation.agent.post(user(ask)))
        await conversation.agent.post(user(ask), echo, *answers_to(echo))
    found = [(one.lineage, one.turns) for one in conversation.result.trajectories]
    assert found == [("MAIN", 1), ("BRANCH", 1)]


async def test_a_history_without_the_answer_branches_at_its_parent(mesh: Mesh) -> None:
    async with conversing(mesh) as conversation:
        await conversation.agent.post(user("text"))
        await conversation.agent.post(user("text"), DONE)
    found = [(one.lineage, one.turns) for one in conversation.result.trajectories]
    assert found == [("MAIN", 1), ("BRANCH", 1)]
