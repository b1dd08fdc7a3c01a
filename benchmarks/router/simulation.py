"""A week of agent sessions on simulated engines, leased by the router's own lease table.

Time is simulated. The decisions are those of `LeaseTable`. An engine shares its speed among its
running generations and keeps the KV cache of the contexts it used last.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.harness.measure import percentile
from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable

_ENGINES, _SLOTS = 4, 8
_GROUPS, _GROUP = 18, 8
"""Groups in flight, and sessions in each: the trainer starts a group when one ends."""
_KV_TOKENS = 400_000
_TASKS, _KINDS, _SHARED_TOKENS = 300, 5, 3_000
"""Prompts that groups draw from, and kinds of agents, whose prompts begin with the same tokens."""
_STEP_S, _STEP_PER_RUNNING_S = 0.010, 0.0004
"""Time of a token with nobody else, and what each running generation adds."""
_PREFILL_PER_S = 15_000
_PROMPT, _ANSWER, _TOOL = (5_000, 0.6), (800, 0.9), (400, 1.0)
"""Tokens of a task, an answer and a tool's result: median and sigma of a log-normal."""
_TOOL_S, _LONG_TOOL_S = (4.0, 1.5), 120.0
_LONG_TOOLS = 0.02
"""Share of tool calls, such as builds, that take at least `_LONG_TOOL_S` (Pareto, 1.5)."""
_LAST_TURN, _MOST_TURNS = 1 / 12, 60
_MOST_TOKENS = 100_000
_WAIT_MS = 86_400_000


@dataclass(slots=True)
class Agent:
    """One session."""

    name: str
    group: "Group"
    chance: random.Random
    tokens: int
    """Tokens of its context."""
    turns: int = 0


@dataclass(slots=True)
class Group:
    """The sessions of one prompt."""

    name: str
    task: str
    kind: str
    prompt_tokens: int
    started_s: float
    left: int = _GROUP


@dataclass(slots=True)
class SimulatedEngine:
    """Shares its speed among the running generations, and caches contexts by last use."""

    work: float = 0.0
    """Tokens that each generation got since the start."""
    at_s: float = 0.0
    epoch: int = 0
    running: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict)
    held: int = 0

    def advance(self, now_s: float) -> None:
        """Gives the running generations the tokens of the time that has passed."""
        if self.running:
            self.work += (now_s - self.at_s) / self.step_s
        self.at_s = now_s

    @property
    def step_s(self) -> float:
        """Time of a token now."""
        return _STEP_S + _STEP_PER_RUNNING_S * len(self.running)

    def hit(self, agent: Agent) -> int:
        """Returns how many tokens of an agent's context are cached."""
        names = agent.name, agent.group.task, agent.group.kind
        return min(max(self.cached.get(name, 0) for name in names), agent.tokens)

    def keep(self, name: str, tokens: int) -> None:
        """Caches a context and evicts those that were not used for longest."""
        self.held += tokens - self.cached.pop(name, 0)
        self.cached[name] = tokens
        while self.held > _KV_TOKENS and len(self.cached) > 1:
            self.held -= self.cached.popitem(last=False)[1]


