"""Grammars that crash, stall or bloat the compiler fail alone."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.engine.vllm import Grammars
from rollmesh.runtime.errors import InvalidConstraintError, OverloadedError
from tests.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Grammars]:
    import xgrammar

    words = [chr(code) for code in range(256)]
    tokens = xgrammar.TokenizerInfo(
        words, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=[0]
    )
    tried = Grammars()
    await tried.start()
    await tried.set_vocabulary(tokens.serialize_json().encode())
    yield tried
    tried.stop()


def tag(schema: object) -> str:
    form = {"type": "json_schema", "json_schema": schema}
    return json.dumps({"type": "structural_tag", "format": form})


def pattern(text: str) -> str:
    return tag({"type": "string", "pattern": text})


GOOD = tag({"type": "object", "properties": {"a": {"type": "integer"}}})
CRASH = pattern("(" * 31_000 + "a" + ")" * 31_000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(CRASH, "crashes the grammar compiler", id="stack overflow"),
        pytest.param(pattern("[a-z]{20000}"), "longer than 0.5 s to parse", id="slow"),
        pytest.param(pattern("((("), "cannot be compiled: ", id="no regex"),
        pytest.param("{", "cannot be compiled: ", id="no JSON"),
    ],
)
async def test_a_bad_grammar_is_refused_and_the_next_one_is_compiled(
    grammars: Grammars, text: str, says: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidConstraintError, match=says) as caught:
            await grammars.check(text)
        assert caught.value.field == "constraint.structural_tag_json"
        await grammars.check(GOOD)


async def test_bad_and_good_grammars_are_tried_at_the_same_time(grammars: Grammars) -> None:
    def good(at: int) -> str:
        return tag({"enum": [f"value {at}"]})

    bad = [pattern("(" * (31_000 + at) + "a" + ")" * (31_000 + at)) for at in range(4)]
    checks: Iterable[Any] = map(grammars.check, [*bad, *map(good, range(4)), *bad])
    ends = await asyncio.gather(*checks, return_exceptions=True)
    refused = [isinstance(end, InvalidConstraintError) for end in ends]
    assert refused == [True] * 4 + [False] * 4 + [True] * 4


async def test_a_caller_that_leaves_does_not_take_the_trial_from_others(grammars: Grammars) -> None:
    text = tag({"enum": ["left alone"]})
    async with asyncio.TaskGroup() as group:
        first = group.create_task(grammars.check(text))
        second = group.create_task(grammars.check(text))
        await asyncio.sleep(0)
        first.cancel()
        await second
    assert first.cancelled()


async def test_the_process_is_started_again_after_it_was_killed(grammars: Grammars) -> None:
    killed = grammars.pid
    assert killed is not None
    os.killpg(killed, signal.SIGKILL)
    await grammars.check(tag({"enum": ["after a kill"]}))
    assert grammars.pid != killed


DISTURBED = """
import os, signal, socket, sys, threading
from pathlib import Path
from rollmesh.engine.vllm import grammar_process

def compile_(text, parsed):
    trials = Path(sys.argv[1])
    with trials.open("a") as file:
        print(text, file=file)
    parsed()
    if trials.read_text().count(text) == 1:
        if text == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

grammar_process.WALL_S = 2.0
grammar_process.serve(socket.socket(fileno=os.dup(0)), lambda vocabulary: compile_)
"""
"""Disturbs the first trial of each text: kills it as the kernel does without memory, or lets it
wait without processor time as on a busy machine."""


@pytest.mark.parametrize("text", ["killed", "delayed"])
async def test_a_trial_that_the_machine_ends_says_nothing_about_the_grammar(
    tmp_path: Path, text: str
) -> None:
    trials = tmp_path / "trials"
    grammars = Grammars((sys.executable, "-c", DISTURBED, str(trials)))
    try:
        await grammars.set_vocabulary(b"")
        ends = await asyncio.gather(
            grammars.check(text), grammars.check(text), return_exceptions=True
        )
        assert [type(end) for end in ends] == [OverloadedError] * 2
        assert trials.read_text().split() == [text]
        for _ in range(2):
            await grammars.check(text)
        assert trials.read_text().split() == [text] * 2
    finally:
        grammars.stop()


async def test_the_process_ends_with_its_owner() -> None:
    alone = Grammars()
    await alone.start()
    pid = alone.pid
    assert pid is not None
    alone.stop()

    async def gone() -> bool:
        return not os.path.exists(f"/proc/{pid}")  # noqa: PTH110 - one look

    await until(gone)
