"""Reads chat requests: validates every field and fills in the session's defaults."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from google.protobuf import json_format

from rollmesh.chat import (
    Calls,
    RenderContext,
    Wanted,
    fingerprint,
    make_context,
    read_json,
    replace_surrogates,
)
from rollmesh.chat.parsing import tool_schemas
from rollmesh.gateway.conversation import RequestImages
from rollmesh.gateway.session import (
    Session,
    SessionSpec,
    Shared,
    TurnRequest,
    TurnSampling,
    TurnSettings,
)
from rollmesh.gateway.tree import Edge
from rollmesh.runtime import ByteCache
from rollmesh.runtime.errors import InvalidFieldError, InvalidSamplingError
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2

# Sampling parameters of a turn: the session's, the agent's, and which of them count.
#
# `max_tokens` and `stop_token_ids` are always the agent's. All others shape the distribution that a
# turn is sampled from, except the seed, which makes samples of one prompt equal.

_Replaced: TypeAlias = Literal["allowed_token_ids", "logit_bias", "bad_sequences"]
_REPLACED: tuple[_Replaced, ...] = ("allowed_token_ids", "logit_bias", "bad_sequences")
_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
}
_GREEDY_BELOW = 1e-5  # vLLM takes the most likely token, whatever the truncation is
_TRUNCATION = ("top_p", "top_k", "min_p")
_SESSIONS_CACHED = 256


def turn_sampling(
    request: gateway_pb2.ChatRequest, spec: SessionSpec, *, may_refuse: bool = True
) -> TurnSampling:
    """Returns how to sample the answers to a request, by its session's policy.

    Args:
        request: The request.
        spec: The settings of its session.
        may_refuse: Whether the policy REFUSE applies. Otherwise the parameters are ignored.

    Raises:
        InvalidSamplingError: The session refuses a parameter. The error names it.
    """
    own, own_shape = _own(spec.sampling)
    asked = sampling_pb2.SamplingParams()
    asked.CopyFrom(own)
    for name in _REPLACED:  # MergeFrom would concatenate them
        if getattr(request.sampling, name):
            asked.ClearField(name)
    asked.MergeFrom(request.sampling)
    shape = _shape(asked)
    different = [name for name, value in shape.items() if value != own_shape[name]]
    different += ["bad_words"] if request.bad_words else []
    if spec.sampling_policy == sampling_pb2.SAMPLING_POLICY_AGENT:
        return TurnSampling(asked, tuple(request.bad_words), bool(different), _truncates(shape))
    if asked.HasField("seed") and not (own.HasField("seed") and own.seed == asked.seed):
        different.append("seed")
    if different and may_refuse and spec.sampling_policy == sampling_pb2.SAMPLING_POLICY_REFUSE:
        first, problem = different[0], "differs from the session's, which is enforced"
        if first in _DEFAULTS:
            theirs, ours = _value(asked, first), _value(own, first)
            problem = f"is {theirs:.6g}, and the session enforces {ours:.6g}"
        raise InvalidSamplingError(
            first if first == "bad_words" else f"sampling.{first}",
            f"{problem}; leave {' and '.join(different)} out, or open the session with "
            "sampling_policy agent",
        )
    params = sampling_pb2.SamplingParams()
    params.CopyFrom(own)
    if asked.HasField("max_tokens"):
        params.max_tokens = asked.max_tokens
    params.stop_token_ids[:] = asked.stop_token_ids
    return TurnSampling(params, truncates=_truncates(own_shape), ignored=tuple(different))


def shown_sampling(params: sampling_pb2.SamplingParams) -> dict[str, float]:
    """Returns the parameters that an answer shows, with their defaults."""
    return {
        "temperature": params.temperature if params.HasField("temperature") else 1.0,
        "top_p": params.top_p if params.HasField("top_p") else 1.0,
    }


@lru_cache(_SESSIONS_CACHED)
def _own(sampling_json: str) -> tuple[sampling_pb2.SamplingParams, dict[str, Any]]:
    own = json_format.Parse(sampling_json, sampling_pb2.SamplingParams())
    return own, _shape(own)


def _shape(params: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """Returns the values that shape the distribution. Equal values have equal distributions."""
    shape: dict[str, Any] = {name: _value(params, name) for name in _DEFAULTS}
    if shape["temperature"] < _GREEDY_BELOW:
        shape |= {"temperature": 0.0} | {name: _DEFAULTS[name] for name in _TRUNCATION}
    return shape | {
        "allowed_token_ids": frozenset(params.allowed_token_ids),
        "logit_bias": {token_id: bias for token_id, bias in params.logit_bias.items() if bias},
        "bad_sequences": frozenset(tuple(one.token_ids) for one in params.bad_sequences),
    }


def _value(params: sampling_pb2.SamplingParams, name: str) -> Any:
    return getattr(params, name) if params.HasField(name) else _DEFAULTS[name]  # type: ignore[arg-type]


def _truncates(shape: dict[str, Any]) -> bool:
    return any(shape[name] != _DEFAULTS[name] for name in _TRUNCATION)


_CALLS: dict[int, Calls] = {
    gateway_pb2.TOOL_CHOICE_UNSPECIFIED: Calls.AUTO,
    gateway_pb2.TOOL_CHOICE_NONE: Calls.NONE,
    gateway_pb2.TOOL_CHOICE_AUTO: Calls.AUTO,
    gateway_pb2.TOOL_CHOICE_REQUIRED: Calls.REQUIRED,
    gateway_pb2.TOOL_CHOICE_NAMED: Calls.NAMED,
}
_SAID = {
    trajectory_pb2.LINEAGE_UNSPECIFIED,
    trajectory_pb2.LINEAGE_MAIN,
    trajectory_pb2.LINEAGE_SUB_AGENT,
    trajectory_pb2.LINEAGE_COMPACTION,
    trajectory_pb2.LINEAGE_AUXILIARY,
}
_MAX_STOPS, _MAX_STOP_CHARS = 16, 256
_MAX_KEY_CHARS = 256
_MAX_CALL_ID_CHARS = 64
_MAX_BAD_WORDS = 256
_MAX_TOP_LOGPROBS = 20
_MAX_SCHEMA_BYTES = 64 * 1024
_INT64 = 2**63
_EDGE_FIELDS = ("source_request_id", "target_request_id", "type")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_EDGE_KIND = re.compile(r"[A-Za-z][A-Za-z0-9._:-]{0,127}")
_contexts: ByteCache[tuple[str, str], RenderContext] = ByteCache(16 * 1024 * 1024)
"""Render contexts by tools and options."""
_settings: ByteCache[tuple[bytes, str, int, bool], TurnSettings] = ByteCache(16 * 1024 * 1024)
"""Settings by their serialised fields, and by their session's sampling parameters and policy."""


