"""An agent written against `anthropic` alone. Argument: one of the three ways scripts use it."""

import json
import sys
from typing import Any

from anthropic import Anthropic, beta_tool

SYSTEM = "You compute."
MAX_TOKENS = 400


def calculator(a: float, b: float, note: str = "") -> str:
    """Multiplies.

    Args:
        a: The first factor.
        b: The second one.
        note: Anything.
    """
    del note
    return str(float(a * b))


CALCULATOR: Any = beta_tool(calculator)


def ask(client: Anthropic, messages: list[Any], **fields: Any) -> Any:
    return client.messages.create(
        model="policy", max_tokens=MAX_TOKENS, system=SYSTEM, messages=messages, **fields
    )


def ask_the_stream_helper(client: Anthropic, messages: list[Any], **fields: Any) -> Any:
    with client.messages.stream(
        model="policy", max_tokens=MAX_TOKENS, system=SYSTEM, messages=messages, **fields
    ) as stream:
        return stream.get_final_message()


def loop(way: Any, client: Anthropic, messages: list[Any]) -> str:
    """Runs tools until the model answers, as the documentation shows it."""
    while True:
        answer = way(client, messages, tools=[CALCULATOR.to_dict()])
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": one.id,
                "content": CALCULATOR.call(one.input),
            }
            for one in calls
        ]
        messages.append({"role": "user", "content": results})


def run_tools(client: Anthropic, messages: list[Any], *, stream: bool) -> str:
    """Runs tools by the SDK's own loop."""
    runner = client.beta.messages.tool_runner(
        model="policy", max_tokens=MAX_TOKENS, system=SYSTEM, tools=[CALCULATOR],
        messages=messages, stream=stream,
    )  # fmt: skip
    text = ""
    for turn in runner:
        answer: Any = turn.get_final_message() if stream else turn
        text = "".join(block.text for block in answer.content if block.type == "text")
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason == "tool_use":
            messages.append(runner.generate_tool_call_response())
    return text


WAYS: dict[str, Any] = {
    "message": lambda client, messages: loop(ask, client, messages),
    "helper": lambda client, messages: loop(ask_the_stream_helper, client, messages),
    "runner": lambda client, messages: run_tools(client, messages, stream=False),
    "streaming-runner": lambda client, messages: run_tools(client, messages, stream=True),
}


def main(way: str, *questions: str) -> None:
    client = Anthropic()
    messages: list[Any] = []
    answers: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(WAYS[way](client, messages))
    sys.stdout.write(json.dumps(answers))


main(*sys.argv[1:])
