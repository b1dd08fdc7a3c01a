"""Prometheus metrics of a gateway, in addition to those of its RPCs."""

from prometheus_client import Counter, Gauge

from rollmesh.gateway.conversation.nodes import Node
from rollmesh.runtime.codec.enums import name_of
from rollmesh.v1 import sampling_pb2, trajectory_pb2

TURNS = Counter(
    "rollmesh_gateway_turns_total",
    "Turns, by end: stop, length, or the reason of the error.",
    ["end"],
)
TOKENS = Counter(
    "rollmesh_gateway_tokens_total", "Tokens of committed turns: prompt, cached, sampled.", ["kind"]
)
REASONS = Counter(
    "rollmesh_gateway_fidelity_reasons_total",
    "Committed turns whose tokens are not simply what the policy sampled, by reason.",
    ["reason"],
)
REPLAYED_ANSWERS = Counter(
    "rollmesh_gateway_replayed_answers_total", "Requests answered by a turn that was committed."
)
ENGINE_LOSSES = Counter(
    "rollmesh_gateway_engine_losses_total", "Generations cut because their engine went away."
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
JOURNALS = Gauge("rollmesh_gateway_journals", "Journals that the gateway serves.")
TAKEOVERS = Counter(
    "rollmesh_gateway_journal_takeovers_total",
    "Journals taken from a shared database after the start: left by others, or lost in a commit.",
)
DEAD_LETTERS = Gauge(
    "rollmesh_gateway_dead_letters",
    "Sessions set aside: refused by the collector, without a record, or damaged in the journal.",
)


def committed(node: Node) -> None:
    """Counts a committed turn."""
    sample = node.sample
    assert sample is not None
    TURNS.labels(name_of(sampling_pb2.FinishReason.DESCRIPTOR, sample.finish).lower()).inc()
    TOKENS.labels("prompt").inc(sample.prompt_tokens)
    TOKENS.labels("cached").inc(sample.cached_tokens)
    TOKENS.labels("sampled").inc(len(sample.token_ids))
    for reason in node.reasons:
        REASONS.labels(name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, reason).lower()).inc()
