"""The values of JSON bodies, which all protocols share: read, and sealed where agents carry them.

Every function that reads one raises `InvalidFieldError` with the name of the field if it is not
served.
"""

import base64
import hashlib
import hmac
import math
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import orjson
from prometheus_client import Counter

from rollmesh.runtime.codec import SAMPLING_RANGES, read_base64, read_data_url
from rollmesh.runtime.errors import InvalidFieldError, InvalidImageError, UnsupportedPartError
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2, trajectory_pb2

REPLACED_SURROGATES = Counter(
    "rollmesh_sidecar_replaced_surrogates_total",
    "Requests with lone surrogates, which were read as U+FFFD.",
)
IGNORED = Counter(
    "rollmesh_sidecar_ignored_parameters_total", "Parameters that change nothing here.", ["name"]
)
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100

# JSON

_MAX_PARTS = 1_000_000
"""Texts and separators of a body. A parsed part takes up to 60 bytes and the GIL for its time. A
conversation of 50,000 messages has fewer."""
_MARKS = b'"[{,:'
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_ESCAPED_SURROGATE = re.compile(
    rb"(?<!\\)(?P<before>(?:\\\\)*+)\\u"  # a backslash before it would make it a text
    rb"(?:(?P<pair>[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_REPLACEMENT = "\ufffd".encode()


def parse(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Lone surrogates are read as U+FFFD.

    JavaScript cuts a text in the middle of an emoji and escapes the half, which then is in every
    later request of the conversation. A surrogate is no character, so no tokenizer has it.
    """
    if len(data) > _MAX_PARTS and _has_too_many_parts(data):  # each has a byte at least
        raise InvalidFieldError("body", f"has more than {_MAX_PARTS:,} parts; send fewer")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        replaced = _ESCAPED_SURROGATE.sub(
            lambda found: found[0] if found["pair"] else found["before"] + rb"\ufffd",
            _ENCODED_SURROGATE.sub(_REPLACEMENT, data),
        )
        try:
            if replaced == data:
                raise
            body = orjson.loads(replaced)
        except orjson.JSONDecodeError as problem:
            raise InvalidFieldError("body", f"is not JSON: {problem}") from error
        REPLACED_SURROGATES.inc()
    if not isinstance(body, dict):
        raise InvalidFieldError("body", "is not a JSON object")
    return body


def _has_too_many_parts(data: bytes) -> bool:
    marks = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    texts = marks.count(b'"') // 2
    if texts > _MAX_PARTS:
        return True
    return texts + sum(map(len, marks.split(b'"')[::2])) > _MAX_PARTS


# Values


def excerpt(value: Any) -> str:
    """Returns a value for an error message, cut to about 100 characters."""
    return _REPR.repr(value)


def number(value: Any, field: str, least: float, most: float) -> float:
    """Returns a number within a range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidFieldError(field, "must be a number")
    if not least <= value <= most:
        raise InvalidFieldError(field, f"is {value}; give {least:.6g} to {most:.6g}")
    return value


def integer(value: Any, field: str, least: int | None) -> int:
    """Returns an integer of 64 bits, of 31 bits if it has a least value."""
    if type(value) is not int:
        raise InvalidFieldError(field, "must be an integer")
    if least is not None and not least <= value < 2**31:
        raise InvalidFieldError(field, f"is {value}; give at least {least}")
    if not -(2**63) <= value < 2**63:
        raise InvalidFieldError(field, "does not fit 64 bits")
    return value


def flag(
    body: Mapping[str, Any], name: str, within: str = "", *, default: bool | None = False
) -> Any:
    """Returns a parameter that is true or false, or the default if it is absent."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise InvalidFieldError(f"{within}{name}", "must be true or false")
    return default if value is None else value


def string(value: Any, field: str, default: str | None = None) -> str:
    """Returns a text, or the default if it is absent."""
    value = default if value is None else value
    if not isinstance(value, str):
        raise InvalidFieldError(field, "must be a string")
    return value


def members(value: Any, field: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns an object, or the default if it is absent."""
    value = default if value is None else value
    if not isinstance(value, dict):
        raise InvalidFieldError(field, "is not an object")
    return value


def entries(value: Any, field: str, most: int, what: str) -> list[Any]:
    """Returns a list that is not longer than a limit, which an error states. None is empty."""
    value = [] if value is None else value
    if not isinstance(value, list):
        raise InvalidFieldError(field, "must be a list")
    if len(value) > most:
        raise InvalidFieldError(field, f"has {len(value)} {what}; give at most {most}")
    return value


def to_json(value: Any, field: str) -> str:
    """Returns a value as JSON. The package orjson reads deeper nesting than it writes."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidFieldError(
            field, f"cannot be serialised: {error}; nest it less deeply"
        ) from error


# Parameters

ABSENT = "the engine is not started with what it needs"
_REFUSED = {
    "ec_transfer_params kv_transfer_params": ABSENT,
    "vllm_xargs": "no extension reads them",
}
_UNUSED = ("cache_salt", "metadata", "mm_payload", "return_mm_kwargs", "service_tier",
           "watermarking")  # fmt: skip


class Parameters:
    """The parameters of a protocol: which are served, refused by name, or ignored.

    The names come from vLLM's request class and from the SDKs. docs/openai.md, docs/responses.md,
    docs/messages.md and docs/google.md have the same tables for users, with the reasons.
    """

    def __init__(
        self,
        served: str,
        refused: Mapping[str, str],
        unused: str,
        nested: str = "",
        *,
        of_vllm: bool = True,
        **neutral: Any,
    ) -> None:
        """Takes the names in words, and adds the parameters of all of vLLM's protocols."""
        self.served = frozenset(served.split())
        """Parameters with the effect that the API or vLLM gives them."""
        self.refused: Mapping[str, str] = {
            name: remedy
            for names, remedy in {**(_REFUSED if of_vllm else {}), **refused}.items()
            for name in names.split()
        }
        """Parameters that would change the answer, and the remedy."""
        self.unused = frozenset([*unused.split(), *(_UNUSED if of_vllm else ())]) - self.served
        """Parameters that change neither tokens nor text of an answer."""
        self.nested = frozenset(nested.split())
        """Names inside messages, tools and options that are counted where they change nothing."""
        self.neutral: Mapping[str, Any] = neutral
        """Values that request nothing, other than null, false, 0 and empty."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuses parameters that would change the answer, and counts ignored ones."""
        for name in body.keys() & self.refused.keys():
            value, neutral = body[name], self.neutral.get(name)
            # An empty value requests nothing, unless the parameter has another default.
            if value is None or value == neutral or (neutral in {None, "none"} and not value):
                continue
            raise InvalidFieldError(name, f"is not served: {self.refused[name]}; leave it out")
        if others := body.keys() - self.served - self.refused.keys():
            self.ignore({name: body[name] for name in others})

    def ignore(self, given: Mapping[str, Any], known: Collection[str] = ()) -> None:
        """Counts the members of an object that are not known.

        Names that the API does not have share the label `other`, which bounds the labels.
        """
        for name, value in given.items():
            if name not in known and value is not None:
                named = name in self.unused or name in self.nested
                IGNORED.labels(name if named else "other").inc()


# The form of an answer's text: any text, a JSON object, or JSON of a schema.

_MAX_SCHEMA_BYTES = 64 * 1024


def read_format(form: Any, field: str, schema_key: str = "") -> gateway_pb2.JsonFormat | None:
    """Returns the JSON format of an answer. None if it is text.

    Args:
        form: The value of the parameter. May be None.
        field: Name of the parameter.
        schema_key: The member with the schema, its name and strictness. Empty if it is the value.
    """
    if form is None:
        return None
    match members(form, field).get("type"):
        case "text":
            return None
        case "json_object":
            return gateway_pb2.JsonFormat()
        case "json_schema":
            if schema_key:
                form, field = form.get(schema_key), f"{field}.{schema_key}"
            if not string(members(form, field).get("name"), f"{field}.name"):
                raise InvalidFieldError(f"{field}.name", "is empty")
            strict = flag(form, "strict", f"{field}.")
            if form.get("schema") is None:
                return gateway_pb2.JsonFormat(strict=strict)
            return read_schema(form["schema"], f"{field}.schema", strict=strict)
        case _:
            raise InvalidFieldError(
                f"{field}.type", "is not served; give text, json_object or json_schema"
            )


def read_schema(schema: Any, field: str, *, strict: bool) -> gateway_pb2.JsonFormat:
    """Returns the JSON format of a schema. All parts of a strict one must be enforceable."""
    text = to_json(members(schema, field), field)
    if (size := len(text.encode())) > _MAX_SCHEMA_BYTES:
        raise InvalidFieldError(field, f"has {size} bytes; give at most {_MAX_SCHEMA_BYTES}")
    return gateway_pb2.JsonFormat(schema_json=text, strict=strict)


# Sampling parameters, under the names that vLLM gives them.

_INTEGERS = ("top_k", "min_tokens", "seed")
_OFF = {"top_k": 0, "seed": None}  # the meaning of -1 in vLLM
_ID_LISTS = (("stop_token_ids", 0, 64), ("allowed_token_ids", 1, 4096))
"""Lists of token ids, with the fewest and the most of each."""
_MAX_BIASES, _MOST_BIAS, _MOST_ID_DIGITS = 1024, 100.0, 10
_MAX_STOPS = 16
_MAX_TOP_LOGPROBS = 20


def read_sampling(body: Mapping[str, Any], limits: Sequence[str]) -> sampling_pb2.SamplingParams:
    """Returns the sampling parameters of a body. Absent ones default to the session's.

    Args:
        body: The body.
        limits: Parameters that limit the length of the answer. The last one wins.
    """
    result = sampling_pb2.SamplingParams()
    for name, bounds in SAMPLING_RANGES.items():
        if body.get(name) is not None:
            setattr(result, name, number(body[name], name, *bounds))
    for name in _INTEGERS:
        value = body.get(name)
        if value == -1:
            value = _OFF.get(name, value)
        if value is not None:
            setattr(result, name, integer(value, name, None if name == "seed" else 0))
    for name in limits:
        if body.get(name) is not None:
            result.max_tokens = integer(body[name], name, 1)
    if flag(body, "ignore_eos"):
        result.ignore_eos = True
    for name, least, most in _ID_LISTS:
        if (ids := body.get(name)) is None:
            continue
        if not isinstance(ids, list) or not least <= len(ids) <= most:
            raise InvalidFieldError(name, f"give {least} to {most} token ids")
        found = (integer(value, f"{name}[{at}]", 0) for at, value in enumerate(ids))
        getattr(result, name).extend(found)
    biases = body.get("logit_bias")
    if not isinstance(biases, dict | None) or len(biases or ()) > _MAX_BIASES:
        raise InvalidFieldError("logit_bias", f"give an object of at most {_MAX_BIASES} token ids")
    for key, bias in (biases or {}).items():
        if not key.isdecimal() or len(key) > _MOST_ID_DIGITS or int(key) >= 2**31:
            raise InvalidFieldError("logit_bias", f"{key!r:.80} is not a token id")
        value = number(bias, f"logit_bias.{key}", -math.inf, math.inf)
        result.logit_bias[int(key)] = min(max(value, -_MOST_BIAS), _MOST_BIAS)  # as in vLLM
    return result


def read_texts(texts: Any, field: str, *, are_stops: bool = False) -> list[str]:
    """Returns a list of non-empty strings, or stop strings, of which one needs no list."""
    if texts is None:
        return []
    given = [texts] if are_stops and isinstance(texts, str) else texts
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        alternative = "a string or " if are_stops else ""
        raise InvalidFieldError(field, f"must be {alternative}a list of non-empty strings")
    if are_stops and len(given) > _MAX_STOPS:
        raise InvalidFieldError(field, f"has {len(given)} strings; give at most {_MAX_STOPS}")
    return given


def read_top_logprobs(value: Any, field: str, lacking: str) -> int:
    """Returns the number of most likely tokens to return. None is 0.

    Args:
        value: The value of the parameter.
        field: Its name.
        lacking: The parameter that it needs and that is not true. Empty if it is.
    """
    most = 0 if value is None else integer(value, field, 0)
    if most > _MAX_TOP_LOGPROBS:
        raise InvalidFieldError(field, f"is {most}; give 0 to {_MAX_TOP_LOGPROBS}")
    if most and lacking:
        raise InvalidFieldError(field, f"needs {lacking}; give {lacking}: true with it")
    return most


# Lineage that agents declare

EDGES_KEY = "ai.prime.acp/semantic-edges-v1"
"""Key of a request's metadata under which edges are declared, as JSON."""
_EDGE_FIELDS = ("source_request_id", "target_request_id", "type")


def read_edges(data: bytes, within: str = "") -> list[trajectory_pb2.LineageEdge]:
    """Reads `{"edges": [{"source_request_id", "target_request_id", "type"}]}`."""
    try:
        given = parse(data).get("edges")
    except InvalidFieldError as error:
        problem = error.message.removeprefix("body: ")
        raise InvalidFieldError(within.removesuffix(".") or "body", problem) from error
    if not isinstance(given, list):
        raise InvalidFieldError(f"{within}edges", "give an array of edges")
    edges = []
    for at, edge in enumerate(given):
        try:
            edges.append(trajectory_pb2.LineageEdge(**{one: edge[one] for one in _EDGE_FIELDS}))
        except (LookupError, TypeError) as error:
            problem = f"give an object with {', '.join(_EDGE_FIELDS)}, each a text"
            raise InvalidFieldError(f"{within}edges[{at}]", problem) from error
    return edges


def edges_of(metadata: Any) -> list[trajectory_pb2.LineageEdge]:
    """Returns the edges that OpenAI's `metadata` of a request declares."""
    text = metadata.get(EDGES_KEY) if isinstance(metadata, dict) else None
    if text is None:
        return []
    field = f"metadata[{EDGES_KEY}]"
    return read_edges(string(text, field).encode(), f"{field}.")


# Options of the chat template, besides messages and tools.

_TEMPLATE_ARGUMENTS = {  # the gateway or transformers passes these to every template
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "tokenize",
}  # fmt: skip


def read_template_options(
    options: Any, effort: Any, effort_field: str, documents: Any = None
) -> str:
    """Returns template options as a JSON object. Empty if there are none.

    Args:
        options: The `chat_template_kwargs` of the body. May be None.
        effort: How much the model reasons. May be None.
        effort_field: Name of its parameter.
        documents: Documents to answer from. May be None.
    """
    options = members(options, "chat_template_kwargs", {})
    if taken := options.keys() & _TEMPLATE_ARGUMENTS:
        raise InvalidFieldError(
            f"chat_template_kwargs.{min(taken)}", "is not an option; leave it out"
        )
    if effort is not None:  # templates use two names for it
        effort = string(effort, effort_field)
        options = {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}
    if documents is not None:
        if not isinstance(documents, list):
            raise InvalidFieldError("documents", "must be a list")
        for at, one in enumerate(documents):
            if not (isinstance(one, dict) and all(isinstance(text, str) for text in one.values())):
                raise InvalidFieldError(f"documents[{at}]", "is not an object of strings")
        options = {**options, "documents": documents}
    return to_json(options, "chat_template_kwargs") if options else ""


# Tools

MAX_TOOLS = 2048
TOOL_CHOICES: Mapping[str | None, gateway_pb2.ToolChoice.ValueType] = {
    None: gateway_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": gateway_pb2.TOOL_CHOICE_NONE,
    "auto": gateway_pb2.TOOL_CHOICE_AUTO,
    "required": gateway_pb2.TOOL_CHOICE_REQUIRED,
}
"""The values of OpenAI's `tool_choice` that are words."""


# The content of messages

_MAX_MESSAGES = 20_000  # the default of the gateway's `max_session_nodes`
ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
}
_HTTP = re.compile("https?://", re.ASCII | re.IGNORECASE)
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_INVALID = "INVALID_JSON"
"""Member for arguments that are no JSON object, as Anthropic's guide advises."""


def list_messages(messages: Any, before: int = 0, field: str = "messages") -> list[Any]:
    """Returns the messages of a body. As many `before` them count too."""
    if not isinstance(messages, list) or not messages:
        raise InvalidFieldError(field, "must be a non-empty list")
    if (count := before + len(messages)) > _MAX_MESSAGES:
        raise InvalidFieldError(
            field, f"has {count} messages; a session holds at most {_MAX_MESSAGES}"
        )
    return messages


def text_parts(text: str | None) -> list[chat_pb2.ContentPart]:
    """Returns a text as the parts of a message. Empty text has none."""
    return [chat_pb2.ContentPart(text=text)] if text else []


def image_of_url(url: Any, field: str) -> chat_pb2.ContentPart:
    """Returns the image of a data URL.

    Other URLs are refused: to fetch them would send a stranger's requests from this host.

    Raises:
        UnsupportedPartError: It is a URL of http or https.
        InvalidImageError: It is no data URL in base64.
    """
    text = string(url, field)
    if _HTTP.match(text):
        raise UnsupportedPartError(
            field, "is a URL to fetch, and images are not fetched; send the bytes as a data URL"
        )
    media_type, data = read_data_url(text, field)
    return chat_pb2.ContentPart(image=chat_pb2.Media(media_type=media_type, data=data, field=field))


def image_of_base64(
    source: Mapping[str, Any], field: str, type_member: str
) -> chat_pb2.ContentPart:
    """Returns the image of an object that has its base64 text in `data`.

    Raises:
        InvalidFieldError: The media type is not served.
        InvalidImageError: It is not base64, or empty.
    """
    media_type = string(source.get(type_member), f"{field}.{type_member}")
    if media_type not in _IMAGES:
        raise InvalidFieldError(
            f"{field}.{type_member}", f"is {excerpt(media_type)}; give one of {', '.join(_IMAGES)}"
        )
    field = f"{field}.data"
    encoded = string(source.get("data"), field).replace("-", "+").replace("_", "/")
    data = read_base64(encoded, field)
    if not data:
        raise InvalidImageError(field, "is empty; send the bytes of the image")
    return chat_pb2.ContentPart(image=chat_pb2.Media(media_type=media_type, data=data, field=field))


def joined(parts: Iterable[chat_pb2.ContentPart | None]) -> list[chat_pb2.ContentPart]:
    """Returns parts with neighbouring texts joined, because one text has one form."""
    found: list[chat_pb2.ContentPart] = []
    given = [part for part in parts if part is not None]
    if len(given) == 1 and given[0].text:  # the common case
        return given
    for is_text, run in groupby(given, lambda part: part.HasField("text")):
        neighbours = list(run)
        text = "".join(part.text for part in neighbours) if is_text else ""
        found += text_parts(text) if is_text else neighbours
    return found


def in_order(
    given: Iterable[chat_pb2.ContentPart | chat_pb2.ChatMessage | None],
) -> list[chat_pb2.ChatMessage]:
    """Returns the messages of a user, in order: own words, and between them results of tools."""
    found: list[chat_pb2.ChatMessage] = []
    said: list[chat_pb2.ContentPart | None] = []
    for one in given:
        if isinstance(one, chat_pb2.ChatMessage):
            if any(said):
                found.append(chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=joined(said)))
            said = []
            found.append(one)
        else:
            said.append(one)
    if any(said) or not found:
        found.append(chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=joined(said)))
    return found


