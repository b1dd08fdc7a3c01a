"""Token ids of chat completions: turn 2 is prompted with the very tokens of turn 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT
from rollmesh.conformance.chat.echoes import parts
from rollmesh.conformance.chat.requests import (
    FORCED,
    PATH,
    ask,
    checked,
    message_of,
    post,
    request,
    result,
    sampled_call,
    stream,
    user,
)
from rollmesh.conformance.chat.variants import CALLS, TEXTS, Variant, as_sent
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.images import picture, seen
from rollmesh.conformance.server import Server, need

TOKENS = Family("chat.tokens")
_SAMPLES = 4
"""Conversations of each check: not every text is tokenised in another way than it was sampled."""
_SHOWN: dict[str, Any] = {"return_token_ids": True}


@dataclass(frozen=True, slots=True)
class _Turn:
    message: dict[str, Any]
    prompt: list[int]
    sampled: list[int]


def _turn(body: dict[str, Any]) -> _Turn:
    prompt, choice = body.get("prompt_token_ids"), body["choices"][0]
    sampled = choice.get("token_ids")
    if not isinstance(prompt, list) or not isinstance(sampled, list):
        raise NotSeenError("the server shows no token ids with return_token_ids")
    return _Turn(message_of(body), prompt, sampled)


async def _ask(server: Server, *messages: dict[str, Any], **fields: Any) -> _Turn:
    return _turn(await ask(server, *messages, **_SHOWN, **fields))


def _continues(first: _Turn, second: _Turn) -> None:
    before = first.prompt + first.sampled
    at = _differs(before, second.prompt)
    where = "its prompt" if at < len(first.prompt) else "its answer"
    need(
        at == len(before),
        f"the next prompt leaves the {len(before)} tokens of the turn before at {at}, in {where}: "
        f"{before[at : at + 3]} became {second.prompt[at : at + 3]}",
    )


def _differs(before: Sequence[int], after: Sequence[int]) -> int:
    """Returns the first place at which `after` is not as `before`. The length if there is none."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(before), len(after)))


_DRIFT = "the trainer's tokens are not those that the model sampled, so its ratios are wrong."


async def _text(variant: Variant, server: Server) -> None:
    for seed in range(_SAMPLES):
        opening = user(f"Number {seed}. What is 6 times 7?")
        first = await _ask(server, opening, seed=seed)
        echo = variant(first.message)
        _continues(first, await _ask(server, opening, echo, user(DOUBT), max_tokens=1))


async def _call(variant: Variant, server: Server) -> None:
    body, message = await sampled_call(server, **_SHOWN)
    first, results = _turn(body), [result(call["id"]) for call in message["tool_calls"]]
    echo = variant(message)
    second = await _ask(
        server, user(CALCULATE), echo, *results, tools=FORCED["tools"], max_tokens=1
    )
    _continues(first, second)


for _echoes, _run in ((TEXTS, _text), (CALLS, _call)):
    for _name, (_variant, _who) in _echoes.items():
        TOKENS.add(
            f"prefix-{_name}",
            f"The next prompt begins with the tokens of the turn, echoed as: {_variant.__doc__}",
            f"{_who}: {_DRIFT}",
            partial(_run, _variant),
        )


@TOKENS.check(
    "The third prompt begins with the second, which begins with the first.",
    f"Every agent of more than one turn: {_DRIFT}",
)
async def _prefix_three_turns(server: Server) -> None:
    messages = [user("Three turns. What is 6 times 7?")]
    last = await _ask(server, *messages)
    for _ in range(2):
        messages += [last.message, user(DOUBT)]
        found = await _ask(server, *messages)
        _continues(last, found)
        last = found


