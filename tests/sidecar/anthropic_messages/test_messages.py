"""Messages as agents send them, and what the gateway gets."""

import base64
from typing import Any

import pytest
from prometheus_client import REGISTRY

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.requests import read_request
from rollmesh.sidecar.turns.seals import seal
from rollmesh.v1 import chat_pb2, gateway_pb2, trajectory_pb2

KEY = "rmk-5e55-secret"
TEXT = {"type": "text", "text": "Hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=sdk-cli;"
USE = {"type": "tool_use", "id": "abc", "name": "f", "input": {"a": 1}}


def read(*messages: Any, system: Any = None) -> gateway_pb2.ChatRequest:
    body = {"max_tokens": 9, "messages": list(messages), "system": system}
    return read_request(body, KEY)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "abc", "content": content, **more}


def told(request: gateway_pb2.ChatRequest) -> list[tuple[str, str]]:
    """Roles and joined texts."""
    return [
        (chat_pb2.Role.Name(one.role)[5:].lower(), "".join(part.text for part in one.content))
        for one in request.messages
    ]


def sealed(answer: str) -> float:
    name = "rollmesh_sidecar_echoed_reasoning_total"
    return REGISTRY.get_sample_value(name, {"sealed": answer}) or 0.0


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("Hi", id="a string"),
        pytest.param([TEXT], id="a list of one text"),
        pytest.param([TEXT | CACHED], id="with cache_control"),
        pytest.param([TEXT, {"type": "text", "text": ""}], id="with an empty text"),
    ],
)
def test_forms_of_one_text_are_the_same_message(content: Any) -> None:
    assert read(user(content)) == read(user("Hi"))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("42", id="a string"),
        pytest.param([{"type": "text", "text": "42"}], id="a list"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"is_error": False}, CACHED], ids=["", "no error", "cached"])
def test_forms_of_one_result_are_the_same_message(content: Any, more: dict[str, Any]) -> None:
    request = read(user("q"), assistant(USE), user([result(content, **more)]))
    (given,) = request.messages[2:]
    assert (given.role, given.tool_call_id) == (chat_pb2.ROLE_TOOL, "abc")
    assert told(request)[2] == ("tool", "42")


def test_results_and_the_users_words_become_messages_in_order() -> None:
    blocks = [result("1"), result("2"), TEXT, {"type": "text", "text": " there"}]
    request = read(user("q"), assistant(USE), user(blocks))
    assert told(request)[2:] == [("tool", "1"), ("tool", "2"), ("user", "Hi there")]


def test_a_failed_result_without_text_says_that_it_failed() -> None:
    request = read(user("q"), user([result(None, is_error=True), result("no", is_error=True)]))
    assert told(request)[1:] == [("tool", "Error"), ("tool", "no")]


def test_an_answer_comes_back_as_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "I think.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "AAAA"}
    request = read(user("q"), assistant(thinking, redacted, TEXT, USE, USE), user("go on"))
    message = request.messages[1]
    assert message.reasoning_content == "I think."
    assert [call.arguments_json for call in message.tool_calls] == ['{"a":1}'] * 2
    assert told(request)[1] == ("assistant", "Hi")


def test_arguments_that_were_no_json_are_read_as_they_were_sampled() -> None:
    use = USE | {"input": {"INVALID_JSON": '{"a": '}}
    (call,) = read(user("q"), assistant(use), user("go on")).messages[1].tool_calls
    assert call.arguments_json == '{"a": '


@pytest.mark.parametrize(
    ("signature", "thinking", "answer"),
    [
        pytest.param(seal(KEY, "a-1", "I think."), "I think.", "yes", id="as sampled"),
        pytest.param(seal(KEY, "a-1", "I think."), "", "yes", id="omitted"),
        pytest.param(seal(KEY, "a-1", "I think."), "I thought.", "no", id="another text"),
        pytest.param(seal("rmk-6-x", "a-1", "I think."), "I think.", "no", id="another session"),
        pytest.param("EqQBCgIYAhIM.1.2", "I think.", "no", id="another server"),
        pytest.param("ü", "I think.", "no", id="not ASCII"),
        pytest.param("", "I think.", "no", id="none"),
        pytest.param(None, "I think.", "no", id="null"),
    ],
)
def test_a_signature_tells_what_was_sampled_from_what_was_not(
    signature: str | None, thinking: str, answer: str
) -> None:
    before = sealed(answer)
    block = {"type": "thinking", "thinking": thinking, "signature": signature}
    request = read(user("q"), assistant(block, TEXT), user("go on"))
    assert sealed(answer) == before + 1
    assert request.messages[1].answer_id == ("a-1" if answer == "yes" else "")
    assert request.messages[1].reasoning_content == thinking  # carried in any case