class Week:
    """Runs groups of sessions for a time."""

    def __init__(self, imbalance_margin: float, days: float) -> None:
        """Builds the fleet. The same seed gives every margin the same sessions."""
        self.turns = 0
        self.waits_s: list[float] = []
        self._end_s = days * 86_400
        self._table = LeaseTable(imbalance_margin=imbalance_margin)
        self._table.open_stream("g", leases_pb2.DispatchHello(model="policy"))
        self._engines = {f"engine-{at}": SimulatedEngine() for at in range(_ENGINES)}
        for name in self._engines:
            self._table.add_engine(Engine(name, f"{name}:1", "policy", _SLOTS))
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s = 0.0
        self._groups_started = 0
        self._asked: dict[str, tuple[Agent, float]] = {}
        self._groups_s: list[float] = []
        self._prompt_tokens = self._hit_tokens = 0

    def run(self) -> dict[str, float]:
        """Returns the time of groups, seconds, and the share of prompt tokens that were cached."""
        for _ in range(_GROUPS):
            self._start_group()
        while self._events and self._events[0][0] < self._end_s:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        return {
            "group_p90_s": round(percentile(sorted(self._groups_s), 0.9), 1),
            "group_max_s": round(max(self._groups_s), 1),
            "prefix_hit": round(self._hit_tokens / self._prompt_tokens, 4),
        }

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._numbers), event))

    def _start_group(self) -> None:
        self._groups_started += 1
        number = self._groups_started
        chance = random.Random(number)
        task = chance.randrange(_TASKS)
        group = Group(
            f"group-{number}",
            f"task-{task}",
            f"kind-{task % _KINDS}",
            _SHARED_TOKENS + _tokens(random.Random(task), _PROMPT),
            self._now_s,
        )
        for at in range(_GROUP):
            own = random.Random(number * 1000 + at)
            self._ask(Agent(f"session-{number}-{at}", group, own, group.prompt_tokens))

    def _ask(self, agent: Agent) -> None:
        self.turns += 1
        lease_id = str(next(self._numbers))
        self._asked[lease_id] = agent, self._now_s
        grant = self._table.acquire(
            "g",
            leases_pb2.AcquireLease(
                lease_id=lease_id,
                session_id=agent.name,
                group_id=agent.group.name,
                wait_ms=_WAIT_MS,
            ),
            now_ms=self._now_ms,
        )
        if grant is not None:
            self._generate(lease_id, grant.engine_id)

    def _generate(self, lease_id: str, engine_id: str) -> None:
        agent, asked_s = self._asked.pop(lease_id)
        self.waits_s.append(self._now_s - asked_s)
        engine = self._engines[engine_id]
        hit = engine.hit(agent)
        self._prompt_tokens += agent.tokens
        self._hit_tokens += hit
        answer = _tokens(agent.chance, _ANSWER)
        prefill = (agent.tokens - hit) / _PREFILL_PER_S / _STEP_S
        engine.advance(self._now_s)
        engine.keep(agent.group.kind, _SHARED_TOKENS)
        engine.keep(agent.group.task, agent.group.prompt_tokens)
        agent.tokens += answer
        engine.keep(agent.name, agent.tokens)

        def ended() -> None:
            self._end_turn(agent, lease_id)

        due = engine.work + prefill + answer
        heapq.heappush(engine.running, (due, next(self._numbers), ended))
        self._expect(engine)

    def _expect(self, engine: SimulatedEngine) -> None:
        """Has the first generation of an engine end when its work is done."""
        engine.epoch += 1
        epoch = engine.epoch

        def look() -> None:
            if engine.epoch != epoch:
                return
            engine.advance(self._now_s)
            _, _, ended = heapq.heappop(engine.running)
            self._expect(engine)
            ended()

        if engine.running:
            left = max(engine.running[0][0] - engine.work, 0.0)
            self._after(left * engine.step_s, look)

    def _end_turn(self, agent: Agent, lease_id: str) -> None:
        self._table.release("g", lease_id, leases_pb2.LEASE_OUTCOME_ANSWERED, now_ms=self._now_ms)
        for ended in self._table.end_waits(self._now_ms):
            assert isinstance(ended.result, leases_pb2.LeaseGrant)
            self._generate(ended.lease_id, ended.result.engine_id)
        agent.turns += 1
        agent.tokens += _tokens(agent.chance, _TOOL)
        is_last = agent.chance.random() < _LAST_TURN or agent.turns == _MOST_TURNS
        if is_last or agent.tokens > _MOST_TOKENS:
            self._end_session(agent)
        else:
            self._after(_tool_s(agent.chance), lambda: self._ask(agent))

    def _end_session(self, agent: Agent) -> None:
        self._table.forget(agent.name)
        agent.group.left -= 1
        if not agent.group.left:
            self._groups_s.append(self._now_s - agent.group.started_s)
            self._start_group()

    @property
    def _now_ms(self) -> int:
        return round(self._now_s * 1000)


def _tokens(chance: random.Random, size: tuple[float, float]) -> int:
    median, sigma = size
    return max(1, min(round(median * chance.lognormvariate(0, sigma)), _MOST_TOKENS // 4))


def _tool_s(chance: random.Random) -> float:
    if chance.random() < _LONG_TOOLS:
        return min(_LONG_TOOL_S * chance.paretovariate(1.5), 3_600.0)
    median, sigma = _TOOL_S
    return median * chance.lognormvariate(0, sigma)