@TOKENS.check(
    "The next prompt begins with the tokens of an answer that max_tokens cut.",
    f"Agents that go on after a cut answer: {_DRIFT}",
)
async def _prefix_cut_answer(server: Server) -> None:
    for limit in range(1, 1 + _SAMPLES):
        opening = user(f"Cut at {limit}. What is 6 times 7?")
        first = await _ask(server, opening, max_tokens=limit, seed=limit)
        second = await _ask(server, opening, as_sent(first.message), user(DOUBT), max_tokens=1)
        _continues(first, second)


@TOKENS.check(
    "Of two conversations that take turns, each continues its own tokens.",
    f"Agents with sub-agents: {_DRIFT}",
)
async def _prefix_interleaved(server: Server) -> None:
    systems = [{"role": "system", "content": f"You are agent {name}."} for name in ("A", "B")]
    firsts = [await _ask(server, system, user()) for system in systems]
    for system, first in zip(systems, firsts, strict=True):
        _continues(first, await _ask(server, system, user(), first.message, user(DOUBT)))


@TOKENS.check(
    "Two continuations of one answer both begin with its tokens.",
    f"Tree search: {_DRIFT}",
)
async def _prefix_siblings(server: Server) -> None:
    opening = user("Siblings. What is 6 times 7?")
    first = await _ask(server, opening)
    for way in ("One", "Two"):
        second = await _ask(server, opening, first.message, user(f"{way}: {DOUBT}"), max_tokens=1)
        _continues(first, second)


@TOKENS.check(
    "The next prompt begins with the tokens of a turn that showed images.",
    f"Computer-use agents: {_DRIFT}",
)
async def _prefix_images(server: Server) -> None:
    opening = user(parts((picture(), picture(1)), "Images. What is 6 times 7?"))
    first = _turn(checked(seen(await post(server, opening, **_SHOWN))))
    again = user(parts((picture(),), DOUBT))
    _continues(first, await _ask(server, opening, first.message, again, max_tokens=1))


@TOKENS.check(
    "A stream shows its token ids, and the next prompt begins with them.",
    f"Agents that stream: {_DRIFT}",
)
async def _prefix_streamed(server: Server) -> None:
    opening = user("Streamed. What is 6 times 7?")
    chunks = (await stream(server, opening, **_SHOWN)).datas()
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    sampled = [token for choice in choices for token in choice.get("token_ids") or []]
    if not prompts or not sampled:
        raise NotSeenError("the server shows no token ids in a stream")
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    first = _Turn({"role": "assistant", "content": text}, prompts[0], sampled)
    _continues(first, await _ask(server, opening, first.message, user(DOUBT), max_tokens=1))


@TOKENS.check(
    "The token ids are as many as usage says.",
    "Trainers that allocate by the counts, and whoever pays by them.",
)
async def _counts(server: Server) -> None:
    body = await ask(server, **_SHOWN)
    turn, usage = _turn(body), body.get("usage") or {}
    shown = (len(turn.prompt), len(turn.sampled))
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    need(shown == counted, f"{shown} ids are shown, {counted} are counted")


@TOKENS.check(
    "logprobs has one entry for each sampled id.",
    "Trainers that align log-probabilities with ids by position.",
)
async def _logprobs(server: Server) -> None:
    body = await ask(server, **_SHOWN, logprobs=True)
    turn = _turn(body)
    entries: Any = (body["choices"][0].get("logprobs") or {}).get("content")
    need(isinstance(entries, list), "the answer has no logprobs.content")
    need(
        len(entries) == len(turn.sampled),
        f"{len(entries)} entries for {len(turn.sampled)} ids",
    )


@TOKENS.check(
    "One conversation has one prompt: repeated, streamed or not, its ids are equal.",
    "Groups of samples, whose advantage is taken over one prompt.",
)
async def _same_prompt(server: Server) -> None:
    body = request(server, user("Same. What is 6 times 7?"), max_tokens=1, **_SHOWN)
    found = [_turn((await server.post(PATH, body)).body()).prompt for _ in range(2)]
    need(found[0] == found[1], "the same request has another prompt the second time")
