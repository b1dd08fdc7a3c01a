"""Alarms of a mesh, and the one table of alarms: signs of trouble without an error. Pure decisions.

A rule looks at the last observations of a mesh. Data that is missing raises nothing. `rollmesh
doctor`, `rollmesh top` and the viewer apply the rules. docs/alarms.md, Prometheus' rules and
Grafana's board of alarms are made from the table (`make docs-generate`).
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rollmesh.runtime.alarms import STEP_RULES, Rule, rule
from rollmesh.runtime.words import REASONS
from rollmesh.v1 import collector_pb2 as pb, gateway_pb2, router_pb2

# Observations.

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a mesh, as it answered at one time."""

    kind: str
    """router, engine, gateway or collector."""
    name: str
    """Its id in the mesh, or its address."""
    silent: str = ""
    """Why it gave no answer. Empty if it did."""
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    """Its metrics by name and sorted labels. Empty if they are not known."""
    ahead_ms: float = 0.0
    """Time by which its clock is ahead of the observer's."""
    doubt_ms: float = math.inf
    """Most that `ahead_ms` may be wrong. Infinite if its clock is not known."""

    def total(self, name: str, **labels: str) -> float | None:
        """Returns the sum of a metric's samples that have these labels. None if it has none."""
        found = [
            value
            for have, value in self.samples.get(name, {}).items()
            if labels.items() <= dict(have).items() and math.isfinite(value)
        ]
        return sum(found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A mesh at one time. What could not be read is None or missing."""

    at_ms: int
    """On the observer's monotonic clock."""
    servers: Sequence[Server] = ()
    """The servers that were asked."""
    members: router_pb2.ListReplicasResponse | None = None
    """The members of the mesh and the weights of its models."""
    stores: Sequence[pb.GetStatsResponse] = ()
    """The counts of each collector. All have one store."""
    sessions: Sequence[gateway_pb2.OpenSession] | None = None
    """Open sessions. None if the observer may not list them."""

    def of(self, kind: str) -> list[Server]:
        """Returns the servers of a kind that answered."""
        return [one for one in self.servers if one.kind == kind and not one.silent]

    def engines(self) -> list[router_pb2.Replica]:
        """Returns the registered engines."""
        listed = self.members.replicas if self.members else ()
        return [one for one in listed if one.hello.kind == router_pb2.REPLICA_KIND_ENGINE]


History = Sequence[Observation]
"""Observations of one mesh, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLimits:
    """When a state that should pass has lasted for too long, seconds."""

    patience_s: float = 30.0
    """For a queue that grows, a consumer without a stream, and an engine without the weights."""
    session_s: float = 1800.0
    """For an open session without a request."""


class Alarm(NamedTuple):
    """An alarm that is raised."""

    name: str
    where: str
    """The server, consumer or session that it is about."""
    message: str
    """The observation, and the remedy."""


_LOOKS = 4
_LEAST_VALUES = 6
_LEAST_TURNS = 20
_LEAST_GENERATIONS = 10
_LEAST_PROMPT_TOKENS = 5_000
_APART_MS = 2_000
_FREE_SHARE, _FREE_BYTES = 0.05, 10 * 1024**3
_MOST_NAMED = 3


MESH_RULES: list[Rule] = []
"""The alarms of the mesh. Each yields whom it is about, and the observation. A name stays, because
boards and rules of others have it."""
_INCREASE = "sum by (instance) (increase({}[10m]))"
_TURNS_OF = _INCREASE.format('rollmesh_gateway_turns_total{end=~"stop|length"}')


# Rules of the mesh: its servers and their weights.


@rule(
    MESH_RULES,
    when="a server does not answer two times in a row",
    remedy="See its log, and restart it. If this machine cannot reach it, run the command "
    "where the mesh is",
    prometheus='up{job=~"rollmesh.*"} == 0',
)
def _server_silent(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    before = {one.name for one in history[-2].servers if one.silent} if history[1:] else set()
    for one in history[-1].servers:
        if one.silent and one.name in before:
            yield one.name, f"the {one.kind} does not answer: {one.silent}"


@rule(
    MESH_RULES,
    when="an engine gave impossible answers, does not fit its gateways, or loses turns",
    remedy="Restart it, and give it the model and the tokenizer of its gateways",
    prometheus="rollmesh_router_open_circuits > 0 or "
    "increase(rollmesh_router_engine_faults_total[10m]) > 0",
)
def _engine_left_out(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    wrong = (
        router_pb2.EXCLUSION_REASON_FAULT,
        router_pb2.EXCLUSION_REASON_MISFIT,
        router_pb2.EXCLUSION_REASON_CIRCUIT_OPEN,
    )
    for one in history[-1].engines():
        if one.exclusion.reason in wrong:
            why = one.exclusion.explanation or "its turns are lost"
            yield one.hello.replica_id, f"the engine gets no leases: {why}"


@rule(
    MESH_RULES,
    when="an engine does not take the weights of the last push for longer than `--patience`",
    remedy="See the log of the engine: it may lack memory or disk for them. Weights that came "
    "over a transfer backend need another push",
    prometheus="min(rollmesh_engine_policy_version) < "
    "max(rollmesh_router_target_policy_version) and "
    "count(count by (model) (rollmesh_router_target_policy_version)) == 1",
)
def _engine_behind(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    targets = [
        {one.model: one.target_policy_version for one in look.members.models}
        for look in history
        if look.members
    ]
    for one in history[-1].engines():
        name, model = one.hello.replica_id, one.hello.model
        is_same = len({target.get(model) for target in targets}) == 1
        if is_same and _lasts(history, limits, name, _fenced):
            yield name, "the engine does not hold the weights of the last push"


def _fenced(look: Observation) -> set[str]:
    return {one.hello.replica_id for one in look.engines() if one.fenced}


@rule(
    MESH_RULES,
    when="a generation gets less than half the tokens per second of those at other engines",
    remedy="See whether another process uses its accelerator, its clocks and its settings",
    prometheus='rate(rollmesh_engine_tokens_total{kind="sampled"}[10m]) / ignoring (kind) '
    "rate(rollmesh_engine_generating_seconds_total[10m]) < on () group_left () quantile(0.5, "
    'rate(rollmesh_engine_tokens_total{kind="sampled"}[10m]) / ignoring (kind) '
    "rate(rollmesh_engine_generating_seconds_total[10m])) / 2",
)
def _engine_slow(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    tempos: dict[str, dict[str, float]] = {}
    models = {one.hello.replica_id: one.hello.model for one in history[-1].engines()}
    for name, (ended, seconds, tokens) in _gains(
        history, "engine", _GENERATIONS, _GENERATING, _ENGINE_TOKENS
    ):
        if ended >= _LEAST_GENERATIONS and tokens > 0 and seconds > 0 and name in models:
            tempos.setdefault(models[name], {})[name] = tokens / seconds
    for peers in tempos.values():
        for name, tempo in peers.items():
            others = [one for other, one in peers.items() if other != name]
            if others and tempo < median(others) / 2:
                yield (
                    name,
                    f"a generation gets {tempo:.1f} tokens per second, and "
                    f"{median(others):.1f} at its peers",
                )


@rule(
    MESH_RULES,
    when="a quarter of the share of prompt tokens is cached that was before, without a push",
    remedy="See whether agents change the beginning of their prompts, and whether the engines "
    "have room for the sessions that are open",
    prometheus=_INCREASE.format('rollmesh_gateway_tokens_total{kind="cached"}')
    + " / "
    + _INCREASE.format('rollmesh_gateway_tokens_total{kind="prompt"}')
    + " < 0.25 * sum by (instance) (increase(rollmesh_gateway_tokens_total"
    '{kind="cached"}[10m] offset 30m)) / sum by (instance) '
    '(increase(rollmesh_gateway_tokens_total{kind="prompt"}[10m] offset 30m))',
)
def _cache_collapses(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    if len({_weights(look) for look in history}) > 1:  # a push empties the caches
        return
    for one in history[-1].of("gateway"):
        first = _first(history, one) or one
        prompt, cached = (_gain(_total(first, of), _total(one, of)) for of in (_PROMPT, _CACHED))
        was_prompt, was_cached = _total(first, _PROMPT), _total(first, _CACHED)
        if min(was_prompt, prompt) < _LEAST_PROMPT_TOKENS:
            continue
        before, now = was_cached / was_prompt, cached / prompt
        if before >= 0.2 and now < before / 4:
            yield one.name, f"{now:.0%} of prompt tokens are cached, and {before:.0%} were before"


def _weights(look: Observation) -> frozenset[tuple[str, int]]:
    engines = {(one.hello.replica_id, one.hello.load.policy_version) for one in look.engines()}
    return frozenset(engines)


@rule(
    MESH_RULES,
    when="the requests that wait for an engine only become more for longer than `--patience`",
    remedy="Add engines, or open fewer sessions at once. See whether engines are paused",
    prometheus="resets(rollmesh_router_queue_length[5m]) == 0 and "
    "rollmesh_router_queue_length > rollmesh_router_queue_length offset 5m",
)
def _queue_grows(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for name, before, now in _grows(history, limits, "router", _QUEUE):
        yield name, f"{now:.0f} requests wait for an engine, and {before:.0f} did before"


@rule(
    MESH_RULES,
    when="the closed sessions of a gateway that wait for the collector only become more",
    remedy="See whether the collector answers, and whether its store is full",
    prometheus="resets(rollmesh_gateway_undelivered_sessions[5m]) == 0 and "
    "rollmesh_gateway_undelivered_sessions > rollmesh_gateway_undelivered_sessions offset 5m",
)
def _outbox_grows(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for name, before, now in _grows(history, limits, "gateway", _OUTBOX):
        yield name, f"{now:.0f} closed sessions wait for the collector, and {before:.0f} did before"


@rule(
    MESH_RULES,
    when="a gateway has sessions that were set aside",
    remedy="`rollmesh gateway dead-letters list` says why. Then retry or drop them",
    prometheus="rollmesh_gateway_dead_letters > 0",
)
def _dead_letters(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for one in history[-1].of("gateway"):
        if count := one.total(_DEAD_LETTERS):
            yield one.name, f"{count:.0f} sessions are set aside and reach no trainer"


@rule(
    MESH_RULES,
    when="less than 5 % and less than 10 GiB of a service's disk are free",
    remedy="Free some, or let the collector retain less",
    prometheus=f"rollmesh_disk_free_bytes < {_FREE_BYTES} and rollmesh_disk_free_bytes < "
    f"{_FREE_SHARE} * rollmesh_disk_total_bytes and rollmesh_disk_total_bytes > 0",
)
def _disk_low(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for one in history[-1].servers:
        total, free = one.total(_DISK_TOTAL), one.total(_DISK_FREE)
        if total and free is not None and free < min(_FREE_SHARE * total, _FREE_BYTES):
            yield one.name, f"the disk of the {one.kind} has {free / 1024**2:,.0f} MiB free"


@rule(
    MESH_RULES,
    when="a server's clock differs from the others' by more than 2 s",
    remedy="Synchronise the clocks of the hosts by NTP: deadlines and times of sessions "
    "depend on them",
)
def _clocks_apart(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    known = [one for one in history[-1].servers if not one.silent and math.isfinite(one.doubt_ms)]
    middle = median([0.0, *(one.ahead_ms for one in known)])
    for one in known:
        apart = one.ahead_ms - middle
        if abs(apart) - one.doubt_ms > _APART_MS:
            side = "ahead of" if apart > 0 else "behind"
            yield one.name, f"its clock is {abs(apart) / 1000:.1f} s {side} the others"


# Rules of the mesh: its agents and trainers.


@rule(
    MESH_RULES,
    when="the agent of an open session asks for nothing for longer than `--session-idle`",
    remedy="See whether its agent still runs. `rollmesh gateway sessions end` ends it",
)
def _session_stalls(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    idle = [
        one
        for one in history[-1].sessions or ()
        if not one.in_flight and one.idle_ms >= limits.session_s * 1000
    ]
    idle.sort(key=lambda one: -one.idle_ms)
    for one in idle[:_MOST_NAMED]:
        more = len(idle) - _MOST_NAMED
        others = f", as do {more} others" if more > 0 and one is idle[0] else ""
        yield (
            one.session_id,
            f"its agent has asked for nothing for {one.idle_ms / 1000:.0f} s{others}",
        )


@rule(
    MESH_RULES,
    when="units wait for a consumer that has no stream for longer than `--patience`",
    remedy="Start its trainer, or delete the consumer: it keeps its sessions on the disk",
    prometheus="rollmesh_collector_ready > 0 and on (instance, consumer) "
    "increase(rollmesh_collector_acknowledged_total[30m]) == 0",
)
def _consumer_unread(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    acknowledged: dict[str, set[int]] = {}
    for look in history:
        for store in look.stores[:1]:
            for one in store.consumers:
                acknowledged.setdefault(one.name, set()).add(one.acknowledged)
    for name, ready in _unread(history[-1]).items():
        if len(acknowledged[name]) == 1 and _lasts(history, limits, name, _unread):
            yield name, f"{ready} units wait for the consumer, and nobody reads them"


def _unread(look: Observation) -> dict[str, int]:
    """Returns the consumers with units and without a stream, each with the number of its units."""
    streams: dict[str, int] = {}
    for store in look.stores:
        for one in store.consumers:
            streams[one.name] = streams.get(one.name, 0) + one.streams
    found = look.stores[0].consumers if look.stores else ()
    asked = {one.name for one in look.servers if one.kind == "collector" and one.silent}
    return {
        one.name: one.ready for one in found if one.ready and not streams[one.name] and not asked
    }


@rule(
    MESH_RULES,
    when="nine of ten answers end by their length",
    remedy="Raise max_tokens or the context, and see whether the model ends its turns with "
    "the token that the template has",
    prometheus=_INCREASE.format('rollmesh_gateway_turns_total{end="length"}')
    + f" >= 0.9 * {_TURNS_OF} and {_TURNS_OF} >= {_LEAST_TURNS}",
)
def _always_by_length(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for name, length, turns in _recent(history, _BY_LENGTH):
        if length >= 0.9 * turns:
            yield name, f"{length:.0f} of {turns:.0f} answers end by their length"


@rule(
    MESH_RULES,
    when="a fifth of the turns have `TEMPLATE_REWRITE`",
    remedy="The chat template prints earlier messages differently later: use one that keeps "
    "earlier messages, or the gateway's setting history=rewrite",
    prometheus=_INCREASE.format(
        'rollmesh_gateway_fidelity_reasons_total{reason="template_rewrite"}'
    )
    + f" >= 0.2 * {_TURNS_OF} and {_TURNS_OF} >= {_LEAST_TURNS}",
)
def _history_rewritten(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for name, rewritten, turns in _recent(history, _REWRITTEN):
        if rewritten >= 0.2 * turns:
            yield name, f"{rewritten:.0f} of {turns:.0f} turns have {_told('TEMPLATE_REWRITE')}"


@rule(
    MESH_RULES,
    when="a fifth of the turns have `LENIENT_ECHO`",
    remedy="Let the agent send back messages as they came: it does not see the text that is "
    "trained",
    prometheus=_INCREASE.format('rollmesh_gateway_fidelity_reasons_total{reason="lenient_echo"}')
    + f" >= 0.2 * {_TURNS_OF} and {_TURNS_OF} >= {_LEAST_TURNS}",
)
def _echo_drifts(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    for name, lenient, turns in _recent(history, _LENIENT):
        if lenient >= 0.2 * turns:
            yield name, f"{lenient:.0f} of {turns:.0f} turns have {_told('LENIENT_ECHO')}"


def _told(reason: str) -> str:
    return f"{reason}: {REASONS[reason].removesuffix('.')}"


@rule(
    MESH_RULES,
    when="an engine samples tokens whose log-probability is no number",
    remedy="Its arithmetic fails. Push the weights again or restart the engine, and see "
    "whether the weights are finite",
    prometheus="sum by (engine) (increase(rollmesh_gateway_not_finite_logprobs_total[10m])) > 0",
)
def _logprobs_not_finite(history: History, limits: AlarmLimits) -> Iterator[tuple[str, str]]:
    is_watched = _tail(history, limits) is not None
    for one in history[-1].of("gateway"):
        first = _first(history, one)
        for labels, value in one.samples.get(_NOT_FINITE, {}).items():
            known = first.samples.get(_NOT_FINITE, {}).get(labels, 0.0) if first else 0.0
            count = _gain(known, value) if is_watched else value
            if count > 0:
                engine = dict(labels).get("engine", one.name)
                yield engine, f"{count:.0f} sampled tokens have a log-probability that is no number"


# How rules look at counters and at several observations.


_Counter = tuple[str, dict[str, str]]
_GENERATIONS: _Counter = ("rollmesh_engine_generations_total", {})
_GENERATING: _Counter = ("rollmesh_engine_generating_seconds_total", {})
_ENGINE_TOKENS: _Counter = ("rollmesh_engine_tokens_total", {"kind": "sampled"})
_PROMPT: _Counter = ("rollmesh_gateway_tokens_total", {"kind": "prompt"})
_CACHED: _Counter = ("rollmesh_gateway_tokens_total", {"kind": "cached"})
_BY_LENGTH: _Counter = ("rollmesh_gateway_turns_total", {"end": "length"})
_BY_STOP: _Counter = ("rollmesh_gateway_turns_total", {"end": "stop"})
_TURNS = (_BY_LENGTH, _BY_STOP)
_REWRITTEN: _Counter = (
    "rollmesh_gateway_fidelity_reasons_total",
    {"reason": "template_rewrite"},
)
_LENIENT: _Counter = ("rollmesh_gateway_fidelity_reasons_total", {"reason": "lenient_echo"})
_NOT_FINITE = "rollmesh_gateway_not_finite_logprobs_total"
_QUEUE, _OUTBOX = "rollmesh_router_queue_length", "rollmesh_gateway_undelivered_sessions"
_DEAD_LETTERS = "rollmesh_gateway_dead_letters"
_DISK_TOTAL, _DISK_FREE = "rollmesh_disk_total_bytes", "rollmesh_disk_free_bytes"
METRICS = (
    *{one[0] for one in (_GENERATIONS, _GENERATING, _ENGINE_TOKENS, _PROMPT, _BY_STOP, _LENIENT)},
    *(_NOT_FINITE, _QUEUE, _OUTBOX, _DEAD_LETTERS, _DISK_TOTAL, _DISK_FREE),
)
"""Names of the metrics that the rules read."""


def _total(server: Server, counter: _Counter) -> float:
    return server.total(counter[0], **counter[1]) or 0.0


def _gain(before: float, now: float) -> float:
    """Returns the gain of a counter. If it went back, its process began anew."""
    return now - before if now >= before else now


def _first(history: History, server: Server) -> Server | None:
    """Returns a server as it answered first."""
    found = (one for look in history for one in look.of(server.kind) if one.name == server.name)
    return next(found, None)


def _gains(
    history: History, kind: str, *counters: _Counter
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yields the gains of counters of each server of a kind since its first observation."""
    for one in history[-1].of(kind):
        if one.samples and (first := _first(history, one)) is not None:
            pairs = ((_total(first, counter), _total(one, counter)) for counter in counters)
            yield one.name, tuple(_gain(*pair) for pair in pairs)


def _recent(history: History, counter: _Counter) -> Iterator[tuple[str, float, float]]:
    """Yields a counter of each gateway, and its turns: of the watched time, or of all time.

    Gateways with few turns are left out.
    """
    gains = dict(_gains(history, "gateway", counter, *_TURNS))
    for one in history[-1].of("gateway"):
        ever = [_total(one, each) for each in (counter, *_TURNS)]
        for count, *turns in (gains.get(one.name, ever), ever):
            if sum(turns) >= _LEAST_TURNS:
                yield one.name, count, sum(turns)
                break


def _tail(history: History, limits: AlarmLimits, least: int = _LOOKS) -> History | None:
    """Returns the last observations, over `patience_s`. None if they are too few or too short."""
    newest_ms = history[-1].at_ms
    for start in range(len(history) - least, -1, -1):
        if newest_ms - history[start].at_ms >= limits.patience_s * 1000:
            return history[start:]
    return None


def _lasts(
    history: History, limits: AlarmLimits, name: str, of: Callable[[Observation], Container[str]]
) -> bool:
    """Returns whether a name is found in each of the last observations."""
    tail = _tail(history, limits)
    return tail is not None and all(name in of(look) for look in tail)


def _grows(
    history: History, limits: AlarmLimits, kind: str, metric: str
) -> Iterator[tuple[str, float, float]]:
    """Yields the servers of a kind whose gauge only grew, with its first and its last value."""
    tail = _tail(history, limits, _LEAST_VALUES) or ()
    for one in history[-1].of(kind):
        values = [
            value
            for look in tail
            for other in look.of(kind)
            if other.name == one.name and (value := other.total(metric)) is not None
        ]
        middle = len(values) // 2
        if (
            len(values) >= _LEAST_VALUES
            and values == sorted(values)
            and values[0] < values[middle] < values[-1]
        ):
            yield one.name, values[0], values[-1]


ALARM_RULES: tuple[Rule, ...] = (*STEP_RULES, *MESH_RULES)
"""All alarms."""


def raised(history: History, limits: AlarmLimits | None = None) -> list[Alarm]:
    """Returns the alarms that observations of a mesh raise, also of its trainers' steps."""
    if not history:
        return []
    limits = limits or AlarmLimits()
    found = [
        Alarm(one.name, where, f"{seen}. {one.remedy}")
        for one in MESH_RULES
        for where, seen in one.look(history, limits)
    ]
    for store in history[-1].stores[:1]:
        for consumer in store.consumers:
            found += [Alarm(one.name, consumer.name, one.message) for one in consumer.alarms]
    return found
