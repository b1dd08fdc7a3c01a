"""The Claude agent SDK with a tool and a hook of its own. Arguments: mode, questions."""

import asyncio
import json
import sys
from typing import Any

from claude_agent_sdk import (
    AgentDefinition,
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    HookMatcher,
    ResultMessage,
    StreamEvent,
    create_sdk_mcp_server,
    query,
    tool,
)

mode, *questions = sys.argv[1:]
TOOL = "mcp__math__calculator"
used: list[str] = []
streamed: list[str] = []


async def calculator(arguments: dict[str, Any]) -> dict[str, Any]:
    product = float(arguments["a"] * arguments["b"])
    whose = "in all" if mode == "client" else "to count" if len(used) == 1 else "as counted"
    return {"content": [{"type": "text", "text": f"{product} {whose}"}]}


async def note(given: Any, tool_use_id: str | None, context: Any) -> dict[str, Any]:
    """Notes each use of a tool, as a hook before it."""
    del tool_use_id, context
    used.append(given["tool_name"])
    return {}


CALCULATOR = tool("calculator", "Multiplies two numbers.", {"a": float, "b": float})(calculator)
OPTIONS = ClaudeAgentOptions(
    model="policy",
    system_prompt="You compute.",
    tools=["Agent"] if mode == "query" else [],
    allowed_tools=[TOOL, "Agent"],
    mcp_servers={"math": create_sdk_mcp_server("math", tools=[CALCULATOR])},
    hooks={"PreToolUse": [HookMatcher(hooks=[note])]},
    agents={"counter": AgentDefinition("Counts.", "You count.", tools=[TOOL], model="inherit")},
    include_partial_messages=True,
    setting_sources=[],
)


def take(message: Any) -> str | None:
    """Notes what is streamed. Returns the answer to a question once it is complete."""
    if isinstance(message, StreamEvent) and message.event["type"] == "content_block_delta":
        streamed.append(message.event["delta"].get("text", ""))
    if isinstance(message, ResultMessage):
        assert not message.is_error, message
        return str(message.result)
    assert not (isinstance(message, AssistantMessage) and message.error), message
    return None


async def converse(questions: list[str]) -> list[str]:
    """Asks in one conversation."""
    answers: list[str] = []
    async with ClaudeSDKClient(OPTIONS) as client:
        for question in questions:
            await client.query(question)
            found = [take(message) async for message in client.receive_response()]
            answers += [answer for answer in found if answer is not None]
    return answers


async def ask(question: str) -> list[str]:
    """Asks once."""
    found = [take(message) async for message in query(prompt=question, options=OPTIONS)]
    return [answer for answer in found if answer is not None]


answers = asyncio.run(converse(questions) if mode == "client" else ask(*questions))
end = {"answers": answers, "used": used, "streamed": "".join(streamed)}
sys.stdout.write(json.dumps(end) + "\n")
