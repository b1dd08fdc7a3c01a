"""Windows: the messages that are rendered in front of a group."""

import pytest

from rollmesh.chat import ToolCall
from rollmesh.chat.templates import readable

DEEP = '{"a": ' * 2000 + "1" + "}" * 2000


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        pytest.param('{"a": 6,  "b": 7.0}', '{"a": 6,  "b": 7.0}', id="an object"),
        pytest.param("", "", id="nothing"),
        pytest.param(" \n", " \n", id="whitespace"),
        pytest.param("not json", "{}", id="no JSON"),
        pytest.param("[1]", "{}", id="no object"),
        pytest.param(DEEP, "{}", id="nested too deeply"),
        pytest.param('{"a": 1e400}', "{}", id="a number beyond doubles"),
        pytest.param(f'{{"a": {"1" * 5000}}}', "{}", id="a number of too many digits"),
    ],
)
def test_a_call_is_printed_whatever_was_sampled(arguments: str, printed: str) -> None:
    sampled = ToolCall("call_1", "f", arguments)
    assert readable((sampled,)) == (ToolCall("call_1", "f", printed),)
