"""Text of users and tools that spells a special token, such as `<|im_end|>` on a web page.

Chat templates print such text beside their own special tokens, and tokenizers cannot tell the two
apart: the text closes its turn and may open another. A setting decides:

* parity: the text becomes the token, as in `apply_chat_template`. The turn carries SPECIAL_TEXT.
* plain: it stays text. A marker is put into it before the template prints it, so that the tokenizer
  can tell it from the template's own tokens (`ModelTokenizer.hide`).
* refuse: the request is refused, and the error names the message.

Text that spells the placeholder of an image never becomes that token: it is refused or stays text.

The setting covers everything that comes from outside: contents, reasoning, names, arguments of
calls, tools and template options. Only the messages that a request adds are examined.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rollmesh.chat.caches import ByteCache
from rollmesh.chat.json_values import read_json
from rollmesh.chat.messages import (
    Image,
    InvalidInputError,
    Message,
    MessageGroup,
    RenderContext,
    ToolCall,
)
from rollmesh.chat.tokenizer import ModelTokenizer

_CONTEXTS_BYTES = 16 * 1024 * 1024


class SpecialText:
    """Applies the setting to the messages that a request adds."""

    def __init__(
        self, tokenizer: ModelTokenizer, setting: str, reserved: Sequence[str] = ()
    ) -> None:
        """Takes the setting, and the texts that stay text whatever the setting is.

        The setting is parity, plain or refuse.
        """
        self._refuses = setting == "refuse"
        self._hides = setting == "plain"
        self._spells: Callable[[str], bool] = tokenizer.spells
        # Text may contain the marker of hidden text. It is printed unchanged.
        self._changed: Callable[[str], str] = tokenizer.hide if self._hides else tokenizer.escape
        if reserved and not (self._hides or self._refuses):
            self._spells = partial(tokenizer.spells, except_for=reserved)
            self._changed = partial(tokenizer.hide, only=reserved)
        self._contexts: ByteCache[tuple[bytes, bytes], tuple[RenderContext, bool]] = ByteCache(
            _CONTEXTS_BYTES
        )

    def apply(
        self, groups: list[MessageGroup], start: int, context: RenderContext
    ) -> tuple[list[MessageGroup], RenderContext, bool]:
        """Returns the rendered form of a request that adds `groups[start:]`.

        Returns:
            The groups and the context as the template will see them, and whether text in them
            becomes special tokens.

        Raises:
            InvalidInputError: It spells a special token, and such text is refused.
        """
        source = context.tools_json, context.options_json
        shown_context, in_context = self._contexts.get(
            source, sum(map(len, source)), lambda: self._shown_context(context)
        )
        shown_context = replace(shown_context, now=context.now)
        found, shown = False, list(groups)
        for at, group in enumerate(groups):
            if 0 < at < start:  # some templates print the first message again in a later turn
                continue
            for within, message in enumerate(group):
                if at < start or found or not any(map(self._spells, _texts(message))):
                    continue
                if self._refuses:
                    index = sum(map(len, groups[:at])) + within
                    raise InvalidInputError(f"messages[{index}]", _REFUSED)
                found = True
            shown[at] = tuple(map(self._shown, group))
        if start == 0 and in_context:
            if self._refuses:
                raise InvalidInputError("tools", _REFUSED)
            found = True
        return shown, shown_context, found and not self._hides

    def show(self, groups: Sequence[MessageGroup]) -> list[MessageGroup]:
        """Returns groups as the template will see them."""
        return [tuple(map(self._shown, group)) for group in groups]

    def _shown(self, message: Message) -> Message:
        """Returns a message as the template will see it. The same object if unchanged."""
        change, texts = self._changed, _texts(message)
        if list(map(change, texts)) == texts:
            return message
        content = change(message.content)
        return replace(
            message,
            content=content,
            images=tuple(_moved(message.images, message.content, content)),
            reasoning=change(message.reasoning),
            name=change(message.name),
            tool_call_id=change(message.tool_call_id),
            tool_calls=tuple(
                ToolCall(change(call.id), change(call.name), _mapped(call.arguments, change))
                for call in message.tool_calls
            ),
        )

    def _shown_context(self, context: RenderContext) -> tuple[RenderContext, bool]:
        """Returns a context as the template will see it, and whether it spells a special token."""
        change = self._changed
        sources = context.tools_json.decode(), context.options_json.decode()
        texts = [*_strings_of(sources[0]), *_strings_of(sources[1])]
        spelled = any(map(self._spells, texts))
        if list(map(change, texts)) == texts:
            return context, spelled
        tools, options = (_mapped(source, change).encode() for source in sources)
        return replace(context, tools_json=tools, options_json=options), spelled


_REFUSED = (
    "spells a special token of the model; leave it out, or set special_text of the gateway to plain"
)


def _moved(images: Sequence[Image], before: str, after: str) -> Iterator[Image]:
    """Yields images at the same places in a text into which characters were put."""
    at = moved = 0
    for image in images:
        while at < image.at:
            at += after[moved] == before[at]
            moved += 1
        yield replace(image, at=moved)


def _texts(message: Message) -> list[str]:
    """Returns the texts of a message that are not empty."""
    texts = [message.content, message.reasoning, message.name, message.tool_call_id]
    for call in message.tool_calls:
        texts += (call.id, call.name, *_strings_of(call.arguments))
    return [*filter(None, texts)]


def _strings_of(source: str) -> list[str]:
    """Returns the texts of a JSON value as a template prints them. The source where it is none."""
    texts = [source]
    if "\\" in source:  # escapes may spell a token that the source does not
        with suppress(ValueError):
            _each(read_json(source), texts.append)
    return texts


def _mapped(source: str, change: Callable[[str], str]) -> str:
    """Applies a change to all strings of a JSON text. Invalid JSON is changed as plain text."""
    try:
        value = read_json(source) if source.strip() else None
    except ValueError:
        return change(source)
    return source if value is None else json.dumps(_each(value, change))


def _each(value: Any, change: Callable[[str], Any]) -> Any:
    """Returns a JSON value with each of its strings changed, in order. Keys are strings too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each(one, change) for one in value]
    if isinstance(value, dict):
        return {change(key): _each(one, change) for key, one in value.items()}
    return value
