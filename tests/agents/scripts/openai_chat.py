"""An agent written against `openai` alone. Argument: one of the four ways scripts echo answers."""

import json
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiplies.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "b": {"type": "number"},
                "note": {"type": "string"},
            },
            "required": ["a", "b"],
        },
    },
}


def ask_and_keep_the_message(client: OpenAI, messages: list[Any]) -> Any:
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    return answer.choices[0].message


def ask_and_dump(client: OpenAI, messages: list[Any]) -> Any:
    return ask_and_keep_the_message(client, messages).model_dump()


def ask_the_stream_helper(client: OpenAI, messages: list[Any]) -> Any:
    with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
        return stream.get_final_completion().choices[0].message


def ask_and_accumulate(client: OpenAI, messages: list[Any]) -> Any:
    """As scripts join a stream by hand: the reasoning is lost."""
    text = ""
    calls: list[dict[str, Any]] = []
    chunks = client.chat.completions.create(
        model="policy", messages=messages, tools=[TOOL], stream=True
    )
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for piece in delta.tool_calls or []:
            assert piece.function is not None
            if piece.index == len(calls):
                function = {"name": piece.function.name, "arguments": ""}
                calls.append({"id": piece.id, "type": "function", "function": function})
            calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": calls} if calls else message


WAYS = {
    "message": ask_and_keep_the_message,
    "dump": ask_and_dump,
    "helper": ask_the_stream_helper,
    "accumulated": ask_and_accumulate,
}


def main(way: str, *questions: str) -> None:
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": "You compute."}]
    answers: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            message = WAYS[way](client, messages)
            messages.append(message)
            plain = message if isinstance(message, dict) else message.model_dump()
            if not plain.get("tool_calls"):
                answers.append(plain["content"])
                break
            for call in plain["tool_calls"]:
                given = json.loads(call["function"]["arguments"])
                product = str(float(given["a"] * given["b"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": product})
    sys.stdout.write(json.dumps(answers))


main(*sys.argv[1:])
