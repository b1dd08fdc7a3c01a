"""Templates that print a message by what stands far from it, or end answers in a way of their own.

Each is exact, or says truly what it cannot continue.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollmesh.chat import Message, Tokenizer, ToolCall, group_messages, make_context
from rollmesh.chat.templates import (
    ChatTemplate,
    Continuation,
    Finding,
    Kind,
    TemplateRefusedError,
    TemplateRenderError,
)
from tests.chat import families
from tests.chat.test_check import check

BARE = make_context(b"", b"")
CALL = ToolCall("abcdefgh1", "f", '{"a": 1}')
SYSTEM, ASK, SAID = Message("system", "Be kind."), Message("user", "q"), Message("assistant", "a")
CALLED = Message("assistant", "", (CALL, CALL))
GOT = Message("tool", "r", tool_call_id=CALL.id, name=CALL.name)

TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
OPEN = "{{ '<|im_start|>assistant\\n' }}"
INSIDE_LOOP = (
    "{% set turns = messages %}{% if messages[0].role == 'system' %}{% set m = messages[0] %}"
    + TURN
    + "{% set turns = messages[1:] %}{% endif %}{% for m in turns %}"
    + TURN
    + "{% if loop.last and add_generation_prompt %}"
    + OPEN
    + "{% endif %}{% endfor %}"
)
# The place of a message is counted behind the system message, and looked up with it.
WRONG_NEIGHBOUR = (
    "{% set skipped = 1 if messages[0].role == 'system' else 0 %}"
    "{% for m in messages[:skipped] %}" + TURN + "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages[skipped:] %}{% if m.role == 'tool' %}"
    "{% if not loop.index0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>tool"
    "{% endif %}\n{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}" + OPEN + "{% endif %}"
)
LINE_BREAK = (
    "{% for m in messages %}<|begin_of_{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' and not (loop.last and LEAVES_LAST) %}"
    "{{ '\\n<|close|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|begin_of_assistant|>\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|open|>{{ m.role }}<|sep|>"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}<|close|>part<|sep|>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|close|>{{ c.function.arguments | tojson }}{% endfor %}"
    "<|close|>END{% endfor %}{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}"
)
THINKS_UNTIL_ANSWERED = (
    "{% set at = namespace(last=0) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if loop.index0 < at.last and m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}" + OPEN + "{% endif %}"
)

NAMED_RESULTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}"
    "{% for past in messages %}{% for c in past.tool_calls or [] if c.id == m.tool_call_id %}"
    "{{ c.function.name }} gave {% endfor %}{% endfor %}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }}]{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}" + OPEN + "{% endif %}"
)


class Case:
    """A template with its tokenizer, continued."""

    def __init__(self, source: str, folder: Path) -> None:
        variables = families.write_source(source, folder, "<|im_end|>")
        self._template, self.tokenizer = ChatTemplate(source, variables), Tokenizer(folder)
        self.found = Continuation(self._template, self.tokenizer)

    def is_exact(self, messages: Sequence[Message], *, sampled: int = 0) -> bool:
        """Whether what is added after so many groups is the end of the template's render."""
        groups = group_messages(tuple(messages))
        parts = [*self.found.token_ids(groups, sampled, BARE)]
        parts.append(self.found.generation_prompt(groups, BARE))
        ids = [id_ for part in parts for id_ in part.tolist()]
        whole = self._template.render(messages, BARE, generation_prompt=True)
        expected: list[int] = self.tokenizer.encode(whole).tolist()
        return ids == (expected[-len(ids) :] if sampled else expected)


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], Case]:
    return lambda source: Case(source, tmp_path)


def test_a_prompt_that_is_printed_inside_the_loop_serves_system_messages(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    one = case(INSIDE_LOOP)
    for messages in ((SYSTEM, ASK), (SYSTEM, ASK, SAID, ASK), (SYSTEM, SYSTEM, ASK), (ASK,)):
        assert one.is_exact(messages)
    with pytest.raises(TemplateRenderError, match="does not open it there"):
        one.is_exact((SYSTEM,))
    assert "first system, answer: the template does not open it" in check(tmp_path).stdout


def test_results_behind_a_system_message_are_exact_or_refused(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    one = case(WRONG_NEIGHBOUR)
    assert one.is_exact((ASK, CALLED, GOT, GOT))
    assert one.is_exact((ASK, CALLED, GOT, GOT, SAID, ASK, CALLED, GOT))
    assert one.is_exact((SYSTEM, ASK, SAID, ASK))
    for behind in ((CALLED, GOT, GOT), (CALLED, GOT, GOT, SAID, ASK), (CALLED, GOT, CALLED, GOT)):
        try:
            assert one.is_exact((SYSTEM, ASK, *behind))
        except TemplateRenderError as error:
            assert "messages change how" in str(error)  # noqa: PT017 - or it is exact
    assert " behind a system message: " in check(tmp_path).stdout


@pytest.mark.parametrize("leaves_last", ["false", "true"])
def test_a_line_break_before_the_end_token_is_continued(
    case: Callable[[str], Case], leaves_last: str
) -> None:
    one = case(LINE_BREAK.replace("LEAVES_LAST", leaves_last))
    assert one.found.profile.stops == ("<|close|>",)
    assert one.found.profile.kind is Kind.REWRITES
    for messages in ((SYSTEM, ASK, SAID, ASK), (ASK, SAID, ASK, SAID, ASK)):
        assert one.is_exact(messages)
        assert one.is_exact(messages, sampled=len(messages) - 1)


def test_an_answer_of_several_parts_ends_with_the_text_outside(
    case: Callable[[str], Case],
) -> None:
    one = case(PARTS.replace("END", "message<|sep|><|end_of_msg|>"))
    assert one.found.profile.stops == ("<|end_of_msg|>",)
    for messages in ((ASK, SAID, ASK), (ASK, CALLED, GOT, GOT), (SYSTEM, ASK, SAID, ASK)):
        assert one.is_exact(messages)


def test_an_answer_that_ends_as_its_parts_do_is_refused_for_that_reason(
    case: Callable[[str], Case],
) -> None:
    with pytest.raises(TemplateRefusedError, match="also prints inside answers") as refused:
        case(PARTS.replace("END", "\n"))
    assert "remove it" not in str(refused.value)


def test_reasoning_that_is_dropped_once_another_answer_follows_is_found(
    case: Callable[[str], Case],
) -> None:
    one = case(THINKS_UNTIL_ANSWERED)
    assert Finding.DROPS_REASONING in one.found.profile.findings


def test_results_that_are_named_by_looking_up_their_call_are_continued(
    case: Callable[[str], Case],
) -> None:
    one = case(NAMED_RESULTS)
    assert not one.found.profile.refused
    other = ToolCall("bcdefghi2", "g", "{}")
    told = Message("tool", "s", tool_call_id=other.id, name=other.name)
    first, second = Message("assistant", "", (CALL,)), Message("assistant", "", (other,))
    assert one.is_exact((SYSTEM, ASK, first, GOT, second, told, SAID, ASK))
