"""Between protos and the gateway's plain types."""

from collections.abc import Iterable

from google.protobuf import json_format

from rollmesh.gateway.answer import Delta, ReasoningDelta
from rollmesh.gateway.canonical import fingerprint, make_frame
from rollmesh.gateway.export import Trajectory
from rollmesh.gateway.fidelity import Fidelity, Lineage
from rollmesh.gateway.journal import SessionSpec
from rollmesh.gateway.lineage import lineages
from rollmesh.gateway.messages import Message, RoleName, ToolCall
from rollmesh.gateway.session import Answered, TurnRequest
from rollmesh.gateway.tree import Node, Tree
from rollmesh.runtime.arrays import pack_ids, pack_logprobs, pack_mask
from rollmesh.runtime.errors import InvalidFieldError, InvalidMessagesError
from rollmesh.v1 import gateway_pb2, types_pb2

_ROLES: dict[int, RoleName] = {
    types_pb2.ROLE_SYSTEM: "system",
    types_pb2.ROLE_USER: "user",
    types_pb2.ROLE_ASSISTANT: "assistant",
    types_pb2.ROLE_TOOL: "tool",
}
_ROLE_NUMBERS = {name: number for number, name in _ROLES.items()}
_MAX_STOPS, _MAX_STOP_CHARS = 16, 256


