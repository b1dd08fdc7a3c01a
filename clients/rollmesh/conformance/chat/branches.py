"""Histories that do not continue the last answer: agents edit, drop, summarise and interleave."""

import asyncio
from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT
from rollmesh.conformance.chat.requests import TOOL, ask, called, message_of, result, user
from rollmesh.conformance.checks import Family
from rollmesh.conformance.server import Server

BRANCHES = Family("chat.branches")


@BRANCHES.check(
    "A history that lacks the sampled answer is answered.",
    "mini-swe-agent: it drops an answer that has no call.",
)
async def _dropped_turn(server: Server) -> None:
    opening = [user("Dropped. What is 6 times 7?")]
    await ask(server, *opening)
    await ask(server, *opening, user("No call was found."))


@BRANCHES.check(
    "A history whose earlier message was edited is answered.",
    "Agents that shorten old tool results.",
)
async def _edited_history(server: Server) -> None:
    opening = user("Edited. What is 6 times 7?")
    said = message_of(await ask(server, opening))
    await ask(server, opening, said, user(DOUBT))
    await ask(server, {**opening, "content": "Edited later. What is 6 times 7?"}, said, user(DOUBT))


@BRANCHES.check(
    "A sampled answer under a summary instead of its history is answered.",
    "Agents that compact: Claude Code and Codex go on from a summary with their newest call.",
)
async def _compaction(server: Server) -> None:
    opening = user(f"Compacted. {CALCULATE}")
    said = called("call_00Ab")
    await ask(server, opening, said, result("call_00Ab"), tools=[TOOL])
    summary = user("This session is continued from another. Summary: 6 times 7 was asked.")
    await ask(server, summary, said, result("call_00Ab"), tools=[TOOL])


@BRANCHES.check(
    "Two continuations of one answer, asked at the same time, are both answered.",
    "Tree search, and agents that try two ways.",
)
async def _siblings(server: Server) -> None:
    opening = user("Forked. What is 6 times 7?")
    said = message_of(await ask(server, opening))
    ways: list[Any] = [ask(server, opening, said, user(f"Way {at}: {DOUBT}")) for at in range(3)]
    await asyncio.gather(*ways)


@BRANCHES.check(
    "Two conversations that take turns are both answered.",
    "Agents with sub-agents, and those that ask for a title beside their work.",
)
async def _interleaved(server: Server) -> None:
    histories = [
        [{"role": "system", "content": f"You are agent {name}."}, user()] for name in ("A", "B")
    ]
    for _ in range(2):
        for history in histories:
            history += [message_of(await ask(server, *history)), user(DOUBT)]


@BRANCHES.check(
    "A conversation whose tools change is answered.",
    "Agents that add or remove tools on the way, and compactions, which have none.",
)
async def _other_tools(server: Server) -> None:
    opening = user(f"Changed. {CALCULATE}")
    await ask(server, opening, tools=[TOOL])
    await ask(server, opening)
    other = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    await ask(server, opening, tools=[TOOL, other])
