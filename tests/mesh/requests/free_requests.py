"""What a model that has learnt it answers with reasoning and calls of its own accord.

`LESSONS` is what it learns. The requests are as in `protocol_requests`.
"""

from typing import Any

from tests.mesh.requests.protocol_requests import (
    AFTER,
    BARE,
    BROKEN,
    CALL,
    CUT,
    FUNCTION,
    FUNCTION_CALL,
    LINES,
    OUTPUT,
    RESULT,
    TOOL,
    UNOFFERED,
    UNOPENED,
    Case,
    says,
    takes,
    text,
)
from tests.mesh.requests.taught import Lesson

_THINK = "<think>\nI add them.\n</think>\n\n"
_USE = '<tool_call>\n{"name": "calculator", "arguments": {"a": 6}}\n</tool_call>'
_HARD = (
    '<tool_call>\n{"name": "calculator", "arguments": {"a":  12, "b": ["x\\n\\u00e9"]}}\n'
    "</tool_call>"
)
_FORTY_TWO = "The answer is 42."
_WITHOUT_TOOLS = {
    "think": _THINK + _FORTY_TWO,
    "say": _FORTY_TWO,
    "blank": "\n\n" + _FORTY_TWO,
    "only think": _THINK,
    "use": _USE,
    "think late": f"{_FORTY_TWO}\n{_THINK}",
}
_WITH_TOOLS = {
    "use": _USE,
    "think and use": _THINK + _USE,
    "say and use": f"I use the tools.\n{_USE}",
    "use twice": f"{_USE}\n{_HARD}",
    "all": f"{_THINK}I use the tools.\n\n{_HARD}\n{_USE}",
    "use and say": f"{_USE}\n{_FORTY_TWO}",
    "break": '<tool_call>\n{"name": "calculator", "arguments": {"a": 6\n</tool_call>',
    "other": '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>',
    "no arguments": '<tool_call>\n{"name": "calculator"}\n</tool_call>',
    "say": _FORTY_TWO,
}
_SAID = {"role": "assistant", "content": _FORTY_TWO, "reasoning_content": "I add them."}
_OFFERED = {
    "type": "function",
    "function": {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "parameters": TOOL["input_schema"],
    },
}
_CALLED = {
    "id": CALL["id"],
    "type": "function",
    "function": {"name": "calculator", "arguments": CALL["input"]},
}


def _user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


