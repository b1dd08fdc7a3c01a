"""Compares messages: as the template would see them, and as agents echo them.

The rules are those that real clients need. Arguments compare as JSON values and their numbers as
doubles; call ids count only if the template prints them; absent fields equal empty ones. An echo
of a sampled message may also be stripped of whitespace, lack its reasoning, carry the agent's name,
and contain repaired arguments.
"""

import hashlib
import json

from rollmesh.chat.json_values import comparable, rounded
from rollmesh.chat.messages import Message, MessageGroup, RenderContext

_DIGEST_BYTES = 16


def exact_key(group: MessageGroup, *, call_ids: bool) -> bytes:
    """Returns the digest by which equal groups are found; ids count only with `call_ids`."""
    return _digest([field for message in group for field in _plain(message, call_ids=call_ids)])


def spelling_key(group: MessageGroup) -> bytes:
    """Returns the digest of everything that a template prints of a group, arguments as spelled."""
    fields: list[str] = []
    for one in group:
        fields += (one.role, one.content, one.name, one.tool_call_id, one.reasoning)
        for call in one.tool_calls:
            fields += (call.id, call.name, call.arguments)
        fields.append(f"{len(one.tool_calls)}{_places(one)}")
    return _digest(fields)


def lenient_key(group: MessageGroup, *, call_ids: bool) -> bytes:
    """Returns a digest that is also equal for an echo that was stripped or given a name."""
    fields = [_plain(message, call_ids=call_ids, lenient=True) for message in group]
    return _digest([field for one in fields for field in one])


def is_mended_echo(sampled: Message, echo: Message) -> bool:
    """Returns whether `echo` is `sampled` with broken arguments repaired by the agent's framework.

    Holds when calls agree in number, order, id and name, and each pair of arguments is equal as
    JSON, or nearly (15 digits of a number), or was not JSON when it was sampled.
    """
    if len(sampled.tool_calls) != len(echo.tool_calls) or not sampled.tool_calls:
        return False
    if sampled.content.strip() != echo.content.strip():
        return False
    return all(
        ours.id == theirs.id
        and ours.name == theirs.name
        and _is_mended(ours.arguments, theirs.arguments)
        for ours, theirs in zip(sampled.tool_calls, echo.tool_calls, strict=True)
    )


def _is_mended(sampled: str, echo: str) -> bool:
    kind, value = argument_value(sampled)
    if kind == "raw" or argument_value(echo) == (kind, value):
        return True
    try:
        return rounded(sampled) == rounded(echo)
    except ValueError:
        return False


def contradicts_reasoning(sampled: Message, echo: Message) -> bool:
    """Returns whether the echo carries different reasoning; missing reasoning is accepted."""
    return bool(echo.reasoning) and echo.reasoning.strip() != sampled.reasoning.strip()


def argument_value(text: str) -> tuple[str, str]:
    """Returns arguments as ("json", canonical text), or ("raw", text) if they are not JSON.

    The last of duplicate keys wins, `1E2` equals `100` and `100.0`, and the empty string equals
    `{}`. Text with a number outside the range of doubles is not treated as JSON, because each
    language prints such numbers differently.
    """
    if not text.strip():
        return "json", "{}"
    try:
        return "json", comparable(text)
    except ValueError:
        return "raw", text


def make_context(tools_json: bytes, options_json: bytes) -> RenderContext:
    """Returns the render context of a request.

    Raises:
        ValueError: The tools are not a JSON array, or the options are not a JSON object.
    """
    tools = json.loads(tools_json) if tools_json else []
    options = json.loads(options_json) if options_json else {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools_json is not an array of objects")
    if not isinstance(options, dict):
        raise ValueError("template_options_json is not an object")  # noqa: TRY004 - bad input
    key = _digest([_dump(tools), _dump(options)])
    return RenderContext(tools_json if tools else b"", options_json if options else b"", key)


def fingerprint(context: RenderContext, messages_digest: bytes, settings: object) -> bytes:
    """Returns the digest that distinguishes a retry from a new request.

    Args:
        context: Tools and template options.
        messages_digest: Digest of all messages, including reasoning and call ids.
        settings: Everything else that changes the answer, as JSON values.
    """
    begin = _digest([context.key.hex(), _dump(settings)])
    return hashlib.blake2b(begin + messages_digest, digest_size=_DIGEST_BYTES).digest()


def _plain(message: Message, *, call_ids: bool, lenient: bool = False) -> list[str]:
    """Returns the fields of a message that are compared; each message is self-delimiting."""
    content = message.content.strip() if lenient else message.content
    name = "" if lenient else message.name
    fields = [message.role, content, name, f"{len(message.tool_calls)}{_places(message)}"]
    for call in message.tool_calls:
        fields += (call.name, *argument_value(call.arguments))
    if call_ids:
        fields += (message.tool_call_id, *(call.id for call in message.tool_calls))
    return fields


def _places(message: Message) -> str:
    """Returns which images are where; empty if there are none."""
    return "".join(f" {image.at} {image.sha256}" for image in message.images)


def _digest(fields: list[str]) -> bytes:
    """Returns the digest of a list of texts and their lengths, so that lists cannot collide."""
    lengths = ",".join([str(len(field)) for field in fields])
    data = f"{lengths}|{''.join(fields)}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
