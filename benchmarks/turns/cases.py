"""Measurements besides turns per second: context, tools, stalls, long sessions, memory, streams.

Each case returns the figures of one round by name. `turns` takes the median of the rounds.
"""

from asyncio.subprocess import Process
from statistics import median

from benchmarks.harness.measure import measure, measure_stall
from benchmarks.harness.memory import rss_bytes
from benchmarks.harness.systems import Mesh, Model, System
from benchmarks.harness.wire import WIRES
from benchmarks.harness.workload import Shape

TURN_BYTES = 700
"""New text per turn deep in a session, bytes: a short tool result, about 160 tokens."""
_TURN_TOKENS = 235  # including the reply
# Context in tokens, concurrent sessions, sessions, timed turns.
CONTEXTS = (
    (2_000, 1, 2, 16),
    (2_000, 16, 16, 10),
    (2_000, 64, 64, 6),
    (8_000, 1, 2, 16),
    (8_000, 16, 16, 10),
    (8_000, 64, 64, 4),
    (40_000, 1, 2, 12),
    (40_000, 16, 16, 6),
    (40_000, 64, 64, 2),
)
_CPU_SESSIONS = 16
_PROTOCOL_TOKENS, _PROTOCOL_TURNS = 8_000, 10
_HEAVY, _HEAVY_TOKENS = 8, 100_000
_LONG_SESSIONS, _LONG_TURNS = 3, 200
_LARGE = Shape(turns=4, first_bytes=48_000)
_SMALL = Shape(turns=24, first_bytes=40, turn_bytes=40)
_OPEN_SESSIONS = 64
_STREAMS, _STREAM_TURNS = 4, 6
_PAIRS = 8

Figures = dict[str, float]


async def contexts(name: str, system: System, model: Model, seed: int) -> Figures:
    """Returns turns per second and CPU time. The context is reached halfway through the turns."""
    figures: Figures = {}
    for context, concurrent, sessions, turns in CONTEXTS:
        first = int((context - _TURN_TOKENS * turns / 2) * model.bytes_per_token)
        shape = Shape(turns + 1, max(first, TURN_BYTES), TURN_BYTES, fill_turns=1)
        found = await measure(system, shape, sessions, concurrent, seed, close=concurrent == 1)
        label = f"{context // 1000}k"
        figures[f"{name}turns_per_second_{label}_{concurrent}"] = found.turns_per_second
        if concurrent == _CPU_SESSIONS:
            figures[f"{name}cpu_ms_per_turn_{label}"] = found.cpu_ms
            for process, spent in found.cpu_ms_per_turn.items():
                figures[f"{name}cpu_{label}_{process}"] = spent
        await system.close()
    return figures


async def traces(mesh: System, traced: System, seed: int) -> Figures:
    """Returns the CPU time and the rate of turns of a mesh that sends traces, over another's.

    They work by turns, a second or two each: the host's own load changes more slowly.
    """
    spent, seconds = [0.0, 0.0], [0.0, 0.0]
    for pair in range(_PAIRS):
        for one in (0, 1) if pair % 2 else (1, 0):
            texts = seed * _PAIRS + pair
            found = await measure((mesh, traced)[one], Shape(), 16, 16, texts)
            spent[one] += found.cpu_ms
            seconds[one] += 1 / found.turns_per_second
    return {
        "traces_cpu_ratio": spent[1] / spent[0],
        "traces_turns_ratio": seconds[0] / seconds[1],
    }


async def tools(name: str, system: System, model: Model, seed: int) -> Figures:
    """Returns the CPU time per turn with 17k tokens of tools, without the first turn."""
    shape = Shape(9, TURN_BYTES, TURN_BYTES, tools=model.tools_17k, fill_turns=1)
    found = await measure(system, shape, _CPU_SESSIONS, _CPU_SESSIONS, seed, close=False)
    await system.close()
    figures = {f"{name}tools_17k_cpu_ms": found.cpu_ms}
    for process, spent in found.cpu_ms_per_turn.items():
        figures[f"{name}cpu_tools_{process}"] = spent
    return figures


