"""What the parameters of the protocol do; `tests/sidecar/test_parameters` has its whole table."""

from typing import Any

import orjson
import pytest
from openai.types.chat import completion_create_params

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import parse_body
from rollmesh.sidecar.openai_chat.parameters import REFUSED, SERVED, UNUSED
from rollmesh.sidecar.openai_chat.requests import read_request, wants_usage
from rollmesh.v1 import gateway_pb2
from tests.sidecar.parameters import fields_of_sdk

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TABLE = SERVED | REFUSED.keys() | UNUSED.keys()


def read(**more: Any) -> gateway_pb2.ChatRequest:
    body = parse_body(orjson.dumps(ASK | more))
    wants_usage(body)
    return read_request(body)


def test_every_parameter_of_the_openai_sdk_is_in_the_table() -> None:
    fields = fields_of_sdk(completion_create_params, "CompletionCreateParams")
    assert len(fields) > 30
    assert fields <= TABLE


def test_documents_and_efforts_are_options_of_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    request = read(documents=documents, reasoning_effort="none", chat_template_kwargs={"x": 1})
    assert orjson.loads(request.template_options_json) == {
        "documents": documents, "reasoning_effort": "none", "enable_thinking": False, "x": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "more"),
    [
        pytest.param("documents", {"documents": {}}, id="documents"),
        pytest.param("documents[1]", {"documents": [{}, {"text": 5}]}, id="a document's text"),
        pytest.param(
            "chat_template_kwargs.tools", {"chat_template_kwargs": {"tools": []}}, id="tools"
        ),
        pytest.param("stream_options", {"stream": True, "stream_options": 1}, id="stream options"),
        pytest.param("stream_options", {"stream_options": {"include_usage": True}}, id="no stream"),
        pytest.param(
            "stream_options.include_usage",
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            id="usage not a boolean",
        ),
        pytest.param(
            "stream_options.continuous_usage_stats",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            id="usage in each chunk",
        ),
    ],
)  # fmt: skip
def test_options_with_a_fault_are_refused_by_name(field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**more)
    assert caught.value.field == field
