"""Reads chat requests: validates every field and fills in the session's defaults."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, TypeAlias

from google.protobuf import json_format

from rollmesh.chat.canonical import fingerprint, make_context
from rollmesh.chat.constraints.structural_tag import Calls, Wanted
from rollmesh.chat.json_values import read_json, replace_surrogates
from rollmesh.chat.messages import RenderContext
from rollmesh.chat.parsing.formats import tool_schemas
from rollmesh.gateway.conversation.choices import choice_seed
from rollmesh.gateway.conversation.images import ImagePolicy, RequestImages
from rollmesh.gateway.conversation.reasons import Lineage
from rollmesh.gateway.conversation.sampled import Returns
from rollmesh.gateway.conversation.session import (
    Session,
    TurnRequest,
)
from rollmesh.runtime.caches import ByteCache
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2

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
_MAX_BAD_WORDS = 256
_MAX_TOP_LOGPROBS = 20
_REPLACED: tuple[Literal["allowed_token_ids", "logit_bias", "bad_sequences"], ...] = (
    "allowed_token_ids",
    "logit_bias",
    "bad_sequences",
)
_MAX_SCHEMA_BYTES = 64 * 1024
_DEFAULTS_CACHED = 256
_Digest: TypeAlias = Callable[[sampling_pb2.SamplingParams, int], str]
"""Returns a choice's fingerprint, given its sampling parameters and index."""
_contexts: ByteCache[tuple[str, str], RenderContext] = ByteCache(16 * 1024 * 1024)
"""Render contexts by tools and options; agents send the same ones with every request."""


def read_choices(
    request: gateway_pb2.ChatRequest,
    session: Session,
    max_choices: int,
    images: ImagePolicy | None = None,
    *,
    stream: bool,
) -> list[TurnRequest]:
    """Returns the choices that a chat request asks for; they differ in index and seed.

    Args:
        request: The request. Call this in a thread if it has images.
        session: Its session.
        max_choices: Most choices.
        images: Which images the gateway takes; None: none.
        stream: Whether the answers are streamed.

    Raises:
        InvalidFieldError: A field is invalid; the error names it.
    """
    count = request.choices or 1
    if count > max_choices:
        raise InvalidFieldError("choices", f"is {count}; give 1 to {max_choices}")
    shown = RequestImages(images or ImagePolicy(), session.images)
    first, digest = _read_chat(request, session, shown, stream=stream)
    return [first] + [_read_choice(first, digest, request, at) for at in range(1, count)]


def _read_choice(
    first: TurnRequest, digest: "_Digest", request: gateway_pb2.ChatRequest, index: int
) -> TurnRequest:
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(first.sampling)
    if sampling.HasField("seed"):  # the same seed would make all choices equal
        sampling.seed = choice_seed(sampling.seed, index)
    return dataclasses.replace(
        first,
        choice=index,
        sampling=sampling,
        fingerprint=digest(sampling, index),
        idempotency_key=_sample_key(request, index),
    )


