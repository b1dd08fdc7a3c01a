"""Compares messages: as the template would see them, and as agents echo them.

The rules are what real clients need. Arguments compare as JSON values and their numbers as
doubles. Call ids count only if the template prints them. Absent fields equal empty ones. An echo
of a sampled message may also be stripped of blank text, lack its reasoning or have it inlined, lack
the text beside its calls, carry the agent's name, and contain repaired arguments.
"""

import hashlib
import html
import json
import re
from dataclasses import replace
from functools import partial

from rollmesh.chat.json_values import comparable, rounded
from rollmesh.chat.messages import Message, MessageGroup, RenderContext

_DIGEST_BYTES = 16
_MARK_CHARS = 64
_OPENING = re.compile(r"[<\[\u25c1]\S{1,63}")
_CLOSING = re.compile(r"[<\[\u25c1]\S{0,62}[>\]\u25b7]")
"""What templates and agents print around reasoning, such as `<think>` or `[/THINK]`."""
_sorted_json = partial(json.dumps, sort_keys=True, separators=(",", ":"))
_FOLD = re.compile(
    r"<details\b[^>]{0,256}>\s*+(?:<summary>[^<]{0,256}</summary>\s*+)?(.*?)</details>(.*)",
    re.DOTALL,
)


def exact_key(group: MessageGroup, *, call_ids: bool) -> bytes:
    """Returns the digest by which equal groups are found. Ids count only with `call_ids`."""
    fields: list[str] = []
    for one in group:
        fields += (one.role, one.content, one.name, _shape(one))
        for call in one.tool_calls:
            fields += (call.name, *argument_value(call.arguments))
        if call_ids:
            fields.append(one.tool_call_id)
            fields += [call.id for call in one.tool_calls]
    return _digest(fields)


def spelling_key(group: MessageGroup) -> bytes:
    """Returns the digest of everything that a template prints of a group, arguments as spelled."""
    fields: list[str] = []
    for one in group:
        fields += (one.role, one.content, one.name, one.tool_call_id, one.reasoning)
        for call in one.tool_calls:
            fields += (call.id, call.name, call.arguments)
        fields.append(_shape(one))
    return _digest(fields)


def lenient_key(group: MessageGroup, *, call_ids: bool) -> bytes:
    """Returns a digest that is also equal for an echo that lost blank text or was given a name."""
    evened = [replace(one, content=_even(one.content), name="") for one in group]
    return exact_key((*evened,), call_ids=call_ids)


def _shape(message: Message) -> str:
    """Returns how many calls a message has, and which images are where."""
    shape = str(len(message.tool_calls))
    for image in message.images:
        shape += f" {image.at} {image.sha256}"
    return shape


def _digest(fields: list[str]) -> bytes:
    """Returns the digest of a list of texts and their lengths, so that lists cannot collide."""
    lengths = ",".join(map(str, map(len, fields)))
    data = f"{lengths}|{''.join(fields)}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


class ChangedEcho:
    """An echo that differs from the sample by more than blank text and names.

    It is compared with many sampled messages, so it is read once.
    """

    def __init__(self, echo: Message) -> None:
        self._content = _even(echo.content)
        self._unfolded = _unfolded(self._content)
        self._pictured = bool(echo.images)
        self._calls = [(call.id, call.name) for call in echo.tool_calls]
        self._has_ids = bool(echo.tool_calls) and all(call.id for call in echo.tool_calls)
        self._values = [argument_value(call.arguments) for call in echo.tool_calls]
        self._rounded = [_rounded(call.arguments) for call in echo.tool_calls]

    def changes(self, sampled: Message) -> int | None:
        """Returns how many changes make a sampled message this echo. None if it is no echo of it.

        Calls must agree in number, order, id and name, and each pair of arguments must be equal as
        JSON, or nearly (15 digits of a number), or must not have been JSON when it was sampled,
        which is a change. The content may begin with the reasoning, in marks or folded. The text
        beside calls may be missing if each call has an id, which is a change too.
        """
        if self._pictured or len(sampled.tool_calls) != len(self._calls):
            return None
        if self._calls != [(call.id, call.name) for call in sampled.tool_calls]:
            return None
        changes = self._text_changes(sampled)
        if changes is None:
            return None
        for at, call in enumerate(sampled.tool_calls):
            value = argument_value(call.arguments)
            if value == self._values[at]:
                continue
            if value[0] == "raw":
                changes += 1
            elif self._rounded[at] is None or _rounded(call.arguments) != self._rounded[at]:
                return None
        return changes

    def _text_changes(self, sampled: Message) -> int | None:
        """Returns 0 if the content is as sampled, 1 if it is missing, or None.

        It may inline the reasoning.
        """
        if self._has_ids and not self._content:
            return int(bool(sampled.content.strip()))
        if self._calls and self._content == _even(sampled.content):
            return 0
        content, thought = self._unfolded or self._content, sampled.reasoning
        thought = _unquoted(thought) if self._unfolded else thought
        begin = thought.lstrip()[:_MARK_CHARS].partition("\n")[0].rstrip()
        if not begin or content.find(begin, 0, 2 * _MARK_CHARS) < 0:
            return None
        text, thought = _even(sampled.content), _even(thought)
        opening, found, rest = content.partition(thought)
        closing = rest.removesuffix(text)
        lacks_text = bool(text) and closing == rest
        if not found or (lacks_text and not self._has_ids):
            return None
        opening, closing = opening.strip(), closing.strip()
        opens = _OPENING.fullmatch(opening) is not None
        closes = _CLOSING.fullmatch(closing) is not None
        if (opens or closes) and (opens or not opening) and (closes or not closing):
            return int(lacks_text)
        return None


def _even(text: str) -> str:
    """Returns a text without blank lines, and without blanks around it and at the ends of lines."""
    return "\n".join(filter(None, map(str.rstrip, text.strip().split("\n"))))


def _unfolded(content: str) -> str | None:
    """Returns a content with its folded reasoning, unquoted, in plain marks. None if it has none.

    Front ends quote the lines of the reasoning that do not begin with a quote's mark.
    """
    found = _FOLD.match(content)
    if found is None:
        return None
    thought, text = found.groups()
    thought = html.unescape(thought) if thought.startswith("&gt;") else thought
    return _even(f"<think>\n{_unquoted(thought)}\n</think>\n{text}")


def _unquoted(text: str) -> str:
    return re.sub(r"^> ?", "", text, flags=re.MULTILINE)


def _rounded(arguments: str) -> str | None:
    try:
        return rounded(arguments)
    except ValueError:
        return None


def contradicts_reasoning(sampled: Message, echo: Message) -> bool:
    """Returns whether the echo carries different reasoning. Missing reasoning is accepted."""
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
    key = _digest([_sorted_json(tools), _sorted_json(options)])
    return RenderContext(tools_json if tools else b"", options_json if options else b"", key=key)


def fingerprint(context: RenderContext, messages_digest: bytes, settings: object) -> bytes:
    """Returns the digest that distinguishes a retry from a new request.

    Args:
        context: Tools and template options.
        messages_digest: Digest of all messages, including reasoning and call ids.
        settings: Everything else that changes the answer, as JSON values.
    """
    begin = _digest([context.key.hex(), _sorted_json(settings)])
    return hashlib.blake2b(begin + messages_digest, digest_size=_DIGEST_BYTES).digest()