def read_choices(
    request: gateway_pb2.ChatRequest,
    session: Session,
    max_choices: int,
    images: RequestImages | None = None,
    *,
    stream: bool,
    samples: bool = True,
) -> list[TurnRequest]:
    """Returns the choices that a chat request asks for. They differ in index and seed.

    Args:
        request: The request. Call this in a thread if it is large.
        session: Its session.
        max_choices: Most choices.
        images: Reads its images. None refuses them.
        stream: Whether the answers are streamed.
        samples: Whether answers are sampled, so that a session may refuse sampling parameters.

    Raises:
        InvalidFieldError: A field is invalid. The error names it.
    """
    count = request.choices or 1
    if count > max_choices:
        raise InvalidFieldError("choices", f"is {count}; give 1 to {max_choices}")
    for name, most in (("idempotency_key", _MAX_KEY_CHARS), ("call_id", _MAX_CALL_ID_CHARS)):
        if len(getattr(request, name)) > most:
            size = len(getattr(request, name))
            raise InvalidFieldError(name, f"has {size} characters; give at most {most}")
    if request.model_request_id:
        _check_name("model_request_id", request.model_request_id, _REQUEST_ID)
    spec = session.spec
    conversation, rest = session.reader.read(request, images)
    fields = gateway_pb2.ChatRequest.FromString(bytes(rest))
    fields.ClearField("idempotency_key")
    fields.ClearField("retry_count")
    fields.ClearField("call_id")
    fields.ClearField("model")
    fields.ClearField("model_request_id")
    adapter = spec.policy(request.model)
    data = fields.SerializeToString(deterministic=True)
    read_from = data, spec.sampling, spec.sampling_policy, samples
    settings = _settings.find(read_from)
    if settings is None:
        settings = _read_settings(fields, spec, may_refuse=samples)
        _settings.add(read_from, settings, 2 * len(data))
    key, policy, choices = request.idempotency_key, request.disconnect_policy, []
    finishes = policy == gateway_pb2.DISCONNECT_POLICY_FINISH or (
        policy == gateway_pb2.DISCONNECT_POLICY_UNSPECIFIED and spec.finish_on_disconnect
    )
    shared: Shared[Any] | None = Shared() if count > 1 else None
    for index in range(count):
        sampling = settings.sampling.params
        if index and sampling.HasField("seed"):  # the same seed would make all choices equal
            sampling = sampling_pb2.SamplingParams()
            sampling.CopyFrom(settings.sampling.params)
            sampling.seed = choice_seed(sampling.seed, index)
        stops, *others = settings.fingerprint
        asked = [sampling.SerializeToString(deterministic=True).hex(), stops, index, *others]
        if len(spec.adapters) > 1:
            asked.append([adapter.name if adapter else ""])
        choices.append(
            TurnRequest(
                conversation,
                settings,
                sampling,
                fingerprint(settings.render_context, conversation.digest, asked).hex(),
                f"{index} {key}" if key else "",
                index,
                stream,
                finishes,
                request.retry_count,
                request.call_id,
                request.model_request_id,
                adapter,
                shared,
            )
        )
    return choices


