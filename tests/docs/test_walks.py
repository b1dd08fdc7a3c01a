"""The walks of docs/architecture.md: the functions exist and are called in the page's order."""

import importlib
import re
from collections.abc import AsyncIterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollmesh.batches import ragged, rows_of, to_torch
from rollmesh.client import Client
from tests.docs.walks import Tracer, one_process
from tests.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
MOST_FUNCTIONS = 20
CHAT, LEASE, CLOSE = (
    "A streamed chat request, from HTTP byte to journal commit",
    "A lease",
    "A closed session, to a tensor",
)
Step = tuple[str, str]
"""Module and qualified name of a function."""


def walk(title: str) -> list[Step]:
    """The functions of a walk, as the page names them."""
    (section,) = re.findall(rf"^## {title}\n(.*?)^## ", PAGE.read_text("utf-8"), re.M | re.S)
    lines = re.findall(r"^\d+\. (.*)", section, re.M)
    found = [re.match(r"`([\w.]+):([\w.]+)` \w", line) for line in lines]
    assert all(found), f"{title}: a line does not begin with `module:function` and why"
    return [(one[1], one[2]) for one in found if one is not None]


@pytest.mark.parametrize("title", [CHAT, LEASE, CLOSE])
def test_a_walk_has_few_functions_and_each_of_them_exists(title: str) -> None:
    steps = walk(title)
    assert 10 <= len(steps) <= MOST_FUNCTIONS
    for module, name in steps:
        found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        assert (found.__module__, found.__qualname__) == (module, name)


@pytest.fixture
async def traced(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[tuple[Client, Tracer]]:
    tracer = Tracer()
    with tracer.installed():
        async with one_process(tmp_path, tokenizer_dir) as client:
            yield client, tracer


async def test_the_walks_equal_the_recorded_calls(traced: tuple[Client, Tracer]) -> None:
    client, tracer = traced
    async with client.subscribe("walks", unit="session") as sessions:
        session = await client.open_session(client.session_request())
        with tracer.noting(), tracer.awaiting(walk(LEASE)[-1]) as released:
            await stream_an_answer(session.base_url, session.api_key)
            await released.wait()
        chat = tracer.calls
        assert in_order(walk(CHAT), chat) == walk(CHAT)
        assert in_order(walk(LEASE), chat) == walk(LEASE)
        session.reward = 1.0
        with tracer.noting():
            await client.close_session(session)
            delivery = await anext(sessions)
            to_torch(ragged(rows_of([delivery])))
        assert in_order(walk(CLOSE), tracer.calls) == walk(CLOSE)
        await sessions.acknowledge(delivery)


def in_order(steps: list[Step], calls: list[Step]) -> list[Step]:
    """The steps, up to the first that was not called after the one before it.

    A step may also run earlier: a ping of the router takes the way of a lease.
    """
    remaining = iter(calls)
    return [step for step in steps if step in remaining]


async def stream_an_answer(base_url: str, api_key: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as openai:
        stream = await openai.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert [chunk async for chunk in stream]
