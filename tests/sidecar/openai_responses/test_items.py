"""Input items become messages: one sampled turn is one message, however its items come back."""

from typing import Any

import pytest

from rollmesh.runtime.codec.content import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_responses.items import read_input
from rollmesh.sidecar.turns.seals import seal
from rollmesh.v1 import chat_pb2

KEY = "rmk-5e55-secret"
ANSWER = "5e55-3"


def read(*items: Any) -> list[tuple[str, str, str, list[str]]]:
    """Role, text, reasoning and calls of each message."""
    names = {number: name.removeprefix("ROLE_").lower() for name, number in chat_pb2.Role.items()}
    return [
        (
            names[one.role],
            text_of(one),
            one.reasoning_content,
            [f"{call.id} {call.name} {call.arguments_json}" for call in one.tool_calls],
        )
        for one in read_input(list(items), KEY).messages
    ]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(text: str, answer: str = "") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "role": "assistant", "content": [part], "status": "completed"}
    return {**item, "id": f"msg_{answer}"} if answer else item


def thought(text: str, answer: str = "", **fields: Any) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    item = {"type": "reasoning", "summary": [], "content": [part], **fields}
    return {**item, "id": f"rs_{answer}"} if answer else item


def called(name: str, at: int = 0, answer: str = "", **fields: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": f"c{at}", "name": name, "arguments": "{}", **fields}
    return {**item, "id": f"fc_{answer}_{at}"} if answer else item


def output(at: int, given: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{at}", "output": given}


TURN = ("assistant", "Text.", "Hm.", ["c0 f {}", "c1 g {}"])


@pytest.mark.parametrize(
    ("sealed", "answer"),
    [
        pytest.param(seal(KEY, "chatcmpl-5e55-7", "Hm."), "chatcmpl-5e55-7", id="as sampled"),
        pytest.param(seal(KEY, "chatcmpl-5e55-7", "Oh."), "", id="another text"),
        pytest.param(seal("rmk-5e56-secret", "chatcmpl-5e55-7", "Hm."), "", id="another session"),
        pytest.param("AAAA", "", id="another server"),
    ],
)
def test_a_seal_names_the_answer_where_items_have_no_ids(sealed: str, answer: str) -> None:
    items = [thought("Hm.", encrypted_content=sealed), said("Text.")]
    assert [one.answer_id for one in read_input(items, KEY).messages] == [answer]


@pytest.mark.parametrize("answer", [ANSWER, ""])
def test_the_items_of_a_turn_are_one_message(answer: str) -> None:
    items = [
        thought("Hm.", answer),
        said("Text.", answer),
        called("f", 0, answer),
        called("g", 1, answer),
    ]
    assert read(*items) == [TURN]


def test_the_ids_tell_turns_apart_and_join_what_came_late() -> None:
    late = {**said("Text.", ANSWER), "id": f"msg_{ANSWER}_1"}
    items = [thought("Hm.", ANSWER), called("f", 0, ANSWER), called("g", 1, ANSWER), late]
    assert read(*items) == [TURN]
    assert [text for _, text, _, _ in read(said("A", "5e55-3"), said("B", "5e55-4"))] == ["A", "B"]
    first, second = read_input([said("A", "5e55-3"), said("A", "5e55-4")], KEY).messages
    assert (first.answer_id, second.answer_id) == ("chatcmpl-5e55-3", "chatcmpl-5e55-4")


def test_ids_of_another_server_say_nothing_about_turns() -> None:
    items = [
        {**thought("Hm."), "id": "rs_68af"},
        {**said("Text."), "id": "msg_68b0"},
        {**called("f"), "id": "fc_call_1"},
        {**called("g", 1), "id": "fc_call_2"},
    ]
    assert read(*items) == [TURN]
    assert [one.answer_id for one in read_input(items, KEY).messages] == [""]


def test_without_ids_reasoning_and_a_second_text_begin_another_turn() -> None:
    items = [said("A"), thought("Hm."), said("B"), said("C")]
    assert [(text, hm) for _, text, hm, _ in read(*items)] == [("A", ""), ("B", "Hm."), ("C", "")]


def test_a_user_text_is_the_same_as_a_string_and_as_a_list() -> None:
    parts = [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    assert read(user(parts)) == read(user("Hello")) == [("user", "Hello", "", [])]
    assert read_input("Hello", KEY).messages == read_input([user("Hello")], KEY).messages


def test_outputs_may_be_lists() -> None:
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]
    assert read(output(0, parts)) == read(output(0, "42")) == [("tool", "42", "", [])]


def test_what_codex_sends_back_is_one_turn_after_another() -> None:
    # Reasoning without content, calls first and then all outputs with ids of Codex's own.
    items = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be."}],
        },
        user([{"type": "input_text", "text": "Do."}]),
        {"type": "reasoning", "id": f"rs_{ANSWER}", "summary": [], "content": None},
        called("spawn_agent", 0, ANSWER, namespace="multi_agent_v1"),
        called("exec_command", 1, ANSWER),
        {**output(0, "a"), "id": "fco_1"},
        {**output(1, "b"), "id": "fco_2"},
        {"type": "agent_message", "content": [{"type": "input_text", "text": "Done."}]},
    ]
    calls = ["c0 multi_agent_v1__spawn_agent {}", "c1 exec_command {}"]
    assert read(*items) == [
        ("system", "Be.", "", []),
        ("user", "Do.", "", []),
        ("assistant", "", "", calls),
        ("tool", "a", "", []),
        ("tool", "b", "", []),
        ("user", "Done.", "", []),
    ]