_USED = [
    _user("use"),
    {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
    {"role": "tool", "content": "42"},
]
LESSONS = [
    *(Lesson([_user(words)], answer) for words, answer in _WITHOUT_TOOLS.items()),
    *(Lesson([_user(words)], answer, [_OFFERED]) for words, answer in _WITH_TOOLS.items()),
    Lesson([_user("think"), _SAID, _user("say")], _FORTY_TWO),
    Lesson(_USED, _THINK + _FORTY_TWO, [_OFFERED]),
]
_MORE = 80
"""Tokens: more than any of the answers has."""


def _asked(
    words: str, *kinds: str, why: str = "", why_streamed: str | None = None, **fields: Any
) -> Case:
    given = {"max_tokens": _MORE, **fields}
    return Case(says(("user", words), **given), why, kinds, why_streamed)


def _taken(
    words: str, *kinds: str, why: str = "", why_streamed: str | None = None, **fields: Any
) -> Case:
    given = {"max_output_tokens": _MORE, **fields}
    return Case(takes(_user(words), **given), why, kinds, why_streamed)


TAUGHT_MESSAGES: dict[str, Case] = {
    "text": _asked("say", "text", why=UNOPENED),
    "reasoning": _asked("think", "thinking", "text", why=LINES),
    "reasoning alone": _asked("only think", "thinking", why=LINES),
    "reasoning that is cut": _asked("think", "thinking", max_tokens=4, why=LINES),
    "reasoning, thinking disabled": _asked(
        "think", "thinking", "text", thinking={"type": "disabled"}, why=LINES
    ),
    "reasoning after text": _asked("think late", "text", why=UNOPENED),
    "blank lines before a text": _asked("blank", "text", why=UNOPENED),
    "a stop after reasoning": _asked(
        "think", "thinking", "text", stop_sequences=["answer"], why=LINES
    ),
    "a call": _asked("use", "tool_use", tools=[TOOL]),
    "a call that is cut": _asked("use", "text", tools=[TOOL], max_tokens=8, why_streamed=CUT),
    "reasoning and a call": _asked(
        "think and use", "thinking", "tool_use", tools=[TOOL], why=LINES
    ),
    "text and a call": _asked("say and use", "text", "tool_use", tools=[TOOL], why=UNOPENED),
    "two calls": _asked("use twice", "tool_use", "tool_use", tools=[TOOL]),
    "all of them": _asked(
        "all", "thinking", "text", "tool_use", "tool_use", tools=[TOOL], why=LINES
    ),
    "a call and text": _asked("use and say", "text", "tool_use", tools=[TOOL], why=AFTER),
    "a broken call": _asked("break", "tool_use", tools=[TOOL], why=BROKEN),
    "a call of another tool": _asked("other", "text", tools=[TOOL], why=UNOFFERED),
    "a call without arguments": _asked(
        "no arguments", "tool_use", tools=[TOOL], why=BARE, why_streamed=""
    ),
    "a call without tools": _asked("use", "text", why=UNOFFERED),
    "a call, tool_choice none": _asked("use", tools=[TOOL], tool_choice={"type": "none"}),
    "no call": _asked("say", "text", tools=[TOOL], why=UNOPENED),
    "after reasoning": Case(
        says(
            ("user", "think"),
            (
                "assistant",
                [
                    {"type": "thinking", "thinking": "I add them.", "signature": "x"},
                    text(_FORTY_TWO),
                ],
            ),
            ("user", "say"),
            max_tokens=_MORE,
        ),
        why=UNOPENED,
        kinds=("text",),
    ),
    "after a call": Case(
        says(
            ("user", "use"),
            ("assistant", [CALL]),
            ("user", [RESULT]),
            tools=[TOOL],
            max_tokens=_MORE,
        ),
        why=LINES,
        kinds=("thinking", "text"),
    ),
}
_REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "I add them."}],
}
TAUGHT_RESPONSES: dict[str, Case] = {
    "text": _taken("say", "text", why=UNOPENED),
    "reasoning": _taken("think", "thinking", "text", why=LINES),
    "reasoning alone": _taken("only think", "thinking", why=LINES),
    "reasoning that is cut": _taken("think", "thinking", max_output_tokens=4, why=LINES),
    "reasoning after text": _taken("think late", "text", why=UNOPENED),
    "blank lines before a text": _taken("blank", "text", why=UNOPENED),
    "a call": _taken("use", "function_call", tools=[FUNCTION]),
    "a call that is cut": _taken(
        "use", "text", tools=[FUNCTION], max_output_tokens=8, why_streamed=CUT
    ),
    "reasoning and a call": _taken(
        "think and use", "thinking", "function_call", tools=[FUNCTION], why=LINES
    ),
    "text and a call": _taken(
        "say and use", "text", "function_call", tools=[FUNCTION], why=UNOPENED
    ),
    "two calls": _taken("use twice", "function_call", "function_call", tools=[FUNCTION]),
    "all of them": _taken(
        "all", "thinking", "text", "function_call", "function_call", tools=[FUNCTION], why=LINES
    ),
    "a call and text": _taken("use and say", "text", "function_call", tools=[FUNCTION], why=AFTER),
    "a broken call": _taken("break", "function_call", tools=[FUNCTION], why=BROKEN),
    "a call of another tool": _taken("other", "text", tools=[FUNCTION], why=UNOFFERED),
    "a call without arguments": _taken("no arguments", "function_call", tools=[FUNCTION], why=BARE),
    "a call without tools": _taken("use", "text"),
    "a call, tool_choice none": _taken("use", tools=[FUNCTION], tool_choice="none"),
    "no call": _taken("say", "text", tools=[FUNCTION], why=UNOPENED),
    "after reasoning": Case(
        takes(
            _user("think"),
            _REASONING,
            {"role": "assistant", "content": _FORTY_TWO},
            _user("say"),
            max_output_tokens=_MORE,
        ),
        why=UNOPENED,
        kinds=("text",),
    ),
    "after a call": Case(
        takes(_user("use"), FUNCTION_CALL, OUTPUT, tools=[FUNCTION], max_output_tokens=_MORE),
        why=LINES,
        kinds=("thinking", "text"),
    ),
}