EDGES_KEY = "ai.prime.acp/semantic-edges-v1"
"""Key of a close's metadata under which edges are declared, as JSON."""


def read_edges(given: Iterable[trajectory_pb2.LineageEdge]) -> list[Edge]:
    """Returns edges that are declared, each once and in order.

    Raises:
        InvalidFieldError: An edge is invalid. The error names it.
    """
    edges = (Edge(one.source_request_id, one.target_request_id, one.type) for one in given)
    return _checked(edges, "edges")


def _checked(given: Iterable[Edge], within: str) -> list[Edge]:
    edges: dict[Edge, None] = {}
    for at, edge in enumerate(given):
        _check_name(f"{within}[{at}].source_request_id", edge.source, _REQUEST_ID)
        _check_name(f"{within}[{at}].target_request_id", edge.target, _REQUEST_ID)
        _check_name(f"{within}[{at}].type", edge.kind, _EDGE_KIND)
        if edge.source == edge.target:
            raise InvalidFieldError(f"{within}[{at}].target_request_id", "equals the source")
        edges[edge] = None
    return [*edges]


def edges_of_close(request: gateway_pb2.CloseSessionRequest) -> list[Edge]:
    """Returns the edges that a close declares in its metadata.

    Raises:
        InvalidFieldError: They are invalid.
    """
    text, field = request.metadata.get(EDGES_KEY), f"metadata[{EDGES_KEY}]"
    if text is None:
        return []
    try:
        edges = [
            Edge(*[str(one[name]) for name in _EDGE_FIELDS]) for one in read_json(text)["edges"]
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidFieldError(field, f"is no JSON object with edges: {error!r:.200}") from error
    return _checked(edges, f"{field}.edges")


def _check_name(field: str, name: str, form: re.Pattern[str]) -> None:
    if not form.fullmatch(name):
        raise InvalidFieldError(
            field, f"is {name!r:.200}; give 1 to 128 letters, digits and characters of '._:-'"
        )


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of a choice: the given seed for the first, a different one for each other.

    Seeds count up and wrap around to the smallest 64-bit integer. -1 is skipped because vLLM treats
    it as no seed.
    """
    value = seed + index
    if seed < -1 <= value:
        value += 1
    return (value + _INT64) % (2 * _INT64) - _INT64


def _read_settings(
    request: gateway_pb2.ChatRequest, spec: SessionSpec, *, may_refuse: bool
) -> TurnSettings:
    """Validates a chat request without its messages, and fills in the session's defaults."""
    how = turn_sampling(request, spec, may_refuse=may_refuse)
    stops = tuple(request.stop)
    if len(stops) > _MAX_STOPS or any(not 0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise InvalidFieldError(
            "stop", f"give at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters"
        )
    words = how.bad_words
    if len(words) > _MAX_BAD_WORDS or any(not 0 < len(one) <= _MAX_STOP_CHARS for one in words):
        raise InvalidFieldError(
            "bad_words", f"give at most {_MAX_BAD_WORDS} of 1 to {_MAX_STOP_CHARS} characters"
        )
    render_context = _read_context(request.tools_json, request.template_options_json)
    if how.params.HasField("max_tokens") and how.params.max_tokens < 1:
        raise InvalidFieldError("sampling.max_tokens", "is 0; give at least 1")
    wanted = _read_wanted(request, render_context)
    returns = gateway_pb2.ReturnOptions()
    returns.CopyFrom(request.returns)  # a part of the request would keep all of it
    if returns.top_logprobs > _MAX_TOP_LOGPROBS or (returns.top_logprobs and not returns.logprobs):
        raise InvalidFieldError(
            "returns.top_logprobs",
            f"is {returns.top_logprobs}; give at most {_MAX_TOP_LOGPROBS}, with logprobs",
        )
    if request.lineage not in _SAID:
        raise InvalidFieldError(
            "lineage", f"is {request.lineage}; give MAIN, SUB_AGENT, COMPACTION or AUXILIARY"
        )
    try:  # the tools that the conversation describes and the template does not print
        later = _read_context(request.deferred_tools_json, "")
    except InvalidFieldError as error:
        problem = error.message.removeprefix("tools_json: ").removeprefix("tools_json ")
        raise InvalidFieldError("deferred_tools_json", problem) from error
    if render_context.tools_json and later.tools_json:
        printed, described = render_context.tools_json.strip(), later.tools_json.strip()
        all_tools = RenderContext(printed[:-1] + b"," + described[1:])
    else:
        all_tools = later if later.tools_json else render_context
    distinguishing = [
        stops,
        request.tool_choice,
        request.tool_name,
        wanted.one_call,
        None if wanted.json_schema is None else [wanted.json_schema.decode(), wanted.strict],
        words,
        [request.include_stop, request.show_special_tokens],
        [returns.token_ids, returns.logprobs, returns.top_logprobs],
    ]
    if later.tools_json:
        distinguishing.append(later.key.hex())
    return TurnSettings(
        render_context=render_context,
        callable_context=all_tools,
        sampling=how,
        stops=stops,
        wanted=wanted,
        returns=returns,
        fingerprint=tuple(distinguishing),
        keeps_stop=request.include_stop,
        shows_special=request.show_special_tokens,
        lineage=request.lineage or None,
        max_tokens_must_fit=request.max_tokens_must_fit,
        returns_tokens=returns.token_ids or returns.logprobs,
    )


def _read_context(tools_json: str, options_json: str) -> RenderContext:
    """Returns the context of tools and options, of which agents send the same ones again."""
    known = _contexts.find((tools_json, options_json))
    if known is not None:
        return known
    for field, source in (("tools_json", tools_json), ("template_options_json", options_json)):
        try:
            if source:
                read_json(source)
        except ValueError as error:
            raise InvalidFieldError(field, f"is not JSON: {error}") from error
    try:
        found = make_context(tools_json.encode(), options_json.encode())
    except ValueError as error:
        field = "template_options_json" if "options" in str(error) else "tools_json"
        raise InvalidFieldError(field, str(error)) from error
    for name in tool_schemas(found.tools_json) if found.tools_json else ():
        if name != replace_surrogates(name):
            raise InvalidFieldError("tools_json", f"the name {name!r} is not Unicode")
    _contexts.add((tools_json, options_json), found, len(tools_json) + len(options_json))
    return found


def _read_wanted(request: gateway_pb2.ChatRequest, render_context: RenderContext) -> Wanted:
    calls = _CALLS.get(request.tool_choice)
    if calls is None:
        raise InvalidFieldError("tool_choice", f"is {request.tool_choice}; give a ToolChoice")
    if calls in {Calls.REQUIRED, Calls.NAMED} and not render_context.tools_json:
        raise InvalidFieldError(
            "tool_choice", "requires a tool call, but the request has no tools; send tools"
        )
    named = calls is Calls.NAMED
    if named and request.tool_name not in tool_schemas(render_context.tools_json):
        raise InvalidFieldError(
            "tool_choice", f"names {request.tool_name!r}, which is not one of the tools"
        )
    schema = request.json_format.schema_json.encode() if request.HasField("json_format") else None
    if schema:
        if len(schema) > _MAX_SCHEMA_BYTES:
            raise InvalidFieldError(
                "json_format",
                f"its schema has {len(schema)} bytes; give at most {_MAX_SCHEMA_BYTES}",
            )
        try:
            value = read_json(schema.decode())
        except ValueError as error:
            raise InvalidFieldError("json_format", f"its schema is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidFieldError("json_format", "its schema is not an object")
    return Wanted(
        calls,
        request.tool_name if named else "",
        request.HasField("parallel_tool_calls") and not request.parallel_tool_calls,
        schema,
        request.json_format.strict,
    )