def read_arguments(arguments: Any, field: str) -> str:
    """Returns the arguments of a call, an object, as JSON. None is empty."""
    given = members(arguments, field, {})
    text = given.get(_INVALID) if len(given) == 1 else None
    return text if isinstance(text, str) else to_json(given, field)


def write_arguments(arguments: str) -> orjson.Fragment | dict[str, str]:
    """Returns arguments as an object: the sampled JSON itself, or its text if it is no object."""
    if not arguments.strip():
        return {}
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments) if is_object else {_INVALID: arguments}


# Seals on reasoning that agents carry: they prove that an echo was sampled.
#
# A seal names the answer and the text, and is signed with the session's key. Sidecars share nothing
# for it, it holds after a restart, and no key of another session makes one. The holder of the key
# could make one too, but nothing is trained for it: a seal only tells equal answers of the session
# apart.

ECHOED_REASONING = Counter(
    "rollmesh_sidecar_echoed_reasoning_total",
    "Reasoning that agents sent back: sealed as it was sampled, or not.",
    ["sealed"],
)
_SEALED, _UNSEALED = (ECHOED_REASONING.labels(said) for said in ("yes", "no"))
_SIGNATURES = 16_384
"""Signatures that are kept: agents send the complete conversation with each request."""
_DIGEST_BYTES, _MAC_BYTES = 16, 18
_MAX_SEAL_CHARS = 512


