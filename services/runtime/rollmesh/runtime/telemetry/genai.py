"""The names and values of span attributes: OpenTelemetry's for GenAI, and `rollmesh.*`.

Live spans and those of stored sessions are made of the same functions, so that they agree.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.runs import run_of, version_of
from rollmesh.v1 import sampling_pb2, session_pb2, trajectory_pb2

CHAT, INVOKE_AGENT = "chat", "invoke_agent"
"""Operations, with which the names of their spans begin."""
OPERATION = "gen_ai.operation.name"
SESSION_ID = "gen_ai.conversation.id"
TIME_TO_FIRST = "gen_ai.response.time_to_first_chunk"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
TOOLS = "gen_ai.tool.definitions"
REQUEST_ID = "rollmesh.request.id"
MODEL_REQUEST_IDS = "rollmesh.model_request.ids"
NODE_ID = "rollmesh.node.id"
LINEAGE = "rollmesh.lineage"
REASONS = "rollmesh.fidelity.reasons"
ENGINE_ID, ENGINE_IDS = "rollmesh.engine.id", "rollmesh.engine.ids"
MIGRATIONS = "rollmesh.migrations"
PROMPT_TOKENS, SAMPLED_TOKENS = "rollmesh.prompt_tokens", "rollmesh.sampled_tokens"
CACHED_TOKENS, KEPT_TOKENS = "rollmesh.cached_tokens", "rollmesh.kept_tokens"
FINISH_REASON = "rollmesh.finish_reason"
DUPLICATE = "rollmesh.duplicate"
QUEUE_MS = "rollmesh.queue.wait_ms"
REWARD, OUTCOME, TURNS = "rollmesh.reward", "rollmesh.outcome", "rollmesh.turns"
LEFT_OUT = "rollmesh.content.left_out"
TIME_ESTIMATED = "rollmesh.time.estimated"
FIRST_TOKENS = "rollmesh.first_tokens"
ENGINE_LOST, MIGRATION = "rollmesh.engine_lost", "rollmesh.migration"
"""Events."""
_PROVIDER = "rollmesh"
_Parameter: TypeAlias = Literal[
    "temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty"
]
_PARAMETERS: tuple[_Parameter, ...] = get_args(_Parameter)


def operation(name: str, session_id: str, model: str) -> dict[str, Any]:
    """Returns the common attributes of the spans of GenAI."""
    return {
        OPERATION: name,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
        SESSION_ID: session_id,
    }


def session(run_id: str, group_id: str, sample_index: int, purpose: int) -> dict[str, Any]:
    """Returns where a session belongs. It is on each of its spans, to select by."""
    return {
        "rollmesh.run.id": run_id or None,
        "rollmesh.group.id": group_id or None,
        "rollmesh.sample.index": sample_index if group_id else None,
        "rollmesh.purpose": _word(session_pb2.SessionPurpose.DESCRIPTOR, purpose),
    }


def ended(outcome: int, reward: float | None, turns: int) -> dict[str, Any]:
    """Returns how a session ended."""
    word = _word(session_pb2.SessionOutcome.DESCRIPTOR, outcome)
    return {OUTCOME: word, REWARD: reward, TURNS: turns}


def request(
    sampling: sampling_pb2.SamplingParams,
    *,
    stops: Sequence[str] = (),
    stream: bool | None = None,
    choice: int = 0,
) -> dict[str, Any]:
    """Returns the parameters of a request, those that are set."""
    found: dict[str, Any] = {
        f"gen_ai.request.{name}": getattr(sampling, name)
        for name in _PARAMETERS
        if sampling.HasField(name)
    }
    return found | {
        "gen_ai.request.stop_sequences": list(stops) or None,
        "gen_ai.request.stream": stream,
        "rollmesh.choice.index": choice or None,
    }


def response(
    session_id: str,
    node_id: int,
    model: str,
    finish: str,
    *,
    prompt_tokens: int | None,
    sampled_tokens: int | None,
    cached_tokens: int | None = None,
) -> dict[str, Any]:
    """Returns the facts of an answer. `finish` is from `finish_reason`."""
    return {
        "gen_ai.response.id": f"chatcmpl-{session_id}-{node_id}",
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [finish],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": sampled_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        NODE_ID: node_id,
    }


def policy(spans: Sequence[sampling_pb2.VersionSpan]) -> dict[str, Any]:
    """Returns the policy that sampled tokens, given their spans: the last version, and all."""
    if not spans:
        return {}
    versions = list(dict.fromkeys(one.policy_version for one in spans))
    engines = list(dict.fromkeys(one.engine_id for one in spans if one.engine_id))
    return {
        "rollmesh.policy.version": version_of(versions[-1]),
        "rollmesh.policy.run": run_of(versions[-1]),
        "rollmesh.policy.versions": [version_of(one) for one in versions],
        "rollmesh.policy.adapter": spans[-1].adapter or None,
        ENGINE_IDS: engines or None,
    }


def moved(engine_id: str, kept_tokens: int) -> dict[str, Any]:
    """Returns where a generation goes on, and with how many tokens."""
    return {ENGINE_ID: engine_id, KEPT_TOKENS: kept_tokens}


def training(
    reasons: Iterable[int], lineage: int | None, request_ids: Sequence[str]
) -> dict[str, Any]:
    """Returns the facts of a turn for a trainer."""
    enum, of_lineage = trajectory_pb2.FidelityReason.DESCRIPTOR, trajectory_pb2.Lineage.DESCRIPTOR
    return {
        REASONS: sorted(_word(enum, one) for one in reasons) or ["exact"],
        LINEAGE: _word(of_lineage, lineage) if lineage else None,
        MODEL_REQUEST_IDS: list(request_ids) or None,
    }


def finish_reason(reason: int, *, calls: bool = False) -> str:
    """Returns why an answer ended, in OpenAI's words."""
    word = _word(sampling_pb2.FinishReason.DESCRIPTOR, reason)
    return "tool_calls" if calls and word == "stop" else word


def _word(enum: Any, number: int) -> str:
    return name_of(enum, number).lower()
