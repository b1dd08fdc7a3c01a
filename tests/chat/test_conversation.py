from collections.abc import Iterable
from pathlib import Path

import pytest

from rollmesh.chat import (
    ChatModel,
    Conversation,
    InvalidInputError,
    ParserEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
)
from tests.chat import families

TOOLS = [
    {
        "type": "function",
        "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}},
    }
]
ASK = {"role": "user", "content": "What is 6 times 7?"}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6,  "b": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tokenizer_dir: Path) -> ChatModel:
    return ChatModel.load(tokenizer_dir)


def sampled(model: ChatModel, text: str) -> list[int]:
    """The ids of an answer one character at a time, as no tokenizer would cut it."""
    ids: list[int] = []
    for char in text:
        ids += model.tokenizer.encode(char).tolist()
    return [*ids, *model.stop_token_ids[:1]]


def take(conversation: Conversation, ids: Iterable[int]) -> list[ParserEvent]:
    return [event for id_ in ids for event in conversation.feed([id_])] + [*conversation.finish()]


def test_each_prompt_begins_with_the_ids_of_the_turns_before_it(model: ChatModel) -> None:
    conversation = Conversation(model, tools=TOOLS)
    first = conversation.prompt([ASK]).tolist()
    called = sampled(model, CALL)
    events = take(conversation, called)
    (call,) = conversation.answer["tool_calls"]
    assert call["function"] == {"name": "multiply", "arguments": '{"a": 6,  "b": 7}'}
    assert events[0] == ToolCallEvent(0, call["id"], "multiply")
    arguments = [one.arguments for one in events if isinstance(one, ToolCallEvent)]
    assert len(arguments) > 3
    assert "".join(arguments) == call["function"]["arguments"]
    assert not conversation.malformed

    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    second = conversation.prompt([result]).tolist()
    assert second[: len(first) + len(called)] == first + called
    said = sampled(model, "It is 42.")
    assert all(isinstance(one, TextEvent) for one in take(conversation, said))
    assert conversation.answer == {"role": "assistant", "content": "It is 42."}

    third = conversation.prompt([{"role": "user", "content": "Sure?"}]).tolist()
    assert third[: len(second) + len(said)] == second + said
    assert conversation.token_ids.tolist() == second + said


def test_a_prompt_equals_the_chat_templates_render(model: ChatModel) -> None:
    conversation = Conversation(model)
    first = conversation.prompt([ASK])
    take(conversation, [*model.tokenizer.encode("42").tolist(), *model.stop_token_ids[:1]])
    second = conversation.prompt([{"role": "user", "content": "Sure?"}])
    text = (
        "<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n42<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model.tokenizer.encode(text).tolist()
    assert second.tolist() == ids
    assert ids[: len(first)] == first.tolist()


def test_reasoning_is_apart_from_the_answer(model: ChatModel, tokenizer_dir: Path) -> None:
    thinking = ChatModel.load(tokenizer_dir, reasoning_parser="think")
    conversation = Conversation(thinking)
    conversation.prompt([ASK])
    events = take(conversation, sampled(thinking, "<think>Hm.</think>42"))
    thoughts = [one.text for one in events if isinstance(one, ReasoningEvent)]
    assert "".join(thoughts) == "Hm."
    assert conversation.answer["reasoning_content"] == "Hm."
    assert conversation.answer["content"] == "42"


def test_an_answer_that_was_cut_is_closed_by_the_next_turn(model: ChatModel) -> None:
    conversation = Conversation(model)
    first = conversation.prompt([ASK]).tolist()
    cut = model.tokenizer.encode("The answer").tolist()
    take(conversation, cut)
    second = conversation.prompt([{"role": "user", "content": "Go on."}]).tolist()
    end = model.continuation.stop_ids[0]
    assert second[: len(first) + len(cut) + 1] == [*first, *cut, end]


def test_a_turn_that_is_begun_anew_leaves_nothing_of_the_first_try(model: ChatModel) -> None:
    conversation = Conversation(model)
    prompt = conversation.prompt([ASK])
    conversation.feed(model.tokenizer.encode("The").tolist())
    assert conversation.prompt([ASK]).tolist() == prompt.tolist()
    take(conversation, sampled(model, "42"))
    assert conversation.answer["content"] == "42"


def test_a_refused_message_is_named_and_changes_nothing(model: ChatModel) -> None:
    conversation = Conversation(model, special_text="refuse")
    with pytest.raises(InvalidInputError, match=r"messages\[0\]\.content\[0\]"):
        conversation.prompt([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(InvalidInputError, match=r"messages\[0\]\.role"):
        conversation.prompt([{"role": "judge", "content": "no"}])
    with pytest.raises(InvalidInputError, match=r"messages\[0\]"):
        conversation.prompt([{"role": "user", "content": "<|im_end|>"}])
    with pytest.raises(RuntimeError, match="prompt"):
        conversation.finish()
    assert len(conversation.prompt([ASK])) > 0


def test_an_answer_ends_before_a_second_call_where_the_template_allows_one(tmp_path: Path) -> None:
    families.write("llama3_1", tmp_path)
    model = ChatModel.load(tmp_path)
    assert model.format.one_call
    conversation = Conversation(model, tools=TOOLS)
    first = conversation.prompt([ASK]).tolist()
    one = '{"name": "multiply", "parameters": {"a": 6}}'
    called = [id_ for char in one for id_ in model.tokenizer.encode(char).tolist()]
    more = sampled(model, f"; {one}")
    take(conversation, [*called, *more])
    (call,) = conversation.answer["tool_calls"]
    assert conversation.token_ids.tolist() == [*first, *called]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    assert conversation.prompt([result]).tolist()[: len(first) + len(called)] == [*first, *called]
