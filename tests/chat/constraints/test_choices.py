"""Which answers are constrained, and which cannot be."""

import json

import pytest

from rollmesh.chat import Calls, InvalidInputError, Wanted, constraint_of, make_context
from rollmesh.chat.parsing import AnswerFormat
from tests.chat.constraints.grammars import CONTEXT, REQUIRED, TOOLS


def test_a_free_answer_has_no_constraint() -> None:
    form = AnswerFormat("hermes", reasoning=True)
    for wanted in (Wanted(), Wanted(Calls.NONE), Wanted(one_call=True)):
        assert constraint_of(wanted, form, CONTEXT, inside_reasoning=False) is None


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        pytest.param(REQUIRED, "tool_choice", id="required"),
        pytest.param(Wanted(one_call=True), "parallel_tool_calls", id="one call"),
        pytest.param(Wanted(json_schema=b""), "tool_choice", id="JSON or calls"),
    ],
)
def test_a_format_that_is_not_known_is_refused_and_the_known_ones_are_named(
    wanted: Wanted, field: str
) -> None:
    form = AnswerFormat("vllm:pythonic", reasoning=False)
    with pytest.raises(InvalidInputError, match=r"deepseek_v3, .*hermes") as caught:
        constraint_of(wanted, form, CONTEXT, inside_reasoning=False)
    assert caught.value.field == field


def test_a_name_that_formats_cannot_carry_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": 'a"b'}}]
    context = make_context(json.dumps(tools).encode(), b"")
    with pytest.raises(InvalidInputError, match="cannot be required"):
        constraint_of(
            REQUIRED, AnswerFormat("hermes", reasoning=False), context, inside_reasoning=False
        )


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [{"type": "web_search"}],
        [{"type": "function", "function": "f"}],
        [{"type": "function", "function": {"name": ["f"]}}],
    ],
)
def test_a_tool_that_is_no_function_is_not_required(tools: list[object]) -> None:
    form = AnswerFormat("hermes", reasoning=False)
    none = make_context(json.dumps(tools).encode(), b"")
    with pytest.raises(InvalidInputError, match="no function with a name") as caught:
        constraint_of(REQUIRED, form, none, inside_reasoning=False)
    assert caught.value.field == "tools_json"
    beside = make_context(json.dumps([*TOOLS, *tools]).encode(), b"")
    json_only = Wanted(json_schema=b"{}")
    for context in (none, beside):
        assert constraint_of(json_only, form, context, inside_reasoning=False) is not None
    assert constraint_of(REQUIRED, form, beside, inside_reasoning=False) == constraint_of(
        REQUIRED, form, CONTEXT, inside_reasoning=False
    )


def test_a_strict_tool_makes_the_constraint_strict() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    context = make_context(json.dumps([*TOOLS, strict]).encode(), b"")
    form = AnswerFormat("hermes", reasoning=False)

    def is_strict(name: str) -> bool:
        wanted = Wanted(Calls.NAMED, name)
        constraint = constraint_of(wanted, form, context, inside_reasoning=False)
        return constraint is not None and constraint.strict

    assert is_strict("f")
    assert not is_strict("add")
