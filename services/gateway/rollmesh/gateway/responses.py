"""Writes answers and sessions as the messages of `rollmesh.v1`."""

from collections.abc import Iterable, Iterator
from itertools import islice

from rollmesh.chat import (
    Message,
    ModelTokenizer,
    ParserEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
)
from rollmesh.chat.parsing import UNKNOWN, AnswerFormat
from rollmesh.chat.templates import Finding, Kind, TemplateProfile
from rollmesh.gateway.conversation import ROLES, answer_id_of
from rollmesh.gateway.lineage import lineages
from rollmesh.gateway.requests import shown_sampling
from rollmesh.gateway.session import Session, Turn, TurnRequest
from rollmesh.gateway.tree import Tree
from rollmesh.mesh import Sampled, joined
from rollmesh.runtime import clock
from rollmesh.runtime.codec import pack_ids, pack_logprobs
from rollmesh.runtime.errors import BudgetSpentError
from rollmesh.v1 import (
    chat_pb2,
    gateway_pb2,
    sampling_pb2,
    session_pb2,
    template_pb2,
    trajectory_pb2,
)

_MOST_RUNNING, _MOST_SHOWN = 16, 2048
"""Turns of a session, and tokens of each, that are shown while engines sample them."""
ROLE_NUMBERS = {name: chat_pb2.Role.ValueType(number) for number, name in ROLES.items()}


def write_message(message: Message) -> chat_pb2.ChatMessage:
    """Returns the proto of a message. Empty content is omitted, and images are named by hash."""
    result = chat_pb2.ChatMessage(
        role=ROLE_NUMBERS[message.role],
        reasoning_content=message.reasoning or None,
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
    )
    if not message.images:
        if message.content:
            result.content.add(text=message.content)
    else:
        for part in message.parts:
            if isinstance(part, str):
                result.content.add(text=part)
            else:
                result.content.add(image=chat_pb2.Media(sha256=part.sha256))
    for call in message.tool_calls:
        result.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
    return result


def write_begun(
    answer_id: str, sampling: sampling_pb2.SamplingParams, choice: int
) -> gateway_pb2.StreamChatResponse:
    """Returns the first response of a choice's stream."""
    begun = gateway_pb2.ChatBegun(answer_id=answer_id, **shown_sampling(sampling))
    return gateway_pb2.StreamChatResponse(begun=begun, choice_index=choice)


def write_prompt(packed: bytes, choice: int) -> gateway_pb2.StreamChatResponse:
    """Returns the response with the ids of the prompt."""
    prompt = gateway_pb2.ChatPrompt(token_ids_u32le=packed)
    return gateway_pb2.StreamChatResponse(prompt=prompt, choice_index=choice)


def write_deltas(
    events: Iterable[ParserEvent],
    choice: int,
    tokens: gateway_pb2.SampledTokens | None = None,
) -> list[gateway_pb2.StreamChatResponse]:
    """Returns parts of an answer. The first one has the tokens that are given."""
    deltas: list[gateway_pb2.StreamChatResponse] = []
    for event in events:
        if isinstance(event, TextEvent):
            delta = gateway_pb2.ChatDelta(content=event.text)
        elif isinstance(event, ReasoningEvent):
            delta = gateway_pb2.ChatDelta(reasoning_content=event.text)
        else:
            call = gateway_pb2.ToolCallDelta(
                index=event.index, id=event.id, name=event.name, arguments_json=event.arguments
            )
            delta = gateway_pb2.ChatDelta(tool_calls=[call])
        deltas.append(gateway_pb2.StreamChatResponse(delta=delta, choice_index=choice))
    if tokens is not None:
        if not deltas:
            delta = gateway_pb2.ChatDelta()
            deltas = [gateway_pb2.StreamChatResponse(delta=delta, choice_index=choice)]
        deltas[0].delta.tokens.CopyFrom(tokens)
    return deltas


def write_tokens(
    sampled: Sampled, returns: gateway_pb2.ReturnOptions, tokenizer: ModelTokenizer
) -> gateway_pb2.SampledTokens:
    """Returns sampled tokens in the form that a request wants."""
    tokens = gateway_pb2.SampledTokens(token_ids_u32le=pack_ids(sampled.token_ids))
    if returns.logprobs:
        text_of = tokenizer.token_bytes
        tokens.logprobs_f32le = pack_logprobs(sampled.logprobs)
        tokens.texts.extend(map(text_of, sampled.token_ids.tolist()))
        if sampled.tops is not None:
            tokens.top_ids_u32le = pack_ids(sampled.tops.ids)
            tokens.top_logprobs_f32le = pack_logprobs(sampled.tops.logprobs)
            tokens.top_texts.extend(map(text_of, sampled.tops.ids.ravel().tolist()))
    return tokens