async def protocols(system: System, model: Model, seed: int) -> Figures:
    """Returns the CPU time per turn at 8k tokens in each protocol, one after the other."""
    figures: Figures = {}
    first = int((_PROTOCOL_TOKENS - _TURN_TOKENS * _PROTOCOL_TURNS / 2) * model.bytes_per_token)
    names = list(WIRES) if seed % 2 else list(reversed(WIRES))
    for name in names:
        shape = Shape(_PROTOCOL_TURNS + 1, first, TURN_BYTES, fill_turns=1, protocol=name)
        found = await measure(system, shape, _CPU_SESSIONS, _CPU_SESSIONS, seed, close=False)
        await system.close()
        figures[f"cpu_ms_per_turn_8k_{name}"] = found.cpu_ms
        figures[f"cpu_8k_{name}_sidecar"] = found.cpu_ms_per_turn["sidecar"]
        figures[f"cpu_8k_{name}_gateway"] = found.cpu_ms_per_turn["gateway"]
    for name in names:
        over = figures[f"cpu_ms_per_turn_8k_{name}"] / figures["cpu_ms_per_turn_8k_chat"]
        figures[f"{name}_over_chat_8k"] = over
    del figures["chat_over_chat_8k"]
    return figures


async def stall(name: str, system: System, model: Model, seed: int) -> Figures:
    """Returns how much first prompts of 100k tokens delay a trivial request."""
    shape = Shape(turns=1, first_bytes=int(_HEAVY_TOKENS * model.bytes_per_token))
    times = await measure_stall(system, shape, _HEAVY, seed)
    alone = median(times["alone_ms"])
    return {
        f"{name}trivial_alone_ms": alone,
        f"{name}stall_ms": median(times["beside_ms"]) - alone,
        f"{name}stall_worst_ms": max(times["beside_ms"]) - alone,
    }


async def long_session(name: str, system: System, _model: Model, seed: int) -> Figures:
    """Returns the latencies of turns near 2 and near 200 over several sessions, and their ratio."""
    shape = Shape(_LONG_TURNS, TURN_BYTES, TURN_BYTES)
    found = await measure(system, shape, _LONG_SESSIONS, 1, seed)
    early = median(ms for session in found.latencies_ms for ms in session[1:6])
    late = median(ms for session in found.latencies_ms for ms in session[-5:])
    return {
        f"{name}turn2_ms": early,
        f"{name}turn200_ms": late,
        f"{name}turn200_over_turn2": late / early,
    }


async def memory(mesh: Mesh, rounds: int) -> Figures:
    """Returns bytes per token and per node, from sessions with large and with small messages.

    The sessions stay open, because reused memory would hide the growth. For the same reason this
    case runs before all others, and its first round is discarded.
    """
    found = [await _growth(mesh, shape, rounds) for shape in (_LARGE, _SMALL)]
    (large, large_tokens, large_nodes), (small, small_tokens, small_nodes) = found
    # Two equations: tokens * bytes per token + nodes * bytes per node = growth.
    size = large_tokens * small_nodes - small_tokens * large_nodes
    per_token = (large * small_nodes - small * large_nodes) / size
    per_node = (small * large_tokens - large * small_tokens) / size
    return {
        "bytes_per_token": per_token,
        "bytes_per_node": per_node,
        "bytes_per_token_nodes_included": large / large_tokens,
    }


async def _growth(mesh: Mesh, shape: Shape, rounds: int) -> tuple[float, float, float]:
    """Returns the gateway's memory growth for sessions of a shape, and their tokens and nodes."""
    growth: list[float] = []
    tokens = 0
    for seed in range(rounds + 1):
        before = rss_bytes(mesh.pids["gateway"])
        found = await measure(mesh, shape, _OPEN_SESSIONS, 4, seed, close=False)
        mesh.sessions.clear()  # they stay open
        growth.append(rss_bytes(mesh.pids["gateway"]) - before)
        tokens = found.tokens
    return median(growth[1:]), tokens, _OPEN_SESSIONS * shape.turns * 2


async def first_bytes(mesh: Mesh, engine: Process, seed: int) -> Figures:
    """Returns the time from an answer's first token in the engine to the client."""
    shape = Shape(_STREAM_TURNS, TURN_BYTES, TURN_BYTES, stream=True)
    found = await measure(mesh, shape, _STREAMS, 1, seed)
    assert engine.stdout is not None
    lags: list[float] = []
    for received in (ns for session in found.first_bytes_ns for ns in session):
        word, sent = (await engine.stdout.readline()).split()
        assert word == b"FIRST"
        lags.append((received - int(sent)) / 1e6)
    return {"first_byte_after_first_token_ms": median(lags)}