def read_chat(request: gateway_pb2.ChatRequest, spec: SessionSpec) -> TurnRequest:
    """Checks a chat request and fills in the session's defaults.

    Raises:
        InvalidFieldError: Names the field.
    """
    messages = tuple(_read_message(at, message) for at, message in enumerate(request.messages))
    if not messages:
        raise InvalidMessagesError("messages", "is empty; send at least one message")
    stops = tuple(request.stop)
    if len(stops) > _MAX_STOPS or any(not 0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise InvalidFieldError(
            "stop", f"give at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters"
        )
    try:
        frame = make_frame(request.tools_json, request.template_options_json)
    except ValueError as error:
        field = "template_options_json" if "options" in str(error) else "tools_json"
        raise InvalidFieldError(field, str(error)) from error
    sampling = json_format.Parse(spec.sampling, types_pb2.SamplingParams())
    sampling.MergeFrom(request.sampling)
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        raise InvalidFieldError("sampling.max_tokens", "is 0; give at least 1")
    settings = [
        json_format.MessageToJson(sampling),
        stops,
        request.choice_index,
        request.tool_choice,
    ]
    only_messages = gateway_pb2.ChatRequest(messages=request.messages)
    content = only_messages.SerializeToString(deterministic=True)
    policy = request.disconnect_policy
    return TurnRequest(
        messages=messages,
        frame=frame,
        sampling=sampling,
        stops=stops,
        parse_calls=request.tool_choice != gateway_pb2.TOOL_CHOICE_NONE,
        stream=request.stream,
        fingerprint=fingerprint(frame, content, settings).hex(),
        idempotency_key=request.idempotency_key,
        retry_count=request.retry_count,
        finish_on_disconnect=policy == gateway_pb2.DISCONNECT_POLICY_FINISH
        or (policy == gateway_pb2.DISCONNECT_POLICY_UNSPECIFIED and spec.finish_on_disconnect),
    )


def _read_message(at: int, message: types_pb2.ChatMessage) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidMessagesError(f"messages[{at}].role", "is not set; name who wrote it")
    calls = message.tool_calls
    return Message(
        role,
        message.content,
        tuple(ToolCall(call.id, call.name, call.arguments_json) for call in calls) if calls else (),
        message.tool_call_id,
        message.reasoning_content,
        message.name,
    )


def write_message(message: Message) -> types_pb2.ChatMessage:
    """Returns the proto of a message; content is absent where it is empty."""
    return types_pb2.ChatMessage(
        role=types_pb2.Role.ValueType(_ROLE_NUMBERS[message.role]),
        content=message.content or None,
        tool_calls=[
            types_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
            for call in message.tool_calls
        ],
        reasoning_content=message.reasoning or None,
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
    )


def write_event(event: Delta | Answered) -> gateway_pb2.ChatResponse:
    """Returns the proto of a piece of an answer, or of its end."""
    if isinstance(event, Answered):
        return gateway_pb2.ChatResponse(done=_write_done(event))
    if isinstance(event, str):
        return gateway_pb2.ChatResponse(delta=gateway_pb2.ChatDelta(content=event))
    if isinstance(event, ReasoningDelta):
        return gateway_pb2.ChatResponse(delta=gateway_pb2.ChatDelta(reasoning_content=event.text))
    call = gateway_pb2.ToolCallDelta(
        index=event.index, id=event.id, name=event.name, arguments_json=event.arguments
    )
    return gateway_pb2.ChatResponse(delta=gateway_pb2.ChatDelta(tool_calls=[call]))


def _write_done(answered: Answered) -> gateway_pb2.ChatDone:
    node, sample = answered.node, answered.node.sample
    assert sample is not None
    return gateway_pb2.ChatDone(
        message=write_message(node.unit[0]),
        finish_reason=types_pb2.FinishReason.ValueType(sample.finish),
        prompt_tokens=sample.prompt_tokens,
        completion_tokens=len(sample.token_ids),
        cached_tokens=sample.cached_tokens,
        node_id=node.node_id,
        reasons=_reasons(node.reasons),
        answer_id=answered.record.answer_id,
        created_unix_ms=answered.record.created_unix_ms,
    )


def write_nodes(tree: Tree, *, with_messages: bool) -> Iterable[gateway_pb2.SessionNode]:
    """Yields the protos of a tree's nodes, parents first."""
    found = lineages(tree, tree.nodes.values())
    for node in tree.nodes.values():
        result = _write_node(node, found[node.node_id])
        if with_messages:
            result.messages.extend(map(write_message, node.unit))
        yield result


def _write_node(node: Node, lineage: Lineage) -> gateway_pb2.SessionNode:
    assert node.parent is not None
    result = gateway_pb2.SessionNode(
        node_id=node.node_id,
        parent_node_id=node.parent.node_id,
        role=types_pb2.Role.ValueType(_ROLE_NUMBERS[node.unit[0].role]),
        token_ids_u32le=pack_ids(node.token_ids),
        glue_tokens=node.glue,
        sampled=node.sample is not None,
        lineage=types_pb2.Lineage.ValueType(lineage),
        reasons=_reasons(node.reasons),
    )
    if node.sample is not None:
        result.finish_reason = types_pb2.FinishReason.ValueType(node.sample.finish)
    return result


def trajectory_id(session_id: str, leaf_node_id: int) -> str:
    """Returns the id of the trajectory that ends with a node."""
    return f"{session_id}-{leaf_node_id}"


def write_trajectory(session_id: str, trajectory: Trajectory) -> types_pb2.Trajectory:
    """Returns the proto of an exported trajectory."""
    return types_pb2.Trajectory(
        trajectory_id=trajectory_id(session_id, trajectory.leaf_node_id),
        session_id=session_id,
        leaf_node_id=trajectory.leaf_node_id,
        lineage=types_pb2.Lineage.ValueType(trajectory.lineage),
        token_ids_u32le=pack_ids(trajectory.token_ids),
        logprobs_f32le=pack_logprobs(trajectory.logprobs),
        loss_mask_u8=pack_mask(trajectory.loss_mask),
        prompt_tokens=trajectory.prompt_tokens,
        version_spans=[
            types_pb2.VersionSpan(policy_version=version, start=start, end=end)
            for version, start, end in trajectory.spans
        ],
        segments=[
            types_pb2.TrajectorySegment(
                start=segment.start,
                end=segment.end,
                node_id=segment.node_id,
                role=types_pb2.Role.ValueType(_ROLE_NUMBERS[segment.role]),
                sampled=segment.sampled,
                trained=segment.trained,
                reasons=_reasons(segment.reasons),
                finish_reason=(
                    types_pb2.FinishReason.ValueType(segment.finish) if segment.finish else None
                ),
                engine_id=segment.engine_id,
                prompt_crc32=segment.prompt_crc32,
            )
            for segment in trajectory.segments
        ],
        reasons=_reasons(trajectory.reasons),
        turns=trajectory.turns,
    )


def _reasons(reasons: Iterable[Fidelity]) -> list[types_pb2.FidelityReason.ValueType]:
    return [types_pb2.FidelityReason.ValueType(reason) for reason in sorted(reasons)]