def write_stored(
    turn: Turn, session_id: str, *, with_messages: bool
) -> gateway_pb2.GetAnswerResponse:
    """Returns the proto of an earlier answer, with the conversation that it answers if wanted."""
    assert turn.node is not None
    response = gateway_pb2.GetAnswerResponse(
        answer=write_answer(turn),
        tools_json=turn.node.render_context.tools_json.decode(),
    )
    for node in turn.node.path()[:-1] if with_messages else ():
        for message in map(write_message, node.messages):
            if node.sample is not None:
                message.answer_id = answer_id_of(session_id, node.node_id)
            response.messages.append(message)
    return response


def write_answer(
    turn: Turn, tokens: gateway_pb2.SampledTokens | None = None
) -> gateway_pb2.ChatAnswer:
    """Returns the proto of a complete answer, with its tokens if they are given."""
    node = turn.node
    assert node is not None
    sample = node.sample
    assert sample is not None
    return gateway_pb2.ChatAnswer(
        message=write_message(node.messages[0]),
        finish_reason=sample.finish,
        prompt_tokens=sample.prompt_tokens,
        completion_tokens=sample.completion_tokens,
        cached_tokens=sample.cached_tokens,
        node_id=node.node_id,
        reasons=sorted(node.reasons),
        answer_id=turn.answer_id,
        created_unix_ms=turn.created_unix_ms,
        tokens=tokens,
        stop=turn.stop,
        **shown_sampling(sample.sampling),
    )


def write_final_answer(
    answer_id: str, error: BudgetSpentError, request: TurnRequest, prompt_tokens: int
) -> gateway_pb2.ChatAnswer:
    """Returns the answer to a request for which the session's budget has no room."""
    text = f"I have to stop here: the budget of {error.metadata['budget']} is spent."
    wants, shown = request.settings.returns_tokens, shown_sampling(request.sampling)
    return gateway_pb2.ChatAnswer(
        message=write_message(Message("assistant", text.replace("_", " "))),
        finish_reason=sampling_pb2.FINISH_REASON_STOP,
        prompt_tokens=prompt_tokens,
        reasons=[trajectory_pb2.FIDELITY_REASON_BUDGET],
        answer_id=answer_id,
        created_unix_ms=clock.unix_ms(),
        tokens=gateway_pb2.SampledTokens() if wants and not request.stream else None,
        temperature=shown["temperature"],
        top_p=shown["top_p"],
    )


def write_final(
    answer: gateway_pb2.ChatAnswer, choice: int
) -> list[gateway_pb2.StreamChatResponse]:
    """Returns the rest of the stream of such an answer, after its beginning."""
    delta = gateway_pb2.ChatDelta(
        content=answer.message.content[0].text, prompt_tokens=answer.prompt_tokens
    )
    return [
        gateway_pb2.StreamChatResponse(delta=delta, choice_index=choice),
        gateway_pb2.StreamChatResponse(done=answer, choice_index=choice),
    ]


def events_of(message: Message) -> list[ParserEvent]:
    """Returns a complete answer as the events of a stream."""
    events: list[ParserEvent] = [ReasoningEvent(message.reasoning)] if message.reasoning else []
    events += [TextEvent(message.content)] if message.content else []
    events += [
        ToolCallEvent(index, call.id, call.name, call.arguments)
        for index, call in enumerate(message.tool_calls)
    ]
    return events


def write_session(session: Session) -> gateway_pb2.OpenSession:
    """Returns the proto of an open session without its metadata."""
    spec = session.spec
    return gateway_pb2.OpenSession(
        session_id=spec.session_id,
        run_id=spec.run_id,
        group_id=spec.group_id,
        sample_index=spec.sample_index,
        group_size=spec.group_size,
        model=spec.model,
        purpose=session_pb2.SessionPurpose.ValueType(spec.purpose),
        opened_unix_ms=spec.opened_unix_ms,
        idle_ms=0 if session.in_flight else clock.monotonic_ms() - session.used_ms,
        turns=session.tree.turns,
        in_flight=len(session.in_flight),
        adapters=spec.policies,
        capture=session_pb2.Capture.ValueType(spec.capture),
        origin=spec.started_from,
    )


