"""What agents do to answers before they echo them, by the published packages, over each protocol.

Whatever they drop or inline, the session is one conversation of all turns as they were sampled.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.chat import Tokenizer
from rollmesh.client import Session, SessionResult
from tests.lazily import anthropic
from tests.meshes import Mesh, delivered, scripted_mesh, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


THOUGHTS = ["I take the tool.", "Once more.", "Add nothing.", "They\n\nare kind."]
TEXTS = [" I will compute.", "And again.", "It is 42.", "You are\n\n\nwelcome. \r\nBye."]
CALLS = [called('{"a": 6,  "b":7.0}') + "\n" + called("{}"), called('{"a": 1E2}'), "", ""]
REPLIES = [
    f"<think>\n{thought}\n</think>\n\n{text}" + (f"\n\n{call}" if call else "")
    for thought, text, call in zip(THOUGHTS, TEXTS, CALLS, strict=True)
]
TITLE, FINAL = "A sum", "The sum is 42."
RULES = [
    ("compute", REPLIES[0]),
    ("one\n</tool_response>", REPLIES[1]),
    ("other\n</tool_response>", REPLIES[1]),
    ("two\n</tool_response>", REPLIES[2]),
    ("thanks", REPLIES[3]),
    ("more", "Done."),
    ("title", TITLE),
    ("answer now", FINAL),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}
]


Parts = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, text, and the ids and arguments of the calls of an answer."""


def as_sampled(parts: Parts) -> Parts:
    return parts


def text_dropped(parts: Parts) -> Parts:
    _, text, calls = parts
    return "", "" if calls else text, calls


def inlined(parts: Parts) -> Parts:
    thought, text, calls = parts
    return "", f"<think>\n{thought}\n</think>\n{text}", calls


def merged(parts: Parts) -> Parts:
    thought, text, calls = parts
    return thought, f"<think>{thought}</think>{text}", calls


def folded(parts: Parts) -> Parts:
    thought, text, calls = parts
    quoted = html.escape("\n".join(f"> {line}" for line in thought.strip().splitlines()))
    fold = (
        f'<details type="reasoning" done="true" duration="2">\n<summary>Thought</summary>\n{quoted}'
    )
    return "", f"{fold}\n</details>\n{text.strip()}" if thought else text, calls


def blank_lines_dropped(parts: Parts) -> Parts:
    thought, text, calls = parts
    lines = [line.rstrip() for line in text.splitlines()]
    return thought, "\n".join(line for line in lines if line), calls


async def by_chat(thinking: Mesh, session: Session, change: Callable[[Parts], Parts]) -> None:
    async with thinking.openai(session) as agent:
        history: list[Any] = [{"role": "user", "content": "compute"}]
        results = ["one", "two"]
        for _ in range(5):
            answer = await agent.chat.completions.create(
                model="policy", messages=history, tools=CHAT_TOOLS
            )
            message: Any = answer.choices[0].message
            sampled = [(one.id, one.function.arguments) for one in message.tool_calls or ()]
            thought, text, calls = change(
                (getattr(message, "reasoning_content", None) or "", message.content or "", sampled)
            )
            echo: dict[str, Any] = {"role": "assistant", "content": text or None, "name": "crew"}
            if thought:
                echo["reasoning_content"] = thought
            if calls:
                echo["tool_calls"] = [
                    {
                        "id": one,
                        "type": "function",
                        "function": {"name": "calculator", "arguments": given},
                    }
                    for one, given in calls
                ]
            history.append(echo)
            result = results.pop(0) if calls else ""
            history += [
                {"role": "tool", "tool_call_id": one, "content": result} for one, _ in calls
            ] or [{"role": "user", "content": "more" if "thanks" in str(history) else "thanks"}]


