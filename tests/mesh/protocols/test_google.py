"""The published google-genai package against a whole mesh of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from rollmesh.client import Session
from tests.agents.trajectories import check_main, delivered
from tests.lazily import genai
from tests.mesh.protocols import multiplying
from tests.mesh.protocols.multiplying import BROKEN, REPLIES
from tests.meshes import Mesh

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession"),
]
RULES = multiplying.RULES
TOOL: dict[str, Any] = {
    "name": "calculator",
    "description": "Multiplies.",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}},
}
FIELDS: dict[str, Any] = {
    "tools": [{"function_declarations": [TOOL]}],
    "system_instruction": "You compute.",
    "thinking_config": {"include_thoughts": True},
    "automatic_function_calling": {"disable": True},
}


@asynccontextmanager
async def asking(session: Session) -> AsyncIterator[Any]:
    """The published client, unmodified, pointed at a session."""
    base_url = session.base_url.removesuffix("/v1")
    options: Any = {"base_url": base_url, "timeout": 30_000}
    async with genai.Client(api_key="static", http_options=options).aio as agent:
        yield agent


async def ask(agent: Any, contents: Any, **config: Any) -> list[Any]:
    """The contents of an answer, as a list."""
    answer = await agent.models.generate_content(model="policy", contents=contents, config=config)
    return [answer]


async def streamed(agent: Any, contents: Any, **config: Any) -> list[Any]:
    """The chunks of an answer."""
    stream = await agent.models.generate_content_stream(
        model="policy", contents=contents, config=config
    )
    return [chunk async for chunk in stream]


both = pytest.mark.parametrize("form", [ask, streamed])


def parts(answer: list[Any]) -> list[Any]:
    return [part for chunk in answer for part in chunk.candidates[0].content.parts]


def echo(answer: list[Any]) -> list[Any]:
    """The contents of an answer as the SDK's chats keep them: one for each chunk."""
    return [chunk.candidates[0].content for chunk in answer]


def said(answer: list[Any]) -> tuple[str, str, list[Any]]:
    """The thoughts, the text and the arguments of an answer."""
    found = parts(answer)
    thoughts = "".join(part.text or "" for part in found if part.thought)
    text = "".join(part.text or "" for part in found if not part.thought)
    return thoughts, text, [part.function_call.args for part in found if part.function_call]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def results(answer: list[Any], *outputs: Any, ids: bool = True) -> dict[str, Any]:
    calls = [part.function_call for part in parts(answer) if part.function_call]
    return {
        "role": "user",
        "parts": [
            {
                "function_response": {
                    "name": call.name,
                    "response": {"output": output},
                    **({"id": call.id} if ids else {}),
                }
            }
            for call, output in zip(calls, outputs, strict=True)
        ],
    }


@both
async def test_a_tool_loop_with_thoughts_is_one_exact_trajectory(thinking: Mesh, form: Any) -> None:
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            first = await form(agent, [user("compute")], **FIELDS)
            assert said(first) == (
                "I take the tool.",
                " I will compute.",
                [{"a": 6, "b": 7.0, "s": "/"}, {"a": 100, "b": 2}],
            )
            signed = [part for part in parts(first) if part.thought_signature]
            assert [part.function_call.args["a"] for part in signed] == [6]
            assert first[-1].candidates[0].finish_reason == "STOP"
            history = [user("compute"), *echo(first), results(first, "42", "100")]
            second = await form(agent, history, **FIELDS)
            assert said(second) == ("Add nothing.", "  It is 42. \n", [])
            history += [*echo(second), user("thanks")]
            third = await form(agent, history, **FIELDS)
            usage = third[-1].usage_metadata
            assert (
                usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
            )
        result = await delivered(client, session)
    check_main(thinking, result, REPLIES)


@both
async def test_an_echo_without_thoughts_and_ids_and_signatures_keeps_its_tokens(
    thinking: Mesh, form: Any
) -> None:
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            first = await form(agent, [user("compute")], **FIELDS)
            _, text, arguments = said(first)
            calls = [{"function_call": {"name": "calculator", "args": one}} for one in arguments]
            model = {"role": "model", "parts": [{"text": text}, *calls]}
            history = [user("compute"), model, results(first, "42", "100", ids=False)]
            second = await form(agent, history, **FIELDS)
            history += [{"role": "model", "parts": [{"text": said(second)[1].strip()}]}]
            await form(agent, [*history, user("thanks")], **FIELDS)
        result = await delivered(client, session)
    check_main(thinking, result, REPLIES, "LENIENT_ECHO")


@both
async def test_thoughts_that_are_not_asked_for_keep_their_tokens_by_their_signature(
    thinking: Mesh, form: Any
) -> None:
    fields = {**FIELDS, "thinking_config": None}
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            first = await form(agent, [user("compute")], **fields)
            assert said(first)[:2] == ("", " I will compute.")
            # Of two equal answers the signature names the one that is continued.
            second = await form(agent, [user("compute")], **fields)
            signatures = {
                part.thought_signature
                for part in [*parts(first), *parts(second)]
                if part.thought_signature
            }
            assert len(signatures) == 2
            history = [user("compute"), *echo(first), results(first, "42", "100")]
            await form(agent, history, **fields)
        result = await delivered(client, session)
    assert sorted(one.turns for one in result.trajectories) == [1, 2]
    (main,) = (one for one in result.trajectories if one.turns == 2)
    assert set(main.reasons) <= {"EXACT", "TEMPLATE_REWRITE", "SHARED_PREFIX"}


