"""Prometheus metrics of a gateway, in addition to the metrics of its RPCs."""

import logging

import numpy as np
from prometheus_client import Counter, Gauge

from rollmesh.gateway.tree import Node
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import sampling_pb2, trajectory_pb2

_log = logging.getLogger(__name__)

TURNS = Counter(
    "rollmesh_gateway_turns_total",
    "Turns, by end: stop, length, or the reason of the error.",
    ["end"],
)
TOKENS = Counter(
    "rollmesh_gateway_tokens_total", "Tokens of committed turns: prompt, cached, sampled.", ["kind"]
)
_PROMPT, _CACHED, _SAMPLED = (TOKENS.labels(kind) for kind in ("prompt", "cached", "sampled"))
REASONS = Counter(
    "rollmesh_gateway_fidelity_reasons_total",
    "Committed turns whose tokens are not simply what the policy sampled, by reason.",
    ["reason"],
)
NOT_FINITE = Counter(
    "rollmesh_gateway_not_finite_logprobs_total",
    "Tokens that are not trained because the engine gave no finite log-probability, by engine.",
    ["engine"],
)
IGNORED_SAMPLING = Counter(
    "rollmesh_gateway_ignored_sampling_total",
    "Turns whose request has a sampling parameter that the session overrides, by parameter.",
    ["parameter"],
)
REPLAYED_ANSWERS = Counter(
    "rollmesh_gateway_replayed_answers_total", "Requests answered by a turn that was committed."
)
ENGINE_LOSSES = Counter(
    "rollmesh_gateway_engine_losses_total", "Generations cut because their engine went away."
)
POISON = Counter(
    "rollmesh_gateway_poison_requests_total",
    "Turns refused because several engines died or fell silent before their first token.",
)
MIGRATIONS = Counter(
    "rollmesh_gateway_migrations_total",
    "Generations continued from their sampled tokens after their engine was lost or interrupted.",
)
TRAJECTORIES = Counter(
    "rollmesh_gateway_trajectories_total", "Trajectories that the collector took.", ["lineage"]
)
PARSER_FAILURES = Counter(
    "rollmesh_gateway_vllm_parser_failures_total",
    "Answers that vLLM's tool parser did not read, which are text: busy, timeout, died, error.",
    ["reason"],
)
REGISTERED = Gauge("rollmesh_gateway_registered", "Whether the router knows the gateway now.")
OPEN_SESSIONS = Gauge("rollmesh_gateway_open_sessions", "Sessions that take turns.")
UNDELIVERED = Gauge(
    "rollmesh_gateway_undelivered_sessions", "Closed sessions that the collector has not taken."
)
RETRIED = Gauge(
    "rollmesh_gateway_retried_sessions",
    "Closed sessions that the collector did not take and that are sent again alone.",
)
JOURNALS = Gauge("rollmesh_gateway_journals", "Journals that the gateway serves.")
TAKEOVERS = Counter(
    "rollmesh_gateway_journal_takeovers_total",
    "Journals taken from a shared database after the start: left by others, or lost in a commit.",
)
DEAD_LETTERS = Gauge(
    "rollmesh_gateway_dead_letters",
    "Sessions set aside: refused or failed by the collector, without a record, or damaged.",
)


def committed(node: Node) -> None:
    """Counts a committed turn."""
    sample = node.sample
    assert sample is not None
    TURNS.labels(name_of(sampling_pb2.FinishReason.DESCRIPTOR, sample.finish).lower()).inc()
    _PROMPT.inc(sample.prompt_tokens)
    _CACHED.inc(sample.cached_tokens)
    _SAMPLED.inc(sample.completion_tokens)
    for span in sample.spans:
        infinite = np.count_nonzero(~np.isfinite(sample.logprobs[span.start : span.end]))
        if infinite:
            NOT_FINITE.labels(span.engine_id).inc(int(infinite))
            event = "log-probs not finite: the engine's arithmetic failed"
            _log.warning(event, extra=fields(engine=span.engine_id, tokens=int(infinite)))
    for reason in node.reasons:
        REASONS.labels(name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, reason).lower()).inc()