async def by_responses(thinking: Mesh, session: Session, change: Callable[[Parts], Parts]) -> None:
    async with thinking.openai(session) as agent:
        tools: Any = [{"type": "function", "name": "calculator", "parameters": SCHEMA}]
        history: list[Any] = [{"role": "user", "content": "compute"}]
        results = ["one", "two"]
        for _ in range(5):
            answer: Any = await agent.responses.create(model="policy", input=history, tools=tools)
            items = answer.output
            thoughts = [
                part.text for one in items if one.type == "reasoning" for part in one.content
            ]
            sampled = [(one.call_id, one.arguments) for one in items if one.type == "function_call"]
            _, text, calls = change(("".join(thoughts), answer.output_text, sampled))
            if text:
                history.append({"role": "assistant", "content": text})
            history += [
                {"type": "function_call", "call_id": one, "name": "calculator", "arguments": given}
                for one, given in calls
            ]
            result = results.pop(0) if calls else ""
            history += [
                {"type": "function_call_output", "call_id": one, "output": result}
                for one, _ in calls
            ] or [{"role": "user", "content": "more" if "thanks" in str(history) else "thanks"}]


async def by_messages(thinking: Mesh, session: Session, change: Callable[[Parts], Parts]) -> None:
    url = session.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as agent:
        history: list[Any] = [{"role": "user", "content": "compute"}]
        results = ["one", "two"]
        for _ in range(5):
            answer: Any = await agent.messages.create(
                model="policy",
                max_tokens=1000,
                messages=history,
                tools=[{"name": "calculator", "input_schema": SCHEMA}],
            )
            blocks = answer.content
            thoughts = [one.thinking for one in blocks if one.type == "thinking"]
            texts = [one.text for one in blocks if one.type == "text"]
            sampled = [(one.id, json.dumps(one.input)) for one in blocks if one.type == "tool_use"]
            _, text, calls = change(("".join(thoughts), "".join(texts), sampled))
            mark = {"cache_control": {"type": "ephemeral"}}
            echo: list[Any] = [{"type": "text", "text": text, **mark}] if text else []
            echo += [
                {"type": "tool_use", "id": one, "name": "calculator", "input": json.loads(given)}
                for one, given in calls
            ]
            history.append({"role": "assistant", "content": echo})
            result = results.pop(0) if calls else ""
            given: Any = [
                {"type": "tool_result", "tool_use_id": one, "content": result} for one, _ in calls
            ]
            more = "more" if "thanks" in str(history) else "thanks"
            history.append({"role": "user", "content": given or more})


async def worked(
    thinking: Mesh, speak: Callable[..., Any], change: Callable[[Parts], Parts]
) -> SessionResult:
    async with thinking.client() as client:
        async with client.session() as session:
            await speak(thinking, session, change)
        return await delivered(client, session)


