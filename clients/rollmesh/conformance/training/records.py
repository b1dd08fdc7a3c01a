"""An episode in training: nothing is lost, added, doubled, or joined without a label.

Each check drives one session and compares its record with the engine's own samples. The requests
are plain chat completions. Three ask an engine that follows a script for a special answer, by their
text.
"""

import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rollmesh.conformance.asked import DOUBT
from rollmesh.conformance.chat.requests import user
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.server import Server, need
from rollmesh.conformance.training.capture import Call, Episode, episode

RECORDS = Family("training.records")
NO_TEXT = "conformance: answer nothing"
"""Ends the message to which a scripted engine samples the end of the turn and nothing else."""
NO_IDS = "conformance: leave the ids out"
"""Ends the message to which a scripted engine answers without token ids."""
OTHER_IDS = "conformance: sample other ids"
"""Ends the message to which a scripted engine samples ids that are not those of its text."""
_CUT_TOKENS = 3
_LOST = "Trainers: a turn that the agent made is not trained, and no figure shows it."
_FOREIGN = "Trainers: tokens are trained after a context in which they were not sampled."


@RECORDS.check(
    "An episode of three turns is one sequence that has each answer's ids and log-probabilities.",
    "Trainers: each turn becomes an episode of its own, with the prompt trained over and over.",
)
async def _one_sequence(server: Server) -> None:
    async with episode(server) as found:
        await _three_turns(found)
    _complete(found, found.calls)
    _joined(found, found.calls)
    short = [one for one in found.spans if one.trained and one.logprobs != one.end - one.start]
    need(not short, f"{len(short)} answers have another number of log-probabilities than ids")


@RECORDS.check(
    "An answer for which the engine showed no token ids is refused, or the record labels it.",
    "Trainers: a turn without ids counts as a whole sample, and nothing of it is trained.",
)
async def _missing_ids(server: Server) -> None:
    async with episode(server) as found:
        opening = user("Ids. What is 6 times 7?")
        history = [opening, await found.ask(opening), user(NO_IDS)]
        answer = await found.post(*history)
        if answer.status == 200:
            await found.ask(*history, found.took(answer.body()), user(DOUBT))
    if answer.status != 200:
        return
    if all(one.sampled for one in found.calls):
        raise NotSeenError("the engine shows the ids of every answer")
    need(any(one.labels for one in found.spans), "no label tells the answer without ids apart")


@RECORDS.check(
    "Three answers that max_tokens cut are all in the record, in one sequence or labelled.",
    _LOST,
)
async def _cut_answers(server: Server) -> None:
    async with episode(server, max_tokens=_CUT_TOKENS) as found:
        await _three_turns(found)
    _cut(found)
    _complete(found, found.calls)
    _joined_or_labelled(found, found.calls)


@RECORDS.check(
    "A retry and the turns after it are in the record, and a first attempt that was lost is not "
    "trained as if the agent had used it.",
    _LOST,
)
async def _retry(server: Server) -> None:
    async with episode(server) as found:
        opening, key = user("Retried. What is 6 times 7?"), {"idempotency-key": uuid.uuid4().hex}
        await found.ask(opening, marks={**key, "x-stainless-retry-count": "0"})
        said = await found.ask(opening, marks={**key, "x-stainless-retry-count": "1"})
        await found.ask(opening, said, user(DOUBT))
    kept = found.calls[-2:]
    _complete(found, kept, found.calls[:-2])
    _joined_or_labelled(found, kept)
    _not_plain(found, kept, found.calls[:-2], "first attempt")


@RECORDS.check(
    "A turn under a summary instead of its history is in the record, and labelled as a split.",
    "Trainers: one episode counts as two, and its reward is given twice.",
)
async def _edited_history(server: Server) -> None:
    async with episode(server) as found:
        opening = user("Compacted. What is 6 times 7?")
        await found.ask(opening, await found.ask(opening), user(DOUBT))
        await found.ask(user(f"Summary: 6 times 7 was asked. {DOUBT}"))
    _complete(found, found.calls)
    _joined_or_labelled(found, found.calls)


