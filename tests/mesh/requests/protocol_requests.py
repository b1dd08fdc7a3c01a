"""Requests in Messages and Responses that are sent to the mesh and to vLLM's own endpoints.

Each is the fields that it adds to a plain greedy request. A difference has the name of its class. A
class that is named without a difference fails, too. docs/messages.md explains the classes.
"""

from dataclasses import dataclass
from typing import Any

USER: dict[str, Any] = {"role": "user", "content": "What is 12 plus 30?"}
MESSAGES: dict[str, Any] = {
    "model": "policy",
    "messages": [USER],
    "temperature": 0,
    "max_tokens": 8,
}
RESPONSES: dict[str, Any] = {
    "model": "policy",
    "input": [USER],
    "temperature": 0,
    "max_output_tokens": 8,
}
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
}  # fmt: skip
TOOL: dict[str, Any] = {"name": "calculator", "description": "Adds.", "input_schema": SCHEMA}
FUNCTION: dict[str, Any] = {
    "type": "function", "name": "calculator", "description": "Adds.", "parameters": SCHEMA,
}  # fmt: skip

BREAK = "line break between texts"
NULLS = "null description"
FORCED = "forced calls"
MERGED = "merged system messages"
BEGUN = "begun answer"
SERVICE = "tools of a service"
TRUNCATED = "truncation"
UNKNOWN = "unknown response"
LIMIT = "limit beyond the context"
UNOPENED = "unopened reasoning"
LINES = "line breaks around reasoning"
CUT = "cut call"
AFTER = "text after a call"
BROKEN = "broken call"
UNOFFERED = "call of an unknown tool"
BARE = "call without arguments"
CLASSES = (
    BREAK, NULLS, FORCED, MERGED, BEGUN, SERVICE, TRUNCATED, UNKNOWN, LIMIT,
    UNOPENED, LINES, CUT, AFTER, BROKEN, UNOFFERED, BARE,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One request."""

    fields: dict[str, Any]
    why: str = ""
    """Class of the difference, in the status or in what the answer says."""
    kinds: tuple[str, ...] = ()
    """What the mesh's answer has. Empty where a random model decides."""
    why_streamed: str | None = None
    """Class of the difference in a stream, where it is another one."""

    def class_of(self, *, stream: bool) -> str:
        """Class of the difference. Empty if there is none."""
        return self.why_streamed if stream and self.why_streamed is not None else self.why


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def says(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": said} for role, said in messages], **fields}


def takes(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"input": list(items), **fields}


def message(role: str, *parts: tuple[str, str]) -> dict[str, Any]:
    content = [{"type": kind, "text": words} for kind, words in parts]
    return {"type": "message", "role": role, "content": content}


ASKED = ("user", USER["content"])
CALL = {"type": "tool_use", "id": "call00001", "name": "calculator", "input": {"a": 6}}
RESULT = {"type": "tool_result", "tool_use_id": "call00001", "content": "42"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
OTHER = {**CALL, "id": "call00002", "input": {"a": 7}}
NEXT = {**RESULT, "tool_use_id": "call00002", "content": [text("4"), text("3")]}
FUNCTION_CALL = {
    "type": "function_call",
    "call_id": "call00001",
    "name": "calculator",
    "arguments": '{"a": 6}',
}
OUTPUT = {"type": "function_call_output", "call_id": "call00001", "output": "42"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "42", "annotations": []}],
}

OF_MESSAGES: dict[str, Case] = {
    "plain": Case({}),
    "longer": Case({"max_tokens": 40}),
    "content in a block": Case(says(("user", [text("What is 12 plus 30?")]))),
    "content in two blocks": Case(says(("user", [text("What"), text(" is")])), why=BREAK),
    "system": Case({"system": "Be short."}),
    "system in blocks": Case({"system": [text("Be"), text(" short.")]}),
    "system with a note for billing": Case(
        {"system": [text("x-anthropic-billing-header: a=b;"), text("Be short.")]}
    ),
    "system within": Case(says(ASKED, ("system", "Be short."))),
    "history": Case(says(ASKED, ("assistant", "42"), ("user", "Sure?"))),
    "history in blocks": Case(says(ASKED, ("assistant", [text("42")]), ("user", "Sure?"))),
    "thinking in the history": Case(
        says(ASKED, ("assistant", [THOUGHT, text("42")]), ("user", "Sure?"))
    ),
    "tools": Case({"tools": [TOOL]}),
    "a tool without a description": Case(
        {"tools": [{"name": "f", "input_schema": SCHEMA}]}, why=NULLS
    ),
    "a call and its result": Case(
        says(ASKED, ("assistant", [CALL]), ("user", [RESULT]), tools=[TOOL])
    ),
    "text and a call": Case(
        says(ASKED, ("assistant", [text("So."), CALL]), ("user", [RESULT]), tools=[TOOL])
    ),
    "two calls": Case(
        says(ASKED, ("assistant", [CALL, OTHER]), ("user", [RESULT, NEXT]), tools=[TOOL]),
        why=BREAK,
    ),
    "a result and text": Case(
        says(ASKED, ("assistant", [CALL]), ("user", [RESULT, text("Go on.")]), tools=[TOOL])
    ),
    "an empty result": Case(
        says(ASKED, ("assistant", [CALL]), ("user", [{**RESULT, "content": ""}]), tools=[TOOL])
    ),
    "a failed result": Case(
        says(ASKED, ("assistant", [CALL]), ("user", [{**RESULT, "is_error": True}]), tools=[TOOL])
    ),
    "tool_choice auto": Case({"tools": [TOOL], "tool_choice": {"type": "auto"}}),
    "tool_choice none": Case({"tools": [TOOL], "tool_choice": {"type": "none"}}),
    "tool_choice any": Case(
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}, why=FORCED
    ),
    "tool_choice of a tool": Case(
        {
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "calculator"},
            "max_tokens": 60,
        },
        why=FORCED,
    ),
    "stop_sequences": Case({"stop_sequences": ["e"], "max_tokens": 30}),
    "top_k": Case({"temperature": 1.0, "top_k": 1}),
    "thinking": Case({"thinking": {"type": "adaptive"}}),
    "no thinking": Case({"thinking": {"type": "disabled"}}),
    "cache_control": Case(says(("user", [{**text("Hi"), "cache_control": {"type": "ephemeral"}}]))),
    "metadata": Case({"metadata": {"user_id": "ann"}}),
    "no max_tokens": Case({"max_tokens": None}),
    "no messages": Case({"messages": []}),
    "an unknown role": Case(says(("tool", "Hi"))),
    "an unknown block": Case(says(("user", [{"type": "video"}]))),
    "an assistant's beginning": Case(says(ASKED, ("assistant", "The answer")), why=BEGUN),
    "a tool of the service": Case({"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    "a prompt that is too long": Case(says(("user", "one two three " * 2000))),
    "max_tokens beyond the context": Case({"max_tokens": 100_000}),
}

OF_RESPONSES: dict[str, Case] = {
    "plain": Case({}),
    "longer": Case({"max_output_tokens": 40}),
    "input a string": Case({"input": USER["content"]}),
    "input in parts": Case(
        takes(message("user", ("input_text", "What"), ("input_text", " is"))), why=BREAK
    ),
    "instructions": Case({"instructions": "Be short."}),
    "developer": Case(takes({"role": "developer", "content": "Be short."}, USER)),
    "instructions and developer": Case(
        takes({"role": "developer", "content": "Be short."}, USER, instructions="Be."), why=MERGED
    ),
    "history": Case(takes(USER, SAID, {"role": "user", "content": "Sure?"})),
    "history without types": Case(
        takes(USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": "Sure?"})
    ),
    "reasoning in the history": Case(
        takes(USER, REASONING, SAID, {"role": "user", "content": "Sure?"})
    ),
    "tools": Case({"tools": [FUNCTION]}),
    "a strict tool": Case({"tools": [{**FUNCTION, "strict": True}]}),
    "a call and its output": Case(takes(USER, FUNCTION_CALL, OUTPUT, tools=[FUNCTION])),
    "text and a call": Case(takes(USER, SAID, FUNCTION_CALL, OUTPUT, tools=[FUNCTION])),
    "two calls": Case(
        takes(
            USER,
            FUNCTION_CALL,
            {**FUNCTION_CALL, "call_id": "call00002"},
            OUTPUT,
            {**OUTPUT, "call_id": "call00002"},
            tools=[FUNCTION],
        )
    ),
    "an output in parts": Case(
        takes(
            USER,
            FUNCTION_CALL,
            {**OUTPUT, "output": [{"type": "input_text", "text": "42"}]},
            tools=[FUNCTION],
        )
    ),
    "tool_choice auto": Case({"tools": [FUNCTION], "tool_choice": "auto"}),
    "tool_choice none": Case({"tools": [FUNCTION], "tool_choice": "none"}),
    "tool_choice required": Case(
        {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60}, why=FORCED
    ),
    "tool_choice of a function": Case(
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "name": "calculator"},
            "max_output_tokens": 60,
        },
        why=FORCED,
    ),
    "a schema": Case(
        {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "max_output_tokens": 60,
        }
    ),
    "a custom tool": Case({"tools": [{"type": "custom", "name": "patch", "description": "P."}]}),
    "a namespace": Case(
        {"tools": [{"type": "namespace", "name": "n", "description": "N", "tools": [FUNCTION]}]}
    ),
    "web_search": Case({"tools": [{"type": "web_search"}]}),
    "file_search": Case(
        {"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, why=SERVICE
    ),
    "seed": Case({"temperature": 1.0, "seed": 7}),
    "top_k": Case({"temperature": 1.0, "top_k": 1}),
    "reasoning effort": Case({"reasoning": {"effort": "low"}}),
    "metadata": Case({"metadata": {"a": "b"}, "store": True, "user": "ann"}),
    "truncation auto": Case({"truncation": "auto"}, why=TRUNCATED),
    "background": Case({"background": True}),
    "an unknown previous response": Case({"previous_response_id": "resp_1"}, why=UNKNOWN),
    "no input": Case({"input": None}),
    "an empty input": Case({"input": []}),
    "an unknown item": Case(takes({"type": "video"})),
    "a prompt that is too long": Case({"input": "one two three " * 2000}),
    "max_output_tokens beyond the context": Case({"max_output_tokens": 100_000}, why=LIMIT),
}