def seal(session_key: str, answer_id: str, text: str) -> str:
    """Returns the seal of an answer's reasoning: `<answer id>.<digest>.<signature>`."""
    signed = f"{answer_id}.{_digest(text)}"
    return f"{signed}.{_sign(session_key, signed)}"


def sealed_answer(session_key: str, given: str, text: str) -> str:
    """Returns the id of the answer that reasoning is of, and counts it.

    Args:
        session_key: Key of the session.
        given: The seal. The id is empty if it does not hold.
        text: The reasoning. Empty if the agent keeps only the seal.
    """
    signed, _, signature = given.rpartition(".")
    is_sealed = (
        bool(signed)
        and len(given) <= _MAX_SEAL_CHARS
        and given.isascii()
        and hmac.compare_digest(signature, _sign(session_key, signed))
        and (not text or signed.rpartition(".")[2] == _digest(text))
    )
    (_SEALED if is_sealed else _UNSEALED).inc()
    return given.split(".", 1)[0] if is_sealed else ""


def _digest(text: str) -> str:
    data = text.encode(errors="surrogatepass")
    return _encoded(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest())


@lru_cache(_SIGNATURES)
def _sign(session_key: str, signed: str) -> str:
    mac = hmac.digest(session_key.encode(), b"reasoning " + signed.encode(), hashlib.sha256)
    return _encoded(mac[:_MAC_BYTES])


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