def test_a_system_prompt_is_its_texts_without_the_note_for_billing() -> None:
    blocks = [{"type": "text", "text": text} for text in (BILLING, "You are ", "Claude.")]
    assert read(user("q"), system=blocks) == read(user("q"), system="You are Claude.")
    assert told(read(user("q"), system=[blocks[0]])) == [("user", "q")]


def test_a_system_message_within_a_conversation_stays_where_it_is() -> None:
    reminder = {"role": "system", "content": [TEXT]}
    request = read(user("q"), reminder, system="You are Claude.")
    assert told(request) == [("system", "You are Claude."), ("user", "q"), ("system", "Hi")]


def test_images_are_parts_of_messages_and_results() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"PNG")}
    source["data"] = base64.b64encode(b"PNG").decode()
    image = {"type": "image", "source": source}
    linked = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    request = read(user([TEXT, image, linked]), user([result([image])]))
    field = "messages[0].content[1].source.data"
    media = chat_pb2.Media(media_type="image/png", data=b"PNG", field=field)
    assert [part.WhichOneof("part") for part in request.messages[0].content] == [
        "text", "image", "image",
    ]  # fmt: skip
    assert request.messages[0].content[1].image == media
    assert request.messages[0].content[2].image.uri == "https://x/y.png"
    shown = request.messages[1].content[0].image
    assert (shown.data, shown.field) == (
        b"PNG", "messages[1].content[0].content[0].source.data",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("system", "last", "lineage"),
    [
        pytest.param(None, "q", trajectory_pb2.LINEAGE_UNSPECIFIED, id="nothing"),
        pytest.param(
            [{"type": "text", "text": f"{BILLING} cc_is_subagent=true;"}],
            "q",
            trajectory_pb2.LINEAGE_SUB_AGENT,
            id="sub-agent",
        ),
        pytest.param(
            [{"type": "text", "text": f"{BILLING} cc_is_subagent=false;"}],
            "q",
            trajectory_pb2.LINEAGE_UNSPECIFIED,
            id="no sub-agent",
        ),
        pytest.param(
            "Ask with cc_is_subagent=true",
            "q",
            trajectory_pb2.LINEAGE_UNSPECIFIED,
            id="only text",
        ),
        pytest.param(
            None,
            [
                result("1"),
                {
                    "type": "text",
                    "text": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do",
                },
            ],
            trajectory_pb2.LINEAGE_COMPACTION,
            id="compaction",
        ),
    ],
)
def test_claude_code_says_in_its_texts_who_asks(system: Any, last: Any, lineage: int) -> None:
    assert read(user("q"), user(last), system=system).lineage == lineage


@pytest.mark.parametrize(
    ("field", "message"),
    [
        pytest.param(
            "messages[0].content[0].type", user([{"type": "server_tool_use"}]), id="server tool"
        ),
        pytest.param("messages[0].content[0].type", user([{"type": "document"}]), id="document"),
        pytest.param("messages[0].content[0].type", user(["x"]), id="no block"),
        pytest.param("messages[0].content", user(5), id="no content"),
        pytest.param("messages[0].content[0].text", user([{"type": "text"}]), id="no text"),
        pytest.param(
            "messages[0].content[0].tool_use_id", user([{"type": "tool_result"}]), id="no id"
        ),
        pytest.param("messages[0].content[0].is_error", user([result("", is_error=1)]), id="error"),
        pytest.param(
            "messages[0].content[0].content[0].type",
            user([result([{"type": "document"}])]),
            id="a part of a result",
        ),
        pytest.param("messages[0].content[0].input", assistant(USE | {"input": "{}"}), id="input"),
        pytest.param("messages[0].content[0].source", user([{"type": "image"}]), id="no source"),
        pytest.param(
            "messages[0].content[0].source.media_type",
            user([{"type": "image", "source": {"type": "base64", "media_type": "x/y"}}]),
            id="media type",
        ),
        pytest.param(
            "messages[0].content[0].source.data",
            user(
                [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "!"},
                    }
                ]
            ),
            id="no base64",
        ),
        pytest.param("messages[0]", "Hi", id="no message"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(field: str, message: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(message)
    assert caught.value.field == field
