"""What the viewer costs its reader: lists of 100,000 sessions, and a session of 100,000 tokens.

    make bench-view

A collector stores the sessions, and a real viewer reads them. Its HTTP is timed by a client on the
same machine, `*_ms` being medians of `--rounds` requests. `session_*` and `heap_mb` are of a
headless Chromium at a session of 200 turns, with all tokens as text: from the click to its first
tokens, and the frames while the page scrolls by 100 pixels each. They are null without Chromium.

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.harness.systems import make_model
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import (
    collector_pb2,
    collector_pb2_grpc,
    sampling_pb2,
    session_pb2,
    trajectory_pb2,
)
from tests.processes import running
from tests.view.browser import CHROMIUM, Page, browser
from tests.waiting import until

_SESSIONS, _BATCH = 100_000, 500
_TURNS, _TOKENS = 200, 100_000
_LONG = "a session of many turns"
_WORDS = ("shelf", "river", "engine", "garden", "letter", "window", "market", "signal")
_REQUESTS = {
    "list_ms": "sessions?limit=100",
    "sort_ms": "sessions?limit=100&order=most+tokens",
    "filter_ms": "sessions?limit=100&run_id=run-3&reason=LENGTH_CUT",
    "search_ms": "sessions?limit=100&words=garden+task-77",
    "groups_ms": "groups?limit=100&order=all+right",
    "series_ms": "series?by=version",
}
_SCROLL = """
new Promise((done) => {
  const started = performance.now();
  let frames = 0;
  const next = () => {
    frames += 1;
    scrollTo(0, frames * 100);
    if (frames < 180) requestAnimationFrame(next);
    else done(frames / ((performance.now() - started) / 1000));
  };
  requestAnimationFrame(next);
})
"""


def _session(number: int) -> session_pb2.SessionRecord:
    """Returns a session of one turn, in groups of eight, with few words."""
    cut = number % 50 == 0
    reason = (
        trajectory_pb2.FIDELITY_REASON_LENGTH_CUT if cut else trajectory_pb2.FIDELITY_REASON_EXACT
    )
    name = f"5e55{number:012x}"
    words = " ".join(_WORDS[(number // 7**at) % len(_WORDS)] for at in range(4))
    return session_pb2.SessionRecord(
        session_id=name,
        run_id=f"run-{number // 20_000}",
        group_id=f"g{number // 8}",
        sample_index=number % 8,
        group_size=8,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
        reward=float(number % 3 == 0),
        metadata={"task": f"task-{number // 8} {words}"},
        turns=1,
        model="policy",
        opened_unix_ms=1_700_000_000_000 + number * 10,
        closed_unix_ms=1_700_000_005_000 + number * 10,
        trajectories=[_trajectory(name, 1, 60, number // 1_000, reason)],
    )


def _trajectory(
    session: str, turns: int, tokens: int, version: int, reason: int
) -> trajectory_pb2.Trajectory:
    """Returns a trajectory whose turns are a prompt and an answer of equal length."""
    part = tokens // (2 * turns)
    count = part * 2 * turns
    sampled = np.tile(np.repeat([False, True], part), turns)
    ids = np.random.default_rng(version).integers(300, 1_000, count, dtype=np.uint32)
    logprobs = np.where(sampled, -np.float32(0.5), np.float32(0)).astype(np.float32)
    segments = [
        trajectory_pb2.TrajectorySegment(
            start=at * part,
            end=(at + 1) * part,
            node_id=at + 1,
            role=3 if at % 2 else 2,  # type: ignore[arg-type]
            sampled=bool(at % 2),
            trained=bool(at % 2),
            reasons=[reason] if at % 2 else [],  # type: ignore[list-item]
        )
        for at in range(2 * turns)
    ]
    return trajectory_pb2.Trajectory(
        trajectory_id=f"{session}-t",
        session_id=session,
        leaf_node_id=2 * turns,
        lineage=trajectory_pb2.LINEAGE_MAIN,
        tokens=trajectory_pb2.TokenArrays(
            token_ids_u32le=ids.tobytes(),
            logprobs_f32le=logprobs.tobytes(),
            loss_mask_u8=sampled.astype(np.uint8).tobytes(),
        ),
        prompt_tokens=part,
        turns=turns,
        segments=segments,
        version_spans=[
            sampling_pb2.VersionSpan(start=one.start, end=one.end, policy_version=version)
            for one in segments
            if one.sampled
        ],
        reasons=[reason],  # type: ignore[list-item]
    )


async def _fill(address: str, sessions: int) -> None:
    async with open_channel(address) as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        for start in range(0, sessions, _BATCH):
            numbers = range(start, min(start + _BATCH, sessions))
            batch = [_session(number) for number in numbers]
            await stub.Ingest(collector_pb2.IngestRequest(sessions=batch))
        long = _session(sessions)
        long.session_id, long.group_id, long.turns = "10ad", "", _TURNS
        long.metadata["task"] = _LONG
        del long.trajectories[:]
        exact = trajectory_pb2.FIDELITY_REASON_EXACT
        long.trajectories.append(_trajectory("10ad", _TURNS, _TOKENS, 1, exact))
        await stub.Ingest(collector_pb2.IngestRequest(sessions=[long]))


@asynccontextmanager
async def _viewed(folder: Path, sessions: int) -> AsyncIterator[tuple[str, float]]:
    """Yields the URL of a viewer that has read all sessions, and how long that took, seconds."""
    make_model(folder)
    model = folder / "model"
    async with running("collector", folder / "collector", data_dir=folder / "data") as collector:
        address = f"127.0.0.1:{collector.port}"
        await _fill(address, sessions)
        started = time.monotonic()
        flags = {"collector": address, "tokenizer": model}
        async with running("view", folder / "view", **flags) as view, httpx2.AsyncClient() as http:
            url = f"http://127.0.0.1:{view.port}"

            async def read() -> bool:
                return bool((await _asked(http, url, "sessions"))["total"] > sessions)

            await until(read, 900)
            yield url, time.monotonic() - started


async def _asked(http: httpx2.AsyncClient, url: str, path: str) -> Any:
    return (await http.get(f"{url}/api/{path}", timeout=60)).json()


async def _requests(url: str, rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    async with httpx2.AsyncClient() as http:
        for name, path in _REQUESTS.items():
            took = []
            for _ in range(rounds):
                started = time.perf_counter()
                await _asked(http, url, path)
                took.append((time.perf_counter() - started) * 1000)
            found[name] = round(statistics.median(took), 1)
    return found


async def _reading(url: str, rounds: int) -> dict[str, float | None]:
    """Returns the times of a reader who opens the long session with its tokens and scrolls."""
    if not CHROMIUM:
        return dict.fromkeys(("session_open_ms", "session_frames_per_s", "heap_mb"))
    opened, frames = [], []
    async with browser(url) as page:
        await page.open("#/session/10ad", "200 turns")
        await page.click("Tokens")
        for _ in range(rounds):
            await page.open("#/groups", "found")
            opened.append(await _opened(page))
            frames.append(float(await page.run(_SCROLL)))
        await page.call("HeapProfiler.collectGarbage")
        heap = await page.run("performance.memory.usedJSHeapSize")
    return {
        "session_open_ms": round(statistics.median(opened), 1),
        "session_frames_per_s": round(statistics.median(frames), 1),
        "heap_mb": round(heap / 1e6, 1),
    }


async def _opened(page: Page) -> float:
    script = """
    new Promise((done) => {
      const started = performance.now();
      location.hash = "#/session/10ad";
      const look = () => document.querySelectorAll(".node .tokens b").length
        ? done(performance.now() - started) : requestAnimationFrame(look);
      look();
    })
    """
    return float(await page.run(script))


async def main() -> None:
    """Fills a collector, reads it, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=_SESSIONS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmesh-view-") as folder:
        async with _viewed(Path(folder), options.sessions) as (url, seconds):
            requests = await _requests(url, options.rounds)
            reading = await _reading(url, max(3, options.rounds))
    result = {"sessions": options.sessions, "index_s": round(seconds, 1), **requests, **reading}
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
