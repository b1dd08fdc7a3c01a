import tracemalloc

import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import Message
from rollmesh.gateway import Conversation, MessageReader
from rollmesh.runtime.errors import InvalidMessagesError, UnsupportedPartError
from rollmesh.v1 import chat_pb2, gateway_pb2
from tests.messages import said

CALLS = st.builds(
    chat_pb2.ToolCall,
    id=st.text(max_size=4),
    name=st.text(max_size=4),
    arguments_json=st.text(max_size=8),
)
MESSAGES = st.builds(
    chat_pb2.ChatMessage,
    role=st.sampled_from([chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT]),
    content=st.lists(
        (st.text(max_size=8) | st.integers(100, 300).map("x".__mul__)).map(
            lambda text: chat_pb2.ContentPart(text=text)
        ),
        max_size=2,
    ),
    tool_calls=st.lists(CALLS, max_size=2),
    reasoning_content=st.none() | st.text(max_size=4),
)


def read(*messages: chat_pb2.ChatMessage, reader: MessageReader | None = None) -> Conversation:
    return (reader or MessageReader()).read(request([*messages]))[0]


def request(messages: list[chat_pb2.ChatMessage], **fields: object) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(messages=messages, **fields)  # type: ignore[arg-type]


@given(
    conversations=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 6), st.lists(MESSAGES, max_size=3)),
        min_size=1,
        max_size=8,
    ),
    key=st.text(max_size=150),
)
def test_a_used_reader_agrees_with_a_fresh_reader(
    conversations: list[tuple[int, int, list[chat_pb2.ChatMessage]]], key: str
) -> None:
    reader = MessageReader()
    asked: list[list[chat_pb2.ChatMessage]] = [[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)]]
    for which, keep, fresh in conversations:  # goes on, branches, repeats, begins anew
        messages = [*asked[which % len(asked)][:keep], *fresh]
        if not messages:
            continue
        asked.append(messages)
        first = request(messages, session_id="s", session_key=key, tools_json="[]")
        (found, rest), alone = reader.read(first), read(*messages)
        # Ids, key and tools are no part of a conversation.
        assert gateway_pb2.ChatRequest.FromString(bytes(rest)).tools_json == "[]"
        assert (found.groups, found.messages) == (alone.groups, len(messages))
        assert (found.size, found.digest) == (alone.size, alone.digest)


def test_a_digest_tells_messages_apart_that_a_template_would_not() -> None:
    user = said("q")
    thought = [
        chat_pb2.ChatMessage(
            role=chat_pb2.ROLE_ASSISTANT,
            content=[chat_pb2.ContentPart(text="a")],
            reasoning_content=text,
        )
        for text in ("because", "though")
    ]
    reader = MessageReader()
    digests = {read(user, one, reader=reader).digest for one in (*thought, user)}
    assert len(digests) == 3


def test_a_message_without_a_role_is_named_where_it_stands() -> None:
    reader, user = MessageReader(), said("q")
    read(user, reader=reader)
    unsigned = chat_pb2.ChatMessage(content=[chat_pb2.ContentPart(text="who?")])
    with pytest.raises(InvalidMessagesError, match=r"messages\[1\]\.role"):
        read(user, unsigned, reader=reader)
    assert read(user, reader=reader).groups[0][0].content == "q"  # and nothing was lost


def test_a_conversation_of_megabytes_is_read_and_not_kept() -> None:
    reader = MessageReader()

    def is_read(text: str) -> bool:
        user = said(text)
        ((found,),) = read(user, reader=reader).groups
        return found.content == text

    tracemalloc.start()
    try:
        assert all(is_read(str(at) * 5_000_000) for at in range(4))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000


def test_texts_in_parts_are_one_text() -> None:
    message = said("a")
    message.content.add(text="")
    message.content.add(text="b")
    assert read(message).groups[0][0].content == "ab"


@pytest.mark.parametrize("kind", ["image", "document"])
def test_a_part_that_is_not_served_is_refused_by_its_place(kind: str) -> None:
    message = said("look")
    getattr(message.content.add(), kind).media_type = "image/png"
    with pytest.raises(UnsupportedPartError) as caught:
        read(said("q"), message)
    assert caught.value.field == f"messages[1].content[1].{kind}"


def test_a_part_that_says_nothing_is_refused() -> None:
    message = said("look")
    message.content.add()
    with pytest.raises(InvalidMessagesError) as caught:
        read(message)
    assert caught.value.field == "messages[0].content[1]"


def test_every_byte_of_a_message_counts_however_long_it_is() -> None:
    for size in (1, 100, 127, 128, 200, 16_383, 16_384, 20_000):
        one, other = (read(said("x" * size + last)) for last in "ab")
        assert one.digest != other.digest


def test_a_message_is_read_with_all_its_fields_and_refused_by_its_place() -> None:
    named = said("q")
    named.name = "worker"
    result = said("r", chat_pb2.ROLE_TOOL)
    result.tool_call_id = "c"
    thought = said("A", chat_pb2.ROLE_ASSISTANT)
    thought.reasoning_content = "why"
    groups = read(named, thought, result).groups
    assert [message for group in groups for message in group] == [
        Message("user", "q", name="worker"),
        Message("assistant", "A", reasoning="why"),
        Message("tool", "r", tool_call_id="c"),
    ]
    empty = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart()] * 2)
    with pytest.raises(InvalidMessagesError) as caught:
        read(named, empty)
    assert caught.value.field == "messages[1].content[0]"
