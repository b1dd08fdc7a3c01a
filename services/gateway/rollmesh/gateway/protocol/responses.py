"""Writes answers and sessions as the messages of `rollmesh.v1`."""

from collections.abc import Iterable, Sequence

from rollmesh.chat.messages import Message, RoleName
from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent, TextEvent
from rollmesh.gateway.conversation.lineage import lineages
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.reading import ROLES
from rollmesh.gateway.conversation.reasons import Lineage
from rollmesh.gateway.conversation.sampled import Shown
from rollmesh.gateway.conversation.session import (
    Answered,
    Begun,
    PromptIds,
    StreamEvent,
    Told,
)
from rollmesh.gateway.conversation.spec import answer_id_of
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs
from rollmesh.v1 import chat_pb2, gateway_pb2

_ROLE_NUMBERS = {name: number for number, name in ROLES.items()}


def write_message(message: Message) -> chat_pb2.ChatMessage:
    """Returns the proto of a message; empty content is omitted, and images are named by hash."""
    return chat_pb2.ChatMessage(
        role=write_role(message.role),
        content=[
            chat_pb2.ContentPart(text=part)
            if isinstance(part, str)
            else chat_pb2.ContentPart(image=chat_pb2.Media(sha256=part.sha256))
            for part in message.parts
        ],
        tool_calls=[
            chat_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
            for call in message.tool_calls
        ],
        reasoning_content=message.reasoning or None,
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
    )


def write_event(
    event: Begun | StreamEvent | Answered, index: int = 0
) -> gateway_pb2.StreamChatResponse:
    """Returns the proto of an event: the beginning, a part or the end of a choice's answer."""
    if isinstance(event, Begun):
        begun = gateway_pb2.ChatBegun(answer_id=event.answer_id)
        return gateway_pb2.StreamChatResponse(begun=begun, choice_index=index)
    if isinstance(event, Answered):
        return gateway_pb2.StreamChatResponse(done=_write_answer(event), choice_index=index)
    if isinstance(event, PromptIds):
        prompt = gateway_pb2.ChatPrompt(token_ids_u32le=event.packed)
        return gateway_pb2.StreamChatResponse(prompt=prompt, choice_index=index)
    if isinstance(event, Told):
        delta = gateway_pb2.ChatDelta() if event.event is None else _write_delta(event.event)
        delta.tokens.CopyFrom(_write_tokens(event.tokens))
    else:
        delta = _write_delta(event)
    return gateway_pb2.StreamChatResponse(delta=delta, choice_index=index)


def write_stored(
    answered: Answered, session_id: str, *, with_messages: bool
) -> gateway_pb2.GetAnswerResponse:
    """Returns the proto of an earlier answer, with the conversation that it answers if wanted."""
    response = gateway_pb2.GetAnswerResponse(
        answer=_write_answer(answered),
        tools_json=answered.node.render_context.tools_json.decode(),
    )
    for node in answered.node.path()[:-1] if with_messages else ():
        for message in map(write_message, node.messages):
            if node.sample is not None:
                message.answer_id = answer_id_of(session_id, node.node_id)
            response.messages.append(message)
    return response


def write_answers(answers: Sequence[Answered]) -> gateway_pb2.ChatResponse:
    """Returns the proto of a request's answers, in order of its choices."""
    report = answers[0].report
    return gateway_pb2.ChatResponse(
        answers=map(_write_answer, answers),
        prompt_token_ids_u32le=b"" if report is None else report.prompt,
    )


def _write_delta(event: ParserEvent) -> gateway_pb2.ChatDelta:
    if isinstance(event, TextEvent):
        return gateway_pb2.ChatDelta(content=event.text)
    if isinstance(event, ReasoningEvent):
        return gateway_pb2.ChatDelta(reasoning_content=event.text)
    call = gateway_pb2.ToolCallDelta(
        index=event.index, id=event.id, name=event.name, arguments_json=event.arguments
    )
    return gateway_pb2.ChatDelta(tool_calls=[call])


def _write_tokens(shown: Shown) -> gateway_pb2.SampledTokens:
    sampled = shown.sampled
    tokens = gateway_pb2.SampledTokens(token_ids_u32le=pack_ids(sampled.token_ids))
    if shown.texts is not None:
        tokens.logprobs_f32le = pack_logprobs(sampled.logprobs)
        tokens.texts.extend(shown.texts)
        tokens.top_ids_u32le = pack_ids(sampled.tops.ids)
        tokens.top_logprobs_f32le = pack_logprobs(sampled.tops.logprobs)
        tokens.top_texts.extend(shown.top_texts)
    return tokens


def _write_answer(answered: Answered) -> gateway_pb2.ChatAnswer:
    node, sample, report = answered.node, answered.node.sample, answered.report
    assert sample is not None
    return gateway_pb2.ChatAnswer(
        message=write_message(node.messages[0]),
        finish_reason=sample.finish,
        prompt_tokens=sample.prompt_tokens,
        completion_tokens=len(sample.token_ids),
        cached_tokens=sample.cached_tokens,
        node_id=node.node_id,
        reasons=sorted(node.reasons),
        answer_id=answered.receipt.answer_id,
        created_unix_ms=answered.receipt.created_unix_ms,
        tokens=None if report is None else _write_tokens(report.tokens),
        stop=answered.receipt.stop,
    )


def write_nodes(tree: Tree, *, with_messages: bool) -> Iterable[gateway_pb2.SessionNode]:
    """Yields the protos of a tree's durable nodes, parents first.

    A node that is still being committed may be lost with the process: nobody is shown it.
    """
    nodes = [node for node in tree.nodes.values() if node.stored]
    found = lineages(tree, nodes)
    for node in nodes:
        result = _write_node(node, found[node.node_id])
        if with_messages:
            result.messages.extend(map(write_message, node.messages))
        yield result


def _write_node(node: Node, lineage: Lineage) -> gateway_pb2.SessionNode:
    assert node.parent is not None
    result = gateway_pb2.SessionNode(
        node_id=node.node_id,
        parent_node_id=node.parent.node_id,
        role=write_role(node.messages[0].role),
        token_ids_u32le=pack_ids(node.token_ids),
        scaffold_tokens=node.scaffold_tokens,
        sampled=node.sample is not None,
        lineage=lineage,
        reasons=sorted(node.reasons),
    )
    if node.sample is not None:
        result.finish_reason = node.sample.finish
    return result


def write_role(role: RoleName) -> chat_pb2.Role.ValueType:
    """Returns the proto of a role."""
    return chat_pb2.Role.ValueType(_ROLE_NUMBERS[role])