def test_what_an_agent_writes_to_another_is_read() -> None:
    parts = [
        {"type": "input_text", "text": "Payload:\n"},
        {"type": "encrypted_content", "encrypted_content": "Do."},
    ]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": parts}
    assert read(item) == [("user", "Payload:\nDo.", "", [])]


def test_an_item_may_add_tools_and_is_no_message() -> None:
    tools = [{"type": "function", "name": "f"}]
    item = {"type": "additional_tools", "role": "developer", "tools": tools}
    found = read_input([item, user("Do."), called("f", 0, ANSWER), item], KEY)
    assert [one.tools for one in found.added_tools] == [tools, tools]
    assert [one.field for one in found.added_tools] == ["input[0].tools", "input[3].tools"]
    assert len(found.messages) == 2


def test_reasoning_may_come_back_as_its_summary() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert read(item) == [("assistant", "", "Hm.", [])]


def test_input_of_a_custom_tool_becomes_its_arguments_again() -> None:
    item = {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": 'a"\n'}
    assert read(item)[0][3] == [r'c0 patch {"input":"a\"\n"}']
    raw = {**item, "id": f"ctr_{ANSWER}_0", "input": '{"other": 1}'}
    assert read(raw)[0][3] == ['c0 patch {"other": 1}']


def test_references_name_their_answers_once() -> None:
    items = [{"type": "item_reference", "id": f"{kind}_{ANSWER}"} for kind in ("rs", "msg")]
    found = read_input([user("Hi"), *items, {"id": f"fc_{ANSWER}_0"}], KEY)
    assert [one.answer_id for one in found.references] == [f"chatcmpl-{ANSWER}"]
    assert found.messages[1] is found.references[0].message


def test_images_are_parts_of_messages_and_outputs() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,UE5H", "detail": "auto"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    said = [{"type": "input_text", "text": one} for one in "ab"]
    messages = read_input([user([*said, image]), output], KEY).messages
    assert messages[0].content[0].text == "ab"
    for part, field in (
        (messages[0].content[1], "input[0].content[2].image_url"),
        (messages[1].content[0], "input[1].output[0].image_url"),
    ):
        assert part.image == chat_pb2.Media(media_type="image/png", data=b"PNG", field=field)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ("text", "input[0]"),
        ({"role": "robot", "content": "x"}, "input[0].role"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0].type"),
        (
            user([{"type": "input_image", "image_url": "data:"}]),
            "input[0].content[0].image_url",
        ),
        (user([{"type": "input_image", "file_id": "f"}]), "input[0].content[0].file_id"),
        (user([{"type": "input_file"}]), "input[0].content[0]"),
        (user(7), "input[0].content"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c"}, "input[0].name"),
        ({"type": "item_reference", "id": "other"}, "input[0].id"),
        ({"type": "reasoning", "encrypted_content": 7}, "input[0].encrypted_content"),
    ],
)
def test_what_cannot_be_carried_is_named(item: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_input([item], KEY)
    assert caught.value.field == field
