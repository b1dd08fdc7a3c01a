"""Converts an OpenAI chat-completions body to a `ChatRequest`; errors name the parameter."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.formats import read_format
from rollmesh.sidecar.fields.sampling import read_sampling, read_stop
from rollmesh.sidecar.fields.template_options import read_template_options
from rollmesh.sidecar.fields.values import excerpt, flag, integer
from rollmesh.sidecar.openai_chat.messages import read_messages
from rollmesh.sidecar.openai_chat.parameters import check_parameters
from rollmesh.sidecar.openai_chat.sampled import Shown
from rollmesh.sidecar.openai_chat.tools import read_tool_choice, read_tools
from rollmesh.v1 import gateway_pb2

_MAX_TOP_LOGPROBS = 20


def read_request(body: dict[str, Any]) -> gateway_pb2.ChatRequest:
    """Returns the request to the gateway, without the fields that come from headers.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    check_parameters(body)
    _check_modalities(body.get("modalities"))
    choice, tool_name = read_tool_choice(body.get("tool_choice"))
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InvalidFieldError("parallel_tool_calls", "must be true or false")
    return gateway_pb2.ChatRequest(
        messages=read_messages(body),
        tools_json=read_tools(body.get("tools")),
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=parallel,
        json_format=read_format(body.get("response_format"), "response_format", "json_schema"),
        sampling=read_sampling(body, ("max_tokens", "max_completion_tokens")),
        stop=read_stop(body.get("stop")),
        template_options_json=read_template_options(
            body.get("chat_template_kwargs"),
            effort=body.get("reasoning_effort"),
            effort_field="reasoning_effort",
            documents=body.get("documents"),
        ),
        bad_words=_bad_words(body.get("bad_words") or []),
        include_stop=flag(body, "include_stop_str_in_output"),
        show_special_tokens=not flag(body, "skip_special_tokens", default=True),
        returns=_returns(body),
        choices=_choices(body.get("n")),
    )


def _choices(n: Any) -> int:
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n < 2**31:
        raise InvalidFieldError("n", f"is {excerpt(n)}; give at least 1")
    return n


def _bad_words(words: Any) -> list[str]:
    if not isinstance(words, list) or not all(isinstance(one, str) and one for one in words):
        raise InvalidFieldError("bad_words", "must be a list of non-empty strings")
    return words


def _returns(body: dict[str, Any]) -> gateway_pb2.ReturnOptions | None:
    logprobs, top = flag(body, "logprobs"), body.get("top_logprobs")
    most = 0 if top is None else integer(top, "top_logprobs", 0)
    if most > _MAX_TOP_LOGPROBS:
        raise InvalidFieldError("top_logprobs", f"is {most}; give 0 to {_MAX_TOP_LOGPROBS}")
    if most and not logprobs:
        raise InvalidFieldError("top_logprobs", "needs logprobs; give logprobs: true with it")
    token_ids = flag(body, "return_token_ids")
    if not (logprobs or token_ids):
        return None
    return gateway_pb2.ReturnOptions(token_ids=token_ids, logprobs=logprobs, top_logprobs=most)


def read_shown(body: dict[str, Any]) -> Shown:
    """Returns which token fields the answer contains.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    return Shown(
        token_ids=flag(body, "return_token_ids"),
        logprobs=flag(body, "logprobs"),
        as_ids=flag(body, "return_tokens_as_token_ids"),
    )


def wants_stream(body: dict[str, Any]) -> bool:
    """Returns whether the answer is streamed.

    Raises:
        InvalidFieldError: The parameter is neither true nor false.
    """
    return flag(body, "stream")


def wants_usage(body: dict[str, Any]) -> bool:
    """Returns whether a stream ends with a usage chunk.

    Raises:
        InvalidFieldError: The stream options are wrong, or the answer is not streamed.
    """
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidFieldError("stream_options", "is not an object")
    if options and not body.get("stream"):
        raise InvalidFieldError("stream_options", "is for streams; give stream: true with it")
    if options.get("continuous_usage_stats"):
        raise InvalidFieldError(
            "stream_options.continuous_usage_stats",
            "is not served: usage comes in the last chunk; give include_usage",
        )
    return flag(options, "include_usage", "stream_options.")


def _check_modalities(modalities: Any) -> None:
    if modalities not in (None, ["text"]):
        raise InvalidFieldError("modalities", 'only ["text"] is served')
