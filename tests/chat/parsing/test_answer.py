import json

import pytest

from rollmesh.chat import Message, ParserEvent, TextEvent, Tokenizer, ToolCallEvent, make_context
from rollmesh.chat.parsing import (
    Answer,
    AnswerFormat,
    Reading,
    ReasoningSplitter,
    decoder_of,
)
from tests.chat.parsing.writers import Characters

CONTEXT = make_context(
    json.dumps([{"type": "function", "function": {"name": name}} for name in "fg"]).encode(), b""
)


def new_answer(tokenizer: Tokenizer, *stops: str) -> Answer:
    return Answer(
        decoder_of(tokenizer),
        stops,
        parser=None,
        reasoning=None,
        new_call_id=lambda: "call",
    )


def test_sessions_that_arrive_together_leave_together(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The answer is 42.").tolist()
    assert len(ids) > 1  # else this shows nothing
    assert new_answer(tokenizer).feed(ids) == [TextEvent("The answer is 42.")]


def test_a_stop_string_cuts_at_its_token_however_the_ids_came(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The answer is 42. I am not sure.").tolist()
    whole, single = new_answer(tokenizer, "42"), new_answer(tokenizer, "42")
    together = whole.feed(ids)
    apart = [event for id_ in ids for event in single.feed([id_])]
    assert together == [TextEvent("The answer is ")]
    assert "".join(one.text for one in apart if isinstance(one, TextEvent)) == "The answer is "
    assert whole.stopped_at == single.stopped_at


@pytest.mark.parametrize("with_parser", [True, False])
def test_a_message_has_its_reasoning_apart_from_its_text(
    tokenizer: Tokenizer, *, with_parser: bool
) -> None:
    hermes = AnswerFormat("hermes", reasoning=False)
    parser = hermes.parser(CONTEXT)
    assert parser is not None
    answer = Answer(
        decoder_of(tokenizer, hermes.delimiters),
        (),
        parser=parser if with_parser else None,
        reasoning=ReasoningSplitter(inside=False),
        new_call_id=lambda: "call",
    )
    text = "<think>\nI am not sure.\n</think>\n\nThe answer is 42."
    for id_ in tokenizer.encode(text).tolist():
        answer.feed([id_])
    answer.end_text()
    answer.finish()
    message = Message("assistant", "The answer is 42.", reasoning="I am not sure.")
    assert answer.message() == message


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 6}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "kept", "content"),
    [
        pytest.param(f"{call('f')}\n{call('g')} more", f"{call('f')}", "", id="two calls"),
        pytest.param(
            f"Ah. {call('f')} Oh. {call('g')}", f"Ah. {call('f')} Oh.", "Ah. Oh.", id="text"
        ),
        pytest.param(f"{call('f')} <tool_call> no", None, " <tool_call> no", id="no second call"),
        pytest.param(call("f"), None, "", id="one call"),
        pytest.param("No call.", None, "No call.", id="none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_of_one_call_ends_where_a_second_begins_however_the_ids_came(
    tokenizer: Tokenizer, text: str, kept: str | None, content: str, size: int
) -> None:
    answer = Answer(
        decoder_of(tokenizer, AnswerFormat("hermes", reasoning=False).delimiters),
        (),
        parser=AnswerFormat("hermes", reasoning=False).parser(CONTEXT),
        reasoning=None,
        new_call_id=lambda: "call",
        one_call=True,
    )
    ids = tokenizer.encode(text).tolist()
    events: list[ParserEvent] = []
    for at in range(0, len(ids), size):
        events += answer.feed(ids[at : at + size])
    events += [*answer.end_text(), *answer.finish()]
    message = answer.message()
    assert len(message.tool_calls) == text.startswith("No") ^ 1
    assert message.content == content
    assert "".join(one.text for one in events if isinstance(one, TextEvent)) == content
    assert all(one.index == 0 for one in events if isinstance(one, ToolCallEvent))
    if kept is None:
        assert answer.stopped_at is None
    else:
        assert answer.stopped_at is not None
        assert tokenizer.rust.decode(ids[: answer.stopped_at]).rstrip() == kept
        assert not answer.malformed


def read_one_call(answer: Answer, ids: list[int]) -> tuple[Message, list[ParserEvent]]:
    """The message and the events of an answer whose ids come one by one."""
    events = [event for one in ids for event in answer.feed([one])]
    events += answer.end_text()
    if answer.whole is not None:
        calls = (("f", '{"a": 6}'), ("g", '{"a": 6}'))
        answer.whole.take(Reading("", calls[: answer.whole.text.count("<tool_call>")]))
    events += answer.finish()
    return answer.message(), events


@pytest.mark.parametrize(
    ("between", "stop"),
    [
        pytest.param("\n", "<tool_call> never", id="it begins with the second call"),
        pytest.param("\n", "\n<tool_call>\n{ never", id="it begins between the calls"),
        pytest.param(" Oh. ", ". <tool_call>\n{ never", id="it begins with text"),
        pytest.param("\n", 'tool_call>\n{"name": "g", "arguments" never', id="until its name"),
        pytest.param("\n", call("g") + " never", id="until the end"),
        pytest.param("\n", "never", id="it never begins"),
    ],
)
def test_an_answer_of_one_call_keeps_no_id_of_the_second_that_a_stop_string_held_back(
    between: str, stop: str
) -> None:
    answer = one_call_answer("hermes", stop)
    text = f"{call('f')}{between}{call('g')}"
    message, events = read_one_call(answer, list(map(ord, text)))
    assert [one.name for one in message.tool_calls] == ["f"]
    assert all(one.index == 0 for one in events if isinstance(one, ToolCallEvent))
    assert answer.stopped_at is not None
    assert text[: answer.stopped_at].rstrip() == (call("f") + between).rstrip()
    assert answer.stop == ""


@pytest.mark.parametrize("stop", ["", "END"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_parser_of_whole_answers_cuts_no_second_call_and_says_that_it_left_it_out(
    calls: int, stop: str
) -> None:
    answer = one_call_answer("vllm:seed_oss", *filter(None, [stop]))
    text = "\n".join([call("f"), call("g")][:calls])
    message, events = read_one_call(answer, list(map(ord, text + stop)))
    assert [one.name for one in message.tool_calls] == ["f"]
    assert {one.index for one in events if isinstance(one, ToolCallEvent)} == {0}
    assert answer.stopped_at == (len(text + stop) if stop else None)
    assert answer.stop == stop
    assert answer.malformed == (calls == 2)


def one_call_answer(tools: str, *stops: str) -> Answer:
    return Answer(
        decoder_of(Characters()),  # type: ignore[arg-type]  # all of it that is used
        stops,
        parser=AnswerFormat(tools, reasoning=False).parser(CONTEXT),
        reasoning=None,
        new_call_id=lambda: "call",
        one_call=True,
    )