@both
async def test_a_tampered_signature_is_refused_by_name(thinking: Mesh, form: Any) -> None:
    async with thinking.client() as client, client.session() as session, client.session() as other:
        async with asking(session) as agent, asking(other) as stranger:
            first = await form(agent, [user("compute")], **FIELDS)
            history = [user("compute"), *echo(first), results(first, "42", "100")]
            with pytest.raises(genai.errors.ClientError, match="is no signature of this session"):
                await form(stranger, history, **FIELDS)
            (signed,) = (part for part in parts(first) if part.thought_signature)
            signed.thought_signature = signed.thought_signature[:-1] + b"~"
            with pytest.raises(genai.errors.ClientError) as caught:
                await form(agent, history, **FIELDS)
            field = caught.value.details["error"]["details"][-1]["fieldViolations"][0]["field"]
            assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
            assert field.startswith("contents[")
            assert field.endswith("].thoughtSignature")
            signed.thought_signature = b"skip_thought_signature_validator"
            await form(agent, history, **FIELDS)


async def test_functions_that_the_sdk_calls_by_itself_are_one_trajectory(thinking: Mesh) -> None:
    def calculator(a: float, b: float, s: str = "") -> float:
        """Multiplies."""
        return 42 if s else 100

    fields = {**FIELDS, "tools": [calculator], "automatic_function_calling": None}
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            chat = agent.chats.create(model="policy", config=fields)
            assert (await chat.send_message("compute")).text == "  It is 42. \n"
            stream = await chat.send_message_stream("thanks")
            assert "".join([chunk.text or "" async for chunk in stream]) == REPLIES[2]
        result = await delivered(client, session)
    check_main(thinking, result, REPLIES)


async def test_a_session_may_mix_protocols_on_one_path(thinking: Mesh) -> None:
    function = {
        "name": "calculator",
        "description": "Multiplies.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            openai = thinking.openai(session)
            system, asked = (
                {"role": "system", "content": "You compute."},
                {"role": "user", "content": "compute"},
            )
            first = await openai.chat.completions.create(
                model="policy",
                messages=[system, asked],  # type: ignore[list-item]
                tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
            )
            message = first.choices[0].message
            calls = [
                {"function_call": {"id": call.id, "name": "calculator", "args": args}}
                for call, args in zip(
                    message.tool_calls or [], ({"a": 6, "b": 7, "s": "/"}, {"a": 100, "b": 2}),
                    strict=True,
                )
            ]  # fmt: skip
            model = {"role": "model", "parts": [{"text": message.content}, *calls]}
            outputs = [
                {"function_response": {"name": "calculator", "response": {"output": output}}}
                for output in ("42", "100")
            ]
            history = [user("compute"), model, {"role": "user", "parts": outputs}]
            await ask(agent, history, **FIELDS)
        result = await delivered(client, session)
    check_main(thinking, result, REPLIES[:2])


@both
async def test_arguments_that_are_no_json_come_back_as_they_were_sampled(
    thinking: Mesh, form: Any
) -> None:
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            first = await form(agent, [user("broken")], **FIELDS)
            history = [user("broken"), *echo(first), results(first, "6")]
            await form(agent, history, **FIELDS)
        result = await delivered(client, session)
    check_main(thinking, result, [BROKEN, "It is 6."], "MALFORMED_TOOL_CALL")


@both
async def test_candidates_have_their_log_probabilities(thinking: Mesh, form: Any) -> None:
    fields: Any = {"candidate_count": 2, "response_logprobs": True, "logprobs": 2}
    async with thinking.client() as client, client.session() as session, asking(session) as agent:
        answer = await form(agent, [user("plain")], **fields)
    for index in range(2):
        mine = [one for chunk in answer for one in chunk.candidates if one.index == index]
        text = "".join(part.text or "" for one in mine for part in one.content.parts)
        assert text == "The answer is 42."
        results = [one.logprobs_result for one in mine if one.logprobs_result]
        chosen = [token for one in results for token in one.chosen_candidates]
        tops = [top for one in results for top in one.top_candidates]
        assert "".join(token.token for token in chosen).startswith(text)
        assert len(tops) == len(chosen)
        assert all(len(top.candidates) == 2 for top in tops)
        usage = answer[-1].usage_metadata
        assert usage.candidates_token_count == 2 * len(chosen)


async def test_a_stream_without_sse_is_one_array(thinking: Mesh) -> None:
    async with thinking.client() as client, client.session() as session:
        root = session.base_url.removesuffix("/v1")
        async with httpx2.AsyncClient(base_url=root, timeout=60) as http:
            url, body = "v1/models/policy:streamGenerateContent", {"contents": [user("plain")]}
            answer = await http.post(f"/{url}", json=body)
            assert answer.headers["content-type"] == "application/json"
            found = [one["candidates"][0]["content"]["parts"] for one in answer.json()]
            assert len(found) > 1
            assert "".join(one["text"] for some in found for one in some) == "The answer is 42."
            keyed = f"http://{thinking.addresses.sidecar}/{url}?alt=sse&key={session.api_key}"
            answer = await http.post(keyed, json=body)
            assert answer.headers["content-type"].startswith("text/event-stream")


async def test_errors_have_the_form_that_the_sdk_expects(thinking: Mesh) -> None:
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            with pytest.raises(
                genai.errors.ClientError,
                match=r"The input token count \(\d+\) exceeds the maximum number of tokens allowed",
            ):
                await ask(agent, [user("word " * 9000)])
            with pytest.raises(genai.errors.ClientError, match="temperature") as caught:
                await ask(agent, [user("plain")], temperature=9)
            assert "'generationConfig.temperature: " in str(caught.value)
        async with asking(session) as agent:
            for form in (ask, streamed):
                with pytest.raises(genai.errors.ClientError) as caught:
                    await form(agent, [user("plain")])
                assert (caught.value.code, caught.value.status) == (409, "FAILED_PRECONDITION")
                reason = caught.value.details["error"]["details"][0]["reason"]
                assert reason == "SESSION_CLOSED"
