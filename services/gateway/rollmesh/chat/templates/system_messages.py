"""How a template is given system messages that it does not take as they are.

Agents send several system messages before the first user message, and others within the
conversation. Some templates take only one, at the beginning: they refuse the others, or drop them.
The rule depends on the template alone, so a message is printed the same in every turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rollmesh.chat.messages import Message, RenderContext
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.windows import ASKED

_BETWEEN = "\n\n"
_TWO = (Message("system", "one7zq"), Message("system", "two7zq"))


@dataclass(frozen=True, slots=True)
class SystemRule:
    """What becomes of a conversation's system messages before the template sees them."""

    joins_first: bool = False
    """Whether those at the beginning are one, their texts separated by an empty line."""
    later_as_user: bool = False
    """Whether those within the conversation are user messages."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages as the template is given them."""
        first = list(takewhile(lambda message: message.role == "system", messages))
        later = list(messages[len(first) :])
        if self.joins_first and len(first) > 1:
            first = [_joined(first)]
        if self.later_as_user:
            later = [replace(one, role="user") if one.role == "system" else one for one in later]
        return first + later


class RuledTemplate:
    """A template behind a rule for system messages."""

    def __init__(self, template: ModelTemplate, rule: SystemRule) -> None:
        """Takes the template and the rule."""
        self.source, self.sha256 = template.source, template.sha256
        self._template = template
        self._rule = rule

    def render(
        self,
        messages: Sequence[Message],
        context: RenderContext,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Returns the text of a conversation.

        Raises:
            TemplateRenderError: The template refuses the messages.
        """
        ruled = self._rule.apply(messages)
        return self._template.render(ruled, context, generation_prompt=generation_prompt)


def must_join(template: ModelTemplate, options: RenderContext) -> bool:
    """Returns whether a template prints one system message at the beginning, but not two."""
    shown: list[str] = []
    for first in (_TWO[:1], _TWO):
        try:
            text = template.render((*first, ASKED), options)
        except TemplateRenderError:
            text = ""
        shown.append(text)
    alone, both = shown
    return _TWO[0].content in alone and not all(one.content in both for one in _TWO)


def _joined(messages: Sequence[Message]) -> Message:
    result = messages[0]
    for message in messages[1:]:
        before = result.content + _BETWEEN if result.content else ""
        images = (replace(one, at=one.at + len(before)) for one in message.images)
        content = before + message.content if message.content else result.content
        result = replace(result, content=content, images=(*result.images, *images))
    return result