def write_nodes(
    tree: Tree, after: int, *, with_messages: bool
) -> Iterable[gateway_pb2.SessionNode]:
    """Yields the protos of a tree's durable nodes, parents first, beginning after a node.

    A node that is still being committed may be lost with the process, so it is not shown.
    """
    nodes = [node for node in tree.nodes.values() if node.stored]
    found = lineages(tree, nodes)
    at = next((place for place, node in enumerate(nodes, 1) if node.node_id == after), 0)
    for node in nodes[at:]:
        assert node.parent is not None
        result = gateway_pb2.SessionNode(
            node_id=node.node_id,
            parent_node_id=node.parent.node_id,
            role=ROLE_NUMBERS[node.messages[0].role],
            token_ids_u32le=pack_ids(node.token_ids),
            scaffold_tokens=node.scaffold_tokens,
            sampled=node.sample is not None,
            lineage=found[node.node_id].lineage,
            lineage_source=found[node.node_id].source,
            lineage_rule=found[node.node_id].rule,
            reasons=sorted(node.reasons),
        )
        if node.sample is not None:
            result.finish_reason = node.sample.finish
            result.sampling.CopyFrom(node.sample.sampling)
            result.version_spans.extend(node.sample.spans)
        if with_messages:
            result.messages.extend(map(write_message, node.messages))
        yield result


def write_running(session: Session, tokenizer: ModelTokenizer) -> Iterator[gateway_pb2.RunningTurn]:
    """Yields the turns of a session that engines are sampling, with their last tokens."""
    for turn in islice(session.in_flight, _MOST_RUNNING):
        if turn.running is None or turn.is_attached:
            continue
        node, order = turn.running
        generation, runs, left = order.generation, list[Sampled](), _MOST_SHOWN
        for run in reversed(generation.runs):
            if left <= 0:
                break
            runs.append(run)
            left -= len(run.token_ids)
        while node.parent is not None and not node.stored:
            node = node.parent
        result = gateway_pb2.RunningTurn(
            node_id=turn.node_id,
            parent_node_id=node.node_id,
            prompt_tokens=turn.prompt_tokens,
            sampled_tokens=generation.taken,
            version_spans=generation.spans,
        )
        if runs:
            shown = joined(runs[::-1])
            ids = shown.token_ids[-_MOST_SHOWN:]
            result.token_ids_u32le = pack_ids(ids)
            result.logprobs_f32le = pack_logprobs(shown.logprobs[-_MOST_SHOWN:])
            text = b"".join(tokenizer.token_bytes(one) for one in ids.tolist())
            result.text = text.decode(errors="replace")
        yield result


# Writes the info of a gateway: its template, its answer format and its settings.


def write_template(profile: TemplateProfile, sha256: str) -> template_pb2.TemplateProfile:
    """Returns the proto of a template's profile."""
    return template_pb2.TemplateProfile(
        sha256=sha256,
        kind=write_kind(profile.kind),
        findings=sorted(map(write_finding, profile.findings)),
        refused_orders=[
            template_pb2.RefusedOrder(
                place=template_pb2.MessagePlace.Value(
                    f"MESSAGE_PLACE_{order.place.upper().replace(' ', '_')}"
                ),
                role=chat_pb2.ROLE_UNSPECIFIED if order.role is None else ROLE_NUMBERS[order.role],
                with_tools=order.with_tools,
                behind_system=order.behind_system,
                explanation=why,
            )
            for order, why in profile.refused.items()
        ],
        image_roles=sorted(ROLE_NUMBERS[one] for one in profile.image_roles),
    )


def write_kind(kind: Kind) -> template_pb2.TemplateKind.ValueType:
    """Returns the proto of a kind, which has the same name."""
    return template_pb2.TemplateKind.Value(f"TEMPLATE_KIND_{kind.name}")


def write_finding(finding: Finding) -> template_pb2.TemplateFinding.ValueType:
    """Returns the proto of a finding, which has the same name."""
    return template_pb2.TemplateFinding.Value(f"TEMPLATE_FINDING_{finding.name}")


def write_tool_calls(format_: AnswerFormat) -> gateway_pb2.ToolCallParsing.ValueType:
    """Returns how tool calls in answers of a format are parsed."""
    match format_.tools:
        case "none":
            return gateway_pb2.TOOL_CALL_PARSING_TEXT
        case parser if parser == UNKNOWN:
            return gateway_pb2.TOOL_CALL_PARSING_UNKNOWN
        case _:
            return gateway_pb2.TOOL_CALL_PARSING_PARSED


def write_reasoning(format_: AnswerFormat) -> gateway_pb2.ReasoningFormat.ValueType:
    """Returns how reasoning is marked in answers of a format."""
    name = format_.reasoning_name.upper()
    return gateway_pb2.ReasoningFormat.Value(f"REASONING_FORMAT_{name}")