@RECORDS.check(
    "Two turns that continue one answer are in the record, and the answer is trained once.",
    "Trainers: an answer has more weight the more branches continue it.",
)
async def _shared_answer(server: Server) -> None:
    async with episode(server) as found:
        opening = user("Shared. What is 6 times 7?")
        said = await found.ask(opening)
        for way in ("first", "second"):
            await found.ask(opening, said, user(f"{DOUBT} In the {way} way."))
    shared, *branches = found.calls
    _complete(found, found.calls)
    for branch in branches:
        _joined_or_labelled(found, [shared, branch])


@RECORDS.check(
    "An episode is one sequence, or labelled, where the template prints text before an answer that "
    "it leaves out of the history, as Qwen3 does with enable_thinking false.",
    "Trainers: every episode of more than one turn splits at each turn.",
)
async def _template_glue(server: Server) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with episode(server) as plain:
        await plain.ask(user("Glued. What is 6 times 7?"))
    async with episode(server, **off) as found:
        await _three_turns(found, "Glued. What is 6 times 7?")
    if not plain.calls or plain.calls[0].prompt == found.calls[0].prompt:
        raise NotSeenError("the template prints the same prompt with enable_thinking false")
    _complete(found, found.calls)
    _joined_or_labelled(found, found.calls)


@RECORDS.check(
    "An episode is one sequence, or labelled, where the text of an answer encodes to other ids than"
    " were sampled.",
    "Trainers: an episode splits where a history is encoded again, or trains ids nobody sampled.",
)
async def _other_ids(server: Server) -> None:
    async with episode(server) as found:
        opening = user(OTHER_IDS)
        history = [opening, await found.ask(opening), user(DOUBT)]
        await found.ask(*history)
    async with episode(server) as fresh:
        await fresh.ask(*history)
    shown = found.calls[0].prompt + found.calls[0].sampled
    if fresh.calls[0].prompt[: len(shown)] == shown:
        raise NotSeenError("the text of the answer encodes to the ids that were sampled")
    _complete(found, found.calls)
    _joined_or_labelled(found, found.calls)


