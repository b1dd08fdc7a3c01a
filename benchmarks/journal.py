"""What a gateway's journal costs on SQLite and PostgreSQL, and how long a takeover takes.

    make bench-journal

A turn of 700 prompt ids and 300 sampled ones is committed as the gateway commits it: 200 turns one
after another, and 640 of 32 sessions at a time. Both stores take turns in three rounds. The figures
are medians. Then, three times each, one of two gateways on one PostgreSQL is killed (SIGKILL) or
stopped (SIGTERM) and an agent asks every 50 ms until the other one answers, with the default lease.

The last line of the output is one JSON object.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import openai

from rollmesh.chat import Message, make_context
from rollmesh.gateway import (
    AnswerReceipt,
    GatewayConfig,
    Journal,
    Node,
    Sample,
    SessionSpec,
    Tree,
    insert_session,
    insert_turn,
)
from rollmesh.v1 import sampling_pb2
from tests.collector.postgres_server import postgres_database
from tests.fleets import gateway_fleet
from tests.gateway.journals import postgres_journal, sqlite_journal
from tests.models import make_tokenizer_dir

_ROUNDS = 3
_ALONE, _SESSIONS, _EACH = 200, 32, 20
_PROMPT, _SAMPLED = 700, 300
_PAUSE_S = 0.05
_RULES = [("plain", "The answer is 42."), ("next", "I am not sure.")]
_TOTAL_TIMEOUT_S = 540

Figures = dict[str, float]


def turn(tree: Tree, at: int) -> list[Node]:
    """Adds a turn to a tree. Returns its nodes."""
    ids = np.arange(_PROMPT, dtype=np.uint32)
    context = make_context(b"", b"{}")
    asked = tree.add_messages(tree.root(context), (Message("user", f"turn {at} " * 100),), ids)
    sample = Sample(
        np.arange(_SAMPLED, dtype=np.uint32),
        np.full(_SAMPLED, -0.5, np.float32),
        (sampling_pb2.VersionSpan(policy_version=1, end=_SAMPLED, engine_id="engine-0"),),
        sampling_pb2.FINISH_REASON_STOP,
        prompt_tokens=_PROMPT,
        cached_tokens=0,
        prompt_crc32=0,
    )
    answer = Message("assistant", "an answer " * 100)
    node = tree.add_sample(asked, answer, np.empty(0, np.uint32), sample, frozenset())
    return [asked, node]


async def commit(store: Journal, session_id: str, count: int) -> list[float]:
    """Commits turns of one session one after another. Returns the time of each, milliseconds."""
    tree, times = Tree(frozenset({2})), list[float]()
    await store.run(lambda tx: insert_session(tx, SessionSpec(session_id, 0)))
    receipt = AnswerReceipt("chatcmpl-0", "f" * 64, "", 0)
    for at in range(count):
        nodes = turn(tree, at)
        began = time.perf_counter()
        await store.run(lambda tx: insert_turn(tx, session_id, nodes, receipt))  # noqa: B023
        times.append((time.perf_counter() - began) * 1000)
    return times


async def measure(store: Journal, name: str) -> Figures:
    """Commits turns, alone and with those of other sessions."""
    alone = await commit(store, "alone", _ALONE)
    began = time.perf_counter()
    together = await asyncio.gather(
        *(commit(store, f"session-{at}", _EACH) for at in range(_SESSIONS))
    )
    seconds = time.perf_counter() - began
    return {
        f"commit_ms_p50_{name}": median(alone),
        f"commit_ms_p99_{name}": quantiles(alone, n=100)[98],
        f"commit_32_ms_p50_{name}": median(ms for one in together for ms in one),
        f"turns_s_{name}": _SESSIONS * _EACH / seconds,
    }


@asynccontextmanager
async def _on_postgres() -> AsyncIterator[Journal]:
    async with postgres_database() as database, postgres_journal(database.url) as store:
        yield store


async def commits() -> Figures:
    """Measures one round of both stores."""
    with tempfile.TemporaryDirectory(prefix="bench-journal-") as folder:
        async with sqlite_journal(Path(folder)) as store:
            found = await measure(store, "sqlite")
    async with _on_postgres() as store:
        return found | await measure(store, "postgres")


async def takeover(folder: Path, model: Path, *, is_killed: bool) -> float:
    """Returns the time from the end of a gateway to the next answer in its session, seconds."""
    lease_ms = GatewayConfig().journal_lease_ms
    async with gateway_fleet(folder, model, _RULES, lease_ms) as fleet:
        session = await fleet.session_at("gateway-1")
        agent = fleet.agent(session)

        async def answered() -> bool:
            try:
                await agent.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "plain"}]
                )
            except openai.APIStatusError:
                return False
            return True

        assert await answered()
        gateway = fleet.mesh.processes["gateway-1"]
        end: Callable[[], Awaitable[object]] = gateway.kill if is_killed else gateway.terminate
        began = time.perf_counter()
        ending = asyncio.ensure_future(end())
        while await fleet.owner(session) == "gateway-1" or not await answered():  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        seconds = time.perf_counter() - began
        await ending
        return seconds


async def main() -> None:
    """Runs the benchmark and prints the results."""
    rounds: list[Figures] = []
    async with asyncio.timeout(_TOTAL_TIMEOUT_S):
        for at in range(_ROUNDS):
            found = await commits()
            with tempfile.TemporaryDirectory(prefix="bench-takeover-") as name:
                model = make_tokenizer_dir(Path(name) / "model")
                for key, is_killed in (("takeover_s", True), ("handover_s", False)):
                    folder = Path(name) / key
                    folder.mkdir()
                    found[key] = await takeover(folder, model, is_killed=is_killed)
            rounds.append(found)
            print(
                f"round {at + 1}:", json.dumps({key: round(one, 2) for key, one in found.items()})
            )
    medians = {key: round(median(one[key] for one in rounds), 2) for key in rounds[0]}
    print(json.dumps(medians | {"rounds": _ROUNDS}))


if __name__ == "__main__":
    asyncio.run(main())
