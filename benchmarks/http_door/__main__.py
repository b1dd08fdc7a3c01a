"""What HTTP servers cost with requests of a chat's size, and what they survive.

    make bench-http-door

Each server runs the same small application in a process of its own: the sidecar's (`bounded`),
uvicorn with httptools and with h11, hypercorn, granian. First they answer requests of 16 KB over 64
connections, by turns in three rounds. Then each meets every attack in a new process: connections
that send half a head, half a body or nothing, and floods. Time limits that a server has are set to
2 s. An attack is survived if a new client is answered after it, and while it lasts.

The last line of the output is one JSON object.
"""

import asyncio
import json
import os
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.http_door import attacks
from benchmarks.http_door.attacks import FLOODS, SLOW

SERVERS = ("bounded", "httptools", "h11", "hypercorn", "granian")
_HERE = Path(__file__).parent
_OTHERS = _HERE.parents[1] / ".venv-http" / "bin" / "python"
_ROUNDS, _CONNECTIONS, _REQUESTS, _BODY = 3, 64, 4_000, b"x" * 16_000
_SLOW_CONNECTIONS, _SLOW_S = 500, 6.0
_START_S, _TOTAL_S = 60.0, 560.0
_TICKS = os.sysconf("SC_CLK_TCK")


def _pids(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _pids(int(child)))]


def _cpu_s(pid: int) -> float:
    stats = (Path(f"/proc/{one}/stat").read_text().rpartition(")")[2] for one in _pids(pid))
    return sum(sum(map(int, stat.split()[11:13])) for stat in stats) / _TICKS


def _rss_mib(pid: int, which: str = "VmRSS") -> float:
    """Returns resident memory, that of now or with `VmHWM` the highest so far."""
    texts = (Path(f"/proc/{one}/status").read_text() for one in _pids(pid))
    return sum(int(text.partition(f"{which}:")[2].split()[0]) for text in texts) / 1024


@asynccontextmanager
async def _running(name: str) -> AsyncIterator[tuple[Process, int]]:
    """Runs a server; yields its process and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    python = sys.executable if name == "bounded" else str(_OTHERS)
    process = await asyncio.create_subprocess_exec(
        python, "serve.py", name, str(port), cwd=_HERE, stdout=DEVNULL, stderr=DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_START_S):
            while not await attacks.is_served(port):
                if process.returncode is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}")
                await asyncio.sleep(0.1)
        yield process, port
    finally:
        for pid in reversed(_pids(process.pid)) if process.returncode is None else ():
            os.kill(pid, 9)
        await process.wait()


async def _load(process: Process, port: int) -> dict[str, float]:
    """Returns the CPU time per request, and requests per second."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_CONNECTIONS)]

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(_REQUESTS // _CONNECTIONS):
            await attacks.request(reader, writer, _BODY)

    before, started = _cpu_s(process.pid), time.perf_counter()
    await asyncio.gather(*(take(*pair) for pair in pairs))
    wall_s = time.perf_counter() - started
    used = _cpu_s(process.pid) - before
    for _, writer in pairs:
        writer.close()
    return {"cpu_us": used / _REQUESTS * 1e6, "per_second": _REQUESTS / wall_s}


async def _slow(name: str, begin: bytes) -> dict[str, Any]:
    async with _running(name) as (process, port):
        memory, used = _rss_mib(process.pid), _cpu_s(process.pid)
        async with attacks.held(port, _SLOW_CONNECTIONS, begin) as readers:
            served = await attacks.is_served(port)
            grown = _rss_mib(process.pid) - memory
            count = await attacks.ended(readers, _SLOW_S)
            served &= await attacks.is_served(port)
        return {
            "ended": f"{count}/{_SLOW_CONNECTIONS}",
            "cpu_s": round(_cpu_s(process.pid) - used, 2),
            "kib_each": round(grown * 1024 / _SLOW_CONNECTIONS, 1),
            "survived": served,
        }


async def _flood(name: str, begin: bytes, part: bytes, mib: int) -> dict[str, Any]:
    async with _running(name) as (process, port):
        memory, used = _rss_mib(process.pid), _cpu_s(process.pid)
        flooded = await attacks.flood(port, begin, part, mib)
        served = await attacks.is_served(port)
        return {
            "end": flooded.end,
            "sent_mib": round(flooded.sent_mib, 1),
            "cpu_s": round(_cpu_s(process.pid) - used, 2),
            "grown_mib": round(_rss_mib(process.pid, "VmHWM") - memory, 1),
            "survived": served,
        }


async def _cost() -> dict[str, dict[str, float]]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    for _ in range(_ROUNDS):
        for name in SERVERS:
            async with _running(name) as (process, port):
                rounds[name].append(await _load(process, port))
    return {
        name: {key: round(median(one[key] for one in found)) for key in found[0]}
        for name, found in rounds.items()
    }


async def _run() -> dict[str, Any]:
    found: dict[str, Any] = await _cost()
    print(json.dumps(found))
    for name in SERVERS:
        for attack, begin in SLOW.items():
            found[name][attack] = await _slow(name, begin)
        for attack, how in FLOODS.items():
            found[name][attack] = await _flood(name, *how)
        print(name, json.dumps(found[name]))
    return found


def main() -> None:
    """Runs everything and prints the figures."""
    started = time.monotonic()
    found = asyncio.run(asyncio.wait_for(_run(), _TOTAL_S))
    found["seconds"] = round(time.monotonic() - started)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
