"""Calls written as Python, against Python's own reader of literals."""

import ast
import json
import warnings
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.chat.parsing import read_call

CHARS = st.characters(exclude_categories=["Cs"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(CHARS),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(CHARS), inner),
    max_leaves=20,
)  # fmt: skip
ESCAPES = ["\\n", "\\\\", "\\'", '\\"', "\\x41", "\\xg", "\\u00e9", "\\u12", "\\U0001f600", "\\0"]
ESCAPES += [
    "\\777",
    "\\d",
    "\\N{BULLET}",
    "\\N{no}",
    "\\\n",
    "\\a\\b\\f\\v\\t\\r",
    "a",
    " ",
    "{",
    "é",
]


@given(value=VALUES)
def test_every_json_value_is_read_as_python_writes_it(value: Any) -> None:
    assert read_call(f"f(v={value!r})") == ("f", {"v": value})


@given(parts=st.lists(st.sampled_from(ESCAPES), max_size=6), quote=st.sampled_from("'\""))
def test_strings_are_what_python_makes_of_them(parts: list[str], quote: str) -> None:
    source = f"{quote}{''.join(parts)}{quote}"
    try:
        with warnings.catch_warnings(action="ignore"):
            expected = ("f", {"v": ast.literal_eval(source)})
    except SyntaxError:
        assert read_call(f"f(v={source})") is None
    else:
        assert read_call(f"f(v={source})") == expected


@given(text=st.text(alphabet="f(=1'\"[]{},:.-eTrueN\\x ) ", max_size=40))
def test_any_text_is_no_call_or_one_that_json_can_say(text: str) -> None:
    for written in (text, f"f({text})"):
        found = read_call(written)
        assert found is None or (found[0] and json.dumps(found[1]).startswith("{"))


@pytest.mark.parametrize(("depth", "read"), [(63, True), (64, False)])
def test_values_are_read_up_to_a_depth_whatever_stands_before_them(
    depth: int, *, read: bool
) -> None:
    found = read_call(f"f(a={[[]] * 100}, b={'[' * depth}{']' * depth})")
    assert (found is not None) == read