def _read_chat(
    request: gateway_pb2.ChatRequest, session: Session, images: RequestImages, *, stream: bool
) -> tuple[TurnRequest, "_Digest"]:
    """Validates a chat request and fills in the session's defaults."""
    spec = session.spec
    conversation = session.reader.read(request, images)
    stops = tuple(request.stop)
    if len(stops) > _MAX_STOPS or any(not 0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise InvalidFieldError(
            "stop", f"give at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters"
        )
    render_context = _context_of(request)
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(_defaults(spec.sampling))
    for name in _REPLACED:  # MergeFrom would concatenate them
        if getattr(request.sampling, name):
            sampling.ClearField(name)
    sampling.MergeFrom(request.sampling)
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        raise InvalidFieldError("sampling.max_tokens", "is 0; give at least 1")
    wanted = _read_wanted(request, render_context)
    returns = _read_returns(request.returns)
    others = [
        request.tool_choice,
        request.tool_name,
        wanted.one_call,
        None if wanted.json_schema is None else [wanted.json_schema.decode(), wanted.strict],
        _read_bad_words(request),
        [request.include_stop, request.show_special_tokens],
        dataclasses.astuple(returns),
    ]

    def fingerprint_of(sampling: sampling_pb2.SamplingParams, index: int) -> str:
        settings = [sampling.SerializeToString(deterministic=True).hex(), stops, index, *others]
        return fingerprint(render_context, conversation.digest, settings).hex()

    policy = request.disconnect_policy
    first = TurnRequest(
        conversation=conversation,
        render_context=render_context,
        callable_context=_callable_context(render_context, request.deferred_tools_json),
        sampling=sampling,
        stops=stops,
        wanted=wanted,
        stream=stream,
        fingerprint=fingerprint_of(sampling, 0),
        idempotency_key=_sample_key(request, 0),
        keeps_stop=request.include_stop,
        shows_special=request.show_special_tokens,
        bad_words=tuple(request.bad_words),
        returns=returns,
        retry_count=request.retry_count,
        finish_on_disconnect=policy == gateway_pb2.DISCONNECT_POLICY_FINISH
        or (policy == gateway_pb2.DISCONNECT_POLICY_UNSPECIFIED and spec.finish_on_disconnect),
        lineage=_read_lineage(request),
        max_tokens_must_fit=request.max_tokens_must_fit,
    )
    return first, fingerprint_of


def _read_returns(returns: gateway_pb2.ReturnOptions) -> Returns:
    most = returns.top_logprobs
    if most > _MAX_TOP_LOGPROBS or (most and not returns.logprobs):
        raise InvalidFieldError(
            "returns.top_logprobs", f"is {most}; give at most {_MAX_TOP_LOGPROBS}, with logprobs"
        )
    return Returns(returns.token_ids, returns.logprobs, most)


def _read_bad_words(request: gateway_pb2.ChatRequest) -> list[str]:
    words = list(request.bad_words)
    if len(words) > _MAX_BAD_WORDS or any(not 0 < len(one) <= _MAX_STOP_CHARS for one in words):
        raise InvalidFieldError(
            "bad_words", f"give at most {_MAX_BAD_WORDS} of 1 to {_MAX_STOP_CHARS} characters"
        )
    return words


def _context_of(request: gateway_pb2.ChatRequest) -> RenderContext:
    source = request.tools_json, request.template_options_json
    return _contexts.get(source, sum(map(len, source)), lambda: _read_context(*source))


def _read_context(tools_json: str, options_json: str) -> RenderContext:
    for field, source in (("tools_json", tools_json), ("template_options_json", options_json)):
        try:
            if source:
                read_json(source)
        except ValueError as error:
            raise InvalidFieldError(field, f"is not JSON: {error}") from error
    try:
        render_context = make_context(tools_json.encode(), options_json.encode())
    except ValueError as error:
        field = "template_options_json" if "options" in str(error) else "tools_json"
        raise InvalidFieldError(field, str(error)) from error
    for name in tool_schemas(render_context.tools_json) if render_context.tools_json else ():
        if name != replace_surrogates(name):
            raise InvalidFieldError("tools_json", f"the name {name!r} is not Unicode")
    return render_context


def _callable_context(printed: RenderContext, given: str) -> RenderContext:
    """Returns the tools that the template prints, and those that the conversation describes."""
    if not given:
        return printed
    try:
        later = _contexts.get((given, ""), len(given), lambda: _read_context(given, ""))
    except InvalidFieldError as error:
        problem = error.message.removeprefix("tools_json: ").removeprefix("tools_json ")
        raise InvalidFieldError("deferred_tools_json", problem) from error
    if not printed.tools_json or not later.tools_json:
        return later if later.tools_json else printed
    both = printed.tools_json.strip()[:-1] + b"," + later.tools_json.strip()[1:]
    return RenderContext(both)


def _read_lineage(request: gateway_pb2.ChatRequest) -> Lineage | None:
    if request.lineage not in _SAID:
        raise InvalidFieldError(
            "lineage", f"is {request.lineage}; give MAIN, SUB_AGENT, COMPACTION or AUXILIARY"
        )
    return request.lineage or None


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
        _check_schema(schema)
    return Wanted(
        calls,
        request.tool_name if named else "",
        request.HasField("parallel_tool_calls") and not request.parallel_tool_calls,
        schema,
        request.json_format.strict,
    )


def _sample_key(request: gateway_pb2.ChatRequest, index: int) -> str:
    """Returns the key of one choice's sample; the choices of a request share its key."""
    key = request.idempotency_key
    if len(key) > _MAX_KEY_CHARS:
        raise InvalidFieldError(
            "idempotency_key", f"has {len(key)} characters; give at most {_MAX_KEY_CHARS}"
        )
    return f"{index} {key}" if key else ""


def _check_schema(schema: bytes) -> None:
    if len(schema) > _MAX_SCHEMA_BYTES:
        raise InvalidFieldError(
            "json_format", f"its schema has {len(schema)} bytes; give at most {_MAX_SCHEMA_BYTES}"
        )
    try:
        value = read_json(schema.decode())
    except ValueError as error:
        raise InvalidFieldError("json_format", f"its schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidFieldError("json_format", "its schema is not an object")


@lru_cache(_DEFAULTS_CACHED)
def _defaults(sampling_json: str) -> sampling_pb2.SamplingParams:
    return json_format.Parse(sampling_json, sampling_pb2.SamplingParams())
