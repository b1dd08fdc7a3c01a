"""Every parameter of the APIs has a place in a protocol's table, and the table is what happens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages import parameters as of_messages
from rollmesh.sidecar.openai_chat import parameters as of_chat
from rollmesh.sidecar.openai_responses import parameters as of_responses
from rollmesh.v1 import gateway_pb2
from tests.paths import ROOT
from tests.sidecar.anthropic_messages import test_parameters as messages
from tests.sidecar.openai_chat import test_parameters as chat
from tests.sidecar.openai_responses import test_parameters as responses
from tests.sidecar.parameters import documented, fields_of_vllm, ignored


@dataclass(frozen=True)
class Protocol:
    """A protocol's table, and how its requests are read."""

    page: str
    served: frozenset[str]
    refused: Mapping[str, str]
    unused: Mapping[str, str]
    read: Callable[..., gateway_pb2.ChatRequest]
    vllm: tuple[str, str, int]
    """Path and class of vLLM's request, and a number of its fields that it exceeds."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What asks for something, where 1 does not."""
    empty: Any = False
    """What asks for nothing elsewhere."""

    @property
    def table(self) -> set[str]:
        return {*self.served, *self.refused, *self.unused}


_UNUSUAL = {
    "add_generation_prompt": False,
    "include_reasoning": False,
    "spaces_between_special_tokens": False,
}
PROTOCOLS = {
    "chat": Protocol(
        "openai.md", of_chat.SERVED, of_chat.REFUSED, of_chat.UNUSED, chat.read,
        ("entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest", 60), _UNUSUAL,
    ),
    "responses": Protocol(
        "responses.md", of_responses.SERVED, of_responses.REFUSED, of_responses.UNUSED,
        responses.read, ("entrypoints/openai/responses/protocol.py", "ResponsesRequest", 40),
        _UNUSUAL,
    ),
    "messages": Protocol(
        "messages.md", of_messages.SERVED, of_messages.REFUSED, of_messages.UNUSED, messages.read,
        ("entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest", 15), empty=[],
    ),
}  # fmt: skip
each = pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)


def each_of(names: Callable[[Protocol], Mapping[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("protocol", "name"),
        [
            pytest.param(one, name, id=f"{protocol}-{name}")
            for protocol, one in PROTOCOLS.items()
            for name in sorted(names(one))
        ],
    )


@each
def test_a_parameter_has_one_place(protocol: Protocol) -> None:
    places = protocol.served, protocol.refused, protocol.unused
    assert len(protocol.table) == sum(map(len, places))


@pytest.mark.vllm
@each
def test_every_parameter_of_vllm_is_in_the_table(protocol: Protocol) -> None:
    path, name, least = protocol.vllm
    fields = fields_of_vllm(path, name)
    assert len(fields) > least
    assert fields <= protocol.table


@each
def test_the_document_has_the_table(protocol: Protocol) -> None:
    assert documented(ROOT / "docs" / protocol.page) >= protocol.table


@each_of(lambda protocol: protocol.refused)
def test_what_is_not_served_is_refused_with_its_reason(protocol: Protocol, name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        protocol.read(**{name: protocol.values.get(name, 1)})
    assert caught.value.field == name
    assert protocol.refused[name] in caught.value.message


@each_of(lambda protocol: protocol.refused)
def test_what_asks_for_nothing_is_not_refused(protocol: Protocol, name: str) -> None:
    neutral = not protocol.values[name] if name in protocol.values else protocol.empty
    read = protocol.read
    assert read(**{name: neutral}) == read(**{name: None}) == read()


@each_of(lambda protocol: protocol.unused)
def test_what_changes_nothing_is_accepted_and_counted(protocol: Protocol, name: str) -> None:
    before = ignored(name)
    assert protocol.read(**{name: 1}) == protocol.read()
    assert ignored(name) == before + 1