@pytest.mark.parametrize("speak", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize(
    "change",
    [as_sampled, text_dropped, inlined, merged, folded, blank_lines_dropped],
)
async def test_an_echo_continues_the_sample_over_every_protocol(
    thinking: Mesh, speak: Callable[..., Any], change: Callable[[Parts], Parts]
) -> None:
    result = await worked(thinking, speak, change)
    (main,) = result.trajectories
    assert (main.lineage, main.turns) == ("MAIN", 5)
    sampled = [main.token_ids[s.start : s.end].tolist() for s in main.segments if s.sampled]
    encode = Tokenizer(thinking.model).encode
    assert sampled == [encode(f"{one}<|im_end|>").tolist() for one in (*REPLIES, "Done.")]
    assert main.loss_mask.sum() == sum(map(len, sampled))
    changed = change is not as_sampled or speak is by_chat  # a name is added there
    assert ("LENIENT_ECHO" in main.reasons) == changed
    assert set(main.reasons) <= {"EXACT", "LENIENT_ECHO", "TEMPLATE_REWRITE"}


@pytest.mark.parametrize("renamed", ["with its text", "without its text"])
async def test_ids_that_the_agent_made_up_tell_no_sample(thinking: Mesh, renamed: str) -> None:
    def change(parts: Parts) -> Parts:
        thought, text, calls = parts
        own = [(f"own{at}", given) for at, (_, given) in enumerate(calls)]
        return thought, text if renamed == "with its text" or not calls else "", own

    result = await worked(thinking, by_chat, change)
    turns = sorted(one.turns for one in result.trajectories)
    assert turns == ([5] if renamed == "with its text" else [1, 1, 3])


async def test_results_of_tools_may_come_in_another_order(thinking: Mesh) -> None:
    async with thinking.client() as client:
        async with client.session() as session, thinking.openai(session) as agent:
            asked: list[Any] = [{"role": "user", "content": "compute"}]
            answer = await agent.chat.completions.create(
                model="policy", messages=asked, tools=CHAT_TOOLS
            )
            echo: Any = answer.choices[0].message.model_dump(exclude={"content"}, exclude_none=True)
            results: list[Any] = [
                {"role": "tool", "tool_call_id": one["id"], "content": "one"}
                for one in reversed(echo["tool_calls"])
            ]
            await agent.chat.completions.create(
                model="policy", messages=[*asked, echo, *results], tools=CHAT_TOOLS
            )
        result = await delivered(client, session)
    assert [(one.lineage, one.turns) for one in result.trajectories] == [("MAIN", 2)]


async def test_a_title_before_the_work_and_a_final_answer_after_it(thinking: Mesh) -> None:
    async with thinking.client() as client:
        async with client.session() as session, thinking.openai(session) as agent:
            create = agent.chat.completions.create
            asked: list[Any] = [
                {"role": "system", "content": "Work."},
                {"role": "user", "content": "compute"},
            ]
            title: list[Any] = [{"role": "user", "content": "title"}]
            await create(model="policy", messages=title)
            answer = await create(model="policy", messages=asked, tools=CHAT_TOOLS)
            message: Any = answer.choices[0].message
            history = [*asked, message]
            history += [
                {"role": "tool", "tool_call_id": one.id, "content": "one"}
                for one in message.tool_calls
            ]
            answer = await create(model="policy", messages=history, tools=CHAT_TOOLS)
            again: Any = answer.choices[0].message
            system: Any = {"role": "system", "content": "The agent got stuck. Answer for it."}
            tail: list[Any] = [
                {"role": "assistant", "content": f"{again.content} I called the calculator."},
                {"role": "user", "content": "It said two. Please answer now."},
            ]
            await create(model="policy", messages=[system, *history[1:], *tail])
        result = await delivered(client, session)
    first, work, final = result.trajectories
    assert (first.lineage, work.lineage, final.lineage) == ("AUXILIARY", "MAIN", "MAIN")
    assert "TOOLS_CHANGED" not in {*work.reasons, *final.reasons}
    assert work.loss_mask.any()
    assert final.loss_mask.any()


def kimis(text: str) -> str:
    return (
        f"{text}<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )


@pytest.mark.parametrize("texts", [("I add.", "I count."), ("I add.", "I add.")])
async def test_an_echo_of_two_samples_with_the_ids_of_the_model_continues_equal_ones_only(
    tmp_path: Path, tokenizer_dir: Path, texts: tuple[str, str]
) -> None:
    tokenizer, rest = Tokenizer(tokenizer_dir), [("42", "It is 42.")]
    first = {"gateway": {"tool_parser": "kimi_k2"}}
    rules = [("compute", kimis(texts[0])), *rest]
    async with scripted_mesh(tmp_path, tokenizer_dir, rules, first=first) as mesh:
        async with mesh.client() as client:
            async with client.session() as session, mesh.openai(session, max_retries=5) as agent:
                create = agent.chat.completions.create
                asked: list[Any] = [{"role": "user", "content": "compute"}]
                answer = await create(model="policy", messages=asked, tools=CHAT_TOOLS)
                rules = [("compute", kimis(texts[1])), *rest]
                write_script(tmp_path / "script.json", tokenizer, rules)
                await mesh.restart("engine")
                again = await create(model="policy", messages=asked, tools=CHAT_TOOLS)
                messages: list[Any] = [one.choices[0].message for one in (answer, again)]
                assert [one.content for one in messages] == list(texts)
                ids = {one.tool_calls[0].id for one in messages}
                assert ids == {"functions.calculator:0"}
                echo = messages[0].model_dump(exclude={"content"}, exclude_none=True)
                result = {"role": "tool", "tool_call_id": ids.pop(), "content": "42"}
                history = [*asked, echo, result]
                await create(model="policy", messages=history, tools=CHAT_TOOLS)
            trajectories = (await delivered(client, session)).trajectories
    continued = texts[0] == texts[1]
    assert sorted(one.turns for one in trajectories) == ([1, 2] if continued else [1, 1, 1])
    assert any("LENIENT_ECHO" in one.reasons for one in trajectories) == continued
