"""Every parameter of the APIs has a place in a protocol's table, and the table is what happens."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import PROTOCOLS
from tests.paths import ROOT
from tests.sidecar.parameters import documented, fields_of_vllm
from tests.sidecar.reading import BARE, GOOGLE, ignored, read, table

PAGES = {
    "chat/completions": "openai.md",
    "responses": "responses.md",
    "messages": "messages.md",
    GOOGLE: "google.md",
}
VLLM = {
    "chat/completions": ("openai/chat_completion/protocol.py", "ChatCompletionRequest", 60),
    "responses": ("openai/responses/protocol.py", "ResponsesRequest", 40),
    "messages": ("anthropic/protocol.py", "AnthropicMessagesRequest", 15),
}
"""Path and class of vLLM's request, and a number of its fields that it exceeds."""
TABLES = {path: PROTOCOLS[f"/v1/{path}"].parameters for path in BARE}
each = pytest.mark.parametrize("path", BARE)


def each_of(names: Callable[[Any], Iterable[str]]) -> pytest.MarkDecorator:
    found = [(path, name) for path, one in TABLES.items() for name in sorted(names(one))]
    return pytest.mark.parametrize(("path", "name"), found)


@each
def test_a_parameter_has_one_place(path: str) -> None:
    places = TABLES[path].served, TABLES[path].refused, TABLES[path].unused
    assert len(table(path)) == sum(map(len, places))


@pytest.mark.vllm
@pytest.mark.parametrize("path", VLLM)
def test_every_parameter_of_vllm_is_in_the_table(path: str) -> None:
    module, name, least = VLLM[path]
    fields = fields_of_vllm(f"entrypoints/{module}", name)
    assert len(fields) > least
    assert fields <= table(path)


@each
def test_the_document_has_the_table(path: str) -> None:
    assert documented(ROOT / "docs" / PAGES[path]) >= table(path)


@each_of(lambda parameters: parameters.refused)
def test_a_parameter_that_would_change_the_answer_is_refused_unless_it_asks_for_nothing(
    path: str, name: str
) -> None:
    parameters = TABLES[path]
    default = parameters.neutral.get(name)
    with pytest.raises(InvalidFieldError) as caught:
        read(path, **{name: False if default is True else 1})
    assert caught.value.field == name
    assert parameters.refused[name] in caught.value.message
    values: list[Any] = [None, default, True if default is True else []]
    for neutral in values:
        assert read(path, **{name: neutral}) == read(path)


@each_of(lambda parameters: parameters.unused)
def test_a_parameter_that_changes_nothing_is_accepted_and_counted(path: str, name: str) -> None:
    before = ignored(name)
    assert read(path, **{name: 1}) == read(path)
    assert ignored(name) == before + 1
