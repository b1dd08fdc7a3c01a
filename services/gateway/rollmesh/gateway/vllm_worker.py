"""One of vLLM's tool parsers in a process of its own. `vllm_parser` starts it and asks it.

The only module of the gateway that imports vLLM, which takes ten seconds and half a gigabyte. No
other imports it. Arguments: the parser's name, the model's folder. It reads requests as lines of
JSON from standard input, answers each with a line on standard output, and ends with its input.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Parse = Callable[[str, list[Any]], dict[str, Any]]


def load(name: str, model_path: Path) -> Parse:
    """Loads vLLM and the parser. Returns what reads one answer."""
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    made = ToolParserManager.get_tool_parser(name)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(model_path / "tokenizer.json"))
    made(tokenizer)  # fails now if something is missing

    def parse(text: str, tools: list[Any]) -> dict[str, Any]:
        functions = [{"type": "function", "function": one.get("function", one)} for one in tools]
        messages = [{"role": "user", "content": "?"}]
        request: Any = ChatCompletionRequest.model_validate(
            {"model": "", "messages": messages, "tools": functions}
        )
        parser: Any = made(tokenizer, request.tools)
        if hasattr(parser, "skip_reasoning_parsing"):
            parser.skip_reasoning_parsing = True  # the gateway has parted it already
        found = parser.extract_tool_calls(text, request)
        calls = [(one.function.name, one.function.arguments) for one in found.tool_calls]
        return {"content": found.content or "", "calls": calls}

    return parse


def serve(parse: Parse, requests: TextIO, answers: TextIO) -> None:
    """Answers requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = parse(request["text"], request["tools"])
        except Exception as error:  # a parser of others may raise anything
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say({"id": request["id"], **answer}, answers)


def _say(message: dict[str, Any], answers: TextIO) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def main() -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    logging.disable(logging.CRITICAL)
    # Whatever prints to standard output must not come between the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            parse = load(sys.argv[1], Path(sys.argv[2]))
        except Exception as error:  # the caller gets the reason
            _say({"error": f"{type(error).__name__}: {error}"}, answers)
            return 1
        _say({"ready": True}, answers)
        serve(parse, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
