"""Calls in reasoning: where the answer ends before the reasoning does, the call ended it."""

import json
from collections.abc import Callable

import pytest

from rollmesh.chat import (
    Message,
    ParserEvent,
    ReasoningEvent,
    TextEvent,
    Tokenizer,
    ToolCallEvent,
    make_context,
)
from rollmesh.chat.parsing import (
    MISTRAL_TAGS,
    TAGS,
    Answer,
    AnswerFormat,
    Reading,
    WholeCallParser,
    decoder_of,
)
from tests.chat.parsing.writers import CALL, CALL_END, CALLS, CALLS_END, SEP, Characters

CONTEXT = make_context(
    json.dumps([{"type": "function", "function": {"name": "look_up"}}]).encode(), b""
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
    '<|tool_call_argument_begin|>{"q": "x"}<|tool_call_end|><|tool_calls_section_end|>'
)
CALLED = {
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=q>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"q": "x"}}\n</tool_call>',
    "glm45": "<tool_call>look_up\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "deepseek_v31": f'{CALLS}{CALL}look_up{SEP}{{"q": "x"}}{CALL_END}{CALLS_END}',
    "kimi_k2": KIMI,
    "mistral": '[TOOL_CALLS]look_up[ARGS]{"q": "x"}',
    "lfm2": '<|tool_call_start|>[look_up(q="x")]<|tool_call_end|>',
}


def new_answer(tools: str, *, inside: bool, one_call: bool = False) -> Answer:
    format_ = AnswerFormat(
        tools, reasoning=True, reasoning_tags=MISTRAL_TAGS if tools == "mistral" else TAGS
    )
    parser = format_.parser(CONTEXT)
    return Answer(
        decoder_of(Characters()),  # type: ignore[arg-type]  # all of it that is used
        (),
        parser=parser,
        reasoning=format_.splitter(parser, inside=inside),
        new_call_id=lambda: "id",
        one_call=one_call,
    )


def read(answer: Answer, pieces: list[str]) -> tuple[Message, list[ParserEvent]]:
    events = [event for one in pieces for event in answer.feed(list(map(ord, one)))]
    events += answer.end_text()
    events += answer.finish()
    return answer.message(), events


def streamed(events: list[ParserEvent]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text and calls as an agent has them that reads the stream."""
    thought, text, calls = "", "", list[tuple[str, str]]()
    for event in events:
        match event:
            case ReasoningEvent(more):
                thought += more
            case TextEvent(more):
                text += more
            case ToolCallEvent(name=name) if name:
                calls.append((name, event.arguments))
            case ToolCallEvent(index, arguments=more):
                calls[index] = (calls[index][0], calls[index][1] + more)
    return thought, text, calls


def in_every_cut(
    make: Callable[[], Answer], text: str
) -> tuple[str, str, list[tuple[str, str]], bool]:
    """What an answer has. The same whole, in two pieces, and by character."""
    found = []
    for pieces in [[text], list(text), *([text[:at], text[at:]] for at in range(len(text)))]:
        answer = make()
        message, events = read(answer, pieces)
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        assert streamed(events) == (message.reasoning, message.content, calls), pieces
        found.append((message.reasoning, message.content, calls, answer.malformed))
    assert all(one == found[0] for one in found)
    return found[0]


def in_tags(tools: str, text: str) -> str:
    if tools == "mistral":
        return text.replace(TAGS[0], MISTRAL_TAGS[0]).replace(TAGS[1], MISTRAL_TAGS[1])
    return text


@pytest.mark.parametrize("tools", sorted(CALLED))
@pytest.mark.parametrize("opened_by_prompt", [True, False])
def test_a_call_in_reasoning_that_stays_open_is_a_call(
    tools: str, *, opened_by_prompt: bool
) -> None:
    text = ("" if opened_by_prompt else in_tags(tools, "<think>\n")) + f"Look.\n{CALLED[tools]}"
    found = in_every_cut(lambda: new_answer(tools, inside=opened_by_prompt), text)
    arguments = found[2][0][1] if found[2] else ""
    assert found == ("Look.", "", [("look_up", arguments)], False)
    assert json.loads(arguments) == {"q": "x"}


@pytest.mark.parametrize("tools", sorted(CALLED))
def test_a_call_in_reasoning_that_is_closed_later_is_reasoning(tools: str) -> None:
    text = in_tags(tools, f"Look.\n{CALLED[tools]}\nOr not.\n</think>\n\nNo.")
    found = in_every_cut(lambda: new_answer(tools, inside=True), text)
    assert found == (f"Look.\n{CALLED[tools]}\nOr not.", "No.", [], False)


def test_reasoning_before_a_real_call_may_mention_another() -> None:
    text = f"A {CALLED['hermes']} then.</think>\n\n{CALLED['hermes']}"
    found = in_every_cut(lambda: new_answer("hermes", inside=True), text)
    assert found[:3] == (f"A {CALLED['hermes']} then.", "", [("look_up", '{"q": "x"}')])


@pytest.mark.parametrize(
    "thought", ["I will use <tool_call> then", "<tool_call>\n{}", "Hm. <tool_call>", "a <tool_"]
)
def test_reasoning_that_breaks_off_beside_the_word_of_a_call_stays_reasoning(thought: str) -> None:
    found = in_every_cut(lambda: new_answer("hermes", inside=True), thought)
    assert found[:3] == (thought, "", [])


def test_several_calls_and_text_may_follow_reasoning_that_stays_open() -> None:
    text = f"Look. {CALLED['hermes']}\n{CALLED['hermes']}"
    found = in_every_cut(lambda: new_answer("hermes", inside=True), text)
    assert found[:2] == ("Look.", "")
    assert [name for name, _ in found[2]] == ["look_up", "look_up"]


def test_an_answer_of_one_call_says_that_reasoning_held_a_second() -> None:
    text = f"Look. {CALLED['hermes']}\n{CALLED['hermes']}"
    found = in_every_cut(lambda: new_answer("hermes", inside=True, one_call=True), text)
    assert (len(found[2]), found[3]) == (1, True)


@pytest.mark.parametrize("reading", [None, Reading("", (("look_up", '{"q": "x"}'),))])
def test_a_call_that_vllm_reads_ends_reasoning_too(reading: Reading | None) -> None:
    call = "<seed:tool_call>\n<function=look_up>\n</function>\n</seed:tool_call>"
    answer = new_answer("vllm:seed_oss", inside=True)
    answer.feed(list(map(ord, f"Look. {call}")))
    assert answer.end_text() == []
    whole = answer.whole
    assert isinstance(whole, WholeCallParser)
    assert whole.text.strip() == call
    whole.take(reading)
    answer.finish()
    message = answer.message()
    assert message.content == ""
    assert message.reasoning == ("Look." if reading else f"Look. {call}")
    assert bool(message.tool_calls) == bool(reading)


def test_without_tools_reasoning_holds_nothing_back(tokenizer: Tokenizer) -> None:
    answer = Answer(
        decoder_of(tokenizer),
        (),
        parser=None,
        reasoning=AnswerFormat("hermes", reasoning=True).splitter(None, inside=True),
        new_call_id=lambda: "id",
    )
    said = answer.feed(tokenizer.encode("a <tool_call> b").tolist())
    assert said == [ReasoningEvent("a <tool_call> b")]