@RECORDS.check(
    "An answer that a stop string ended is in the record, and the next turn's context is the "
    "engine's.",
    _FOREIGN,
)
async def _stop_string(server: Server) -> None:
    opening = user("Stopped. What is 6 times 7?")
    async with episode(server, temperature=0) as whole:
        text = str((await whole.ask(opening))["content"])
    stop = text[len(text) // 2 :][:4]
    if not stop.strip():
        raise NotSeenError(f"no stop string can be taken from the answer {text!r:.60}")
    async with episode(server, temperature=0, stop=[stop]) as found:
        said = await found.ask(opening)
        if len(said["content"]) >= len(text):
            raise NotSeenError(f"the stop string {stop!r} ended nothing")
        await found.ask(opening, said, user(DOUBT))
    _complete(found, found.calls)
    _joined_or_labelled(found, found.calls)


@RECORDS.check(
    "A turn to which the model sampled only the end of its turn is in the record, with the turns "
    "after it.",
    _LOST,
)
async def _empty_answer(server: Server) -> None:
    async with episode(server) as found:
        opening = user("Emptied. What is 6 times 7?")
        history = [opening, await found.ask(opening), user(NO_TEXT)]
        said = await found.ask(*history)
        if said["content"]:
            raise NotSeenError("the engine answered with text")
        await found.ask(*history, said, user(DOUBT))
    _complete(found, [one for one in found.calls if one.sampled])
    _joined_or_labelled(found, found.calls)


@RECORDS.check(
    "A cut answer that the agent threw away is labelled, and the turn that it asked instead is in "
    "the record with its own prompt.",
    _FOREIGN,
)
async def _dropped_cut_answer(server: Server) -> None:
    async with episode(server, max_tokens=_CUT_TOKENS) as found:
        opening = user("Dropped. What is 6 times 7?")
        await found.ask(opening)
        await found.ask(opening, user("Be brief."))
    _cut(found)
    _complete(found, found.calls[1:], found.calls[:1])
    _not_plain(found, found.calls[1:], found.calls[:1], "answer that was thrown away")


@RECORDS.check(
    "A request for two choices is refused, or a turn that continues the second one is recorded "
    "after the second one.",
    _FOREIGN,
)
async def _choices(server: Server) -> None:
    async with episode(server) as found:
        opening = user("Two choices. What is 6 times 7?")
        answer = await found.post(opening, n=2)
        if answer.status != 200:
            return
        body = answer.body()
        need(len(body.get("choices") or ()) == 2, "n=2 is answered with another number of choices")
        await found.ask(opening, found.took(body, 1), user(DOUBT))
    need(len(found.calls) == 3, f"two choices and a turn are {len(found.calls)} samples")
    first, second, last = found.calls
    _complete(found, [second, last], [first])
    _joined_or_labelled(found, [second, last])


@RECORDS.check(
    "Two turns of different weights are recorded with different versions.",
    "Trainers: the ratio of the older turn is taken to the wrong policy.",
)
async def _versions(server: Server) -> None:
    async with episode(server) as found:
        opening = user("Versions. What is 6 times 7?")
        said = await found.ask(opening)
        await found.next_version()
        await found.ask(opening, said, user(DOUBT))
    _complete(found, found.calls)
    names = [
        {span.version for span in found.spans if span.trained and span.holds(call)}
        for call in found.calls
    ]
    need(None not in names[0] | names[-1], "the record names no version")
    need(not names[0] & names[-1], f"both turns have the version {sorted(map(str, names[0]))}")


async def _three_turns(found: Episode, opening: str = "Three turns. What is 6 times 7?") -> None:
    history = [user(opening)]
    for way in ("first", "second"):
        history += [await found.ask(*history), user(f"{DOUBT} For the {way} time.")]
    await found.ask(*history)


def _cut(found: Episode) -> None:
    longest = max(len(one.sampled) for one in found.calls)
    if longest > _CUT_TOKENS:
        raise NotSeenError(f"max_tokens {_CUT_TOKENS} cut nothing: {longest} tokens were sampled")


def _complete(found: Episode, kept: Sequence[Call], others: Sequence[Call] = ()) -> None:
    """Each answer that the agent used is trained once, as it was sampled, and nothing else is."""
    trained = [one for one in found.spans if one.trained]
    possible = Counter([*kept, *others])
    for call, least in Counter(kept).items():
        times = sum(one.holds(call) for one in trained)
        at = 1 + found.calls.index(call)
        need(
            times >= least, f"answer {at} is not in the record as it was sampled; {_counts(found)}"
        )
        need(times <= possible[call], f"answer {at} is trained {times} times")
    for one in trained:
        where = f"{one.end - one.start} tokens are trained at {one.start}"
        need(any(map(one.holds, possible)), f"{where}, which the engine did not sample so")


def _joined(found: Episode, calls: Sequence[Call]) -> None:
    """The calls lie on one row, each with its own ids."""
    split = _split(found, calls)
    need(not split, f"answer {split} begins a sequence of its own")


def _joined_or_labelled(found: Episode, calls: Sequence[Call]) -> None:
    """The calls lie on one row, or a label is at the split: on the answer before it or after it."""
    if split := _split(found, calls):
        beside = calls[split - 2 : split]
        labelled = any(one.labels for one in found.spans if any(map(one.holds, beside)))
        need(labelled, f"answer {split} begins a sequence of its own, and no label says so")


def _split(found: Episode, calls: Sequence[Call]) -> int:
    """Returns which call does not continue the one before, from 1. 0 if all do."""
    for at, (before, after) in enumerate(pairwise(calls), start=2):
        spans = [one for one in found.spans if one.holds(before)]
        if not any(after.prompt[: one.end] == one.row[: one.end] for one in spans):
            return at
    return 0


def _not_plain(found: Episode, kept: Sequence[Call], dropped: Sequence[Call], what: str) -> None:
    """No answer that the agent did not use is trained without a label."""
    plain = [one for one in found.spans if one.trained and not one.labels]
    used = Counter(kept)
    for call in dropped:
        times = sum(one.holds(call) for one in plain)
        need(
            times <= used[call], f"the {what} is trained as any other, and no label tells it apart"
        )


def _counts(found: Episode) -> str:
    trained = sum(one.trained for one in found.spans)
    return f"the engine sampled {len(found.calls)} answers, the record trains {trained}"
