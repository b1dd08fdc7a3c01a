"""The attributes of the spans of turns and sessions, with the names of `telemetry.genai`."""

import json
from typing import Any

from rollmesh.chat import write_message
from rollmesh.gateway.session import Session, Turn, TurnRequest
from rollmesh.gateway.tree import Node
from rollmesh.runtime.telemetry import content_of, current_request, genai, tracing
from rollmesh.v1 import gateway_pb2


def asked(span: tracing.Span, session: Session, turn: Turn, request: TurnRequest) -> dict[str, Any]:
    """Links the span of a turn to its session's, and returns its attributes at its beginning."""
    spec, settings = session.spec, request.settings
    root = tracing.place_of_session(spec.session_id)
    span.links = (root,) if root.sampled else ()
    return {
        **genai.operation(genai.CHAT, spec.session_id, spec.model),
        **genai.session(spec.run_id, spec.group_id, spec.sample_index, spec.purpose),
        **genai.request(
            request.sampling, stops=settings.stops, stream=request.stream, choice=request.choice
        ),
        genai.REQUEST_ID: current_request.get(),
        genai.NODE_ID: turn.node_id,
    }


def answered(span: tracing.Span, session: Session, turn: Turn, node: Node) -> dict[str, Any]:
    """Returns the attributes of a turn that was committed."""
    spec, sample = session.spec, node.sample
    assert sample is not None
    message = node.messages[0]
    finish = genai.finish_reason(sample.finish, calls=bool(message.tool_calls))
    events = [name for name, _, _ in span.events]
    first_ns = next((at for name, at, _ in span.events if name == genai.FIRST_TOKENS), None)
    found = {
        **genai.response(
            spec.session_id,
            node.node_id,
            spec.model,
            finish,
            prompt_tokens=sample.prompt_tokens,
            sampled_tokens=sample.completion_tokens,
            cached_tokens=sample.cached_tokens,
        ),
        **genai.policy(sample.spans),
        **genai.training(node.reasons, turn.lineage, sample.request_ids),
        genai.TIME_TO_FIRST: None if first_ns is None else (first_ns - span.start_ns) / 1e9,
        genai.MIGRATIONS: events.count(genai.MIGRATION),
    }
    if tracing.takes_content() and node.parent is not None:
        groups = [one.messages for one in node.parent.up()]
        prompt = (write_message(one) for group in groups for one in reversed(group))
        tools = json.loads(node.render_context.tools_json or b"[]")
        count = sum(map(len, groups))
        found |= content_of(prompt, count, write_message(message), finish, tools)
    return found


def record_close(
    session: Session, request: gateway_pb2.CloseSessionRequest, closed_ms: int
) -> None:
    """Records the root of a session's own trace, to which its end belongs."""
    spec, place = session.spec, tracing.place_of_session(session.spec.session_id)
    if not place.sampled:
        return
    reward = request.rewards.reward if request.rewards.HasField("reward") else None
    attributes = {
        **genai.operation(genai.INVOKE_AGENT, spec.session_id, spec.model),
        **genai.session(spec.run_id, spec.group_id, spec.sample_index, spec.purpose),
        **genai.ended(request.outcome, reward, session.tree.turns),
    }
    start_ns, end_ns = spec.opened_unix_ms * 1_000_000, closed_ms * 1_000_000
    span = tracing.Span(genai.INVOKE_AGENT, "internal", place, 0, start_ns, attributes)
    span.end_ns = max(start_ns, end_ns)
    tracing.record(span)
