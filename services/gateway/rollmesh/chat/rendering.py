"""Templates as the rest of the library sees them: conversations in, text out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rollmesh.chat.messages import Message, RenderContext

Messages: TypeAlias = Sequence[Message]
Adapt: TypeAlias = Callable[[Messages, RenderContext], tuple[Messages, RenderContext]]


class TemplateRenderError(Exception):
    """The template refuses the messages. The error message is the template's own."""


class ModelTemplate(ABC):
    """Renders conversations in the format that a model was trained on."""

    def __init__(self, source: str) -> None:
        """Takes the text from which the answer format is detected."""
        self.source = source
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        """SHA-256 of the source, hexadecimal."""

    @abstractmethod
    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation.

        Raises:
            TemplateRenderError: The template refuses the messages.
        """

    def printed(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. Empty if the template refuses the messages."""
        try:
            return self.render(messages, context, generation_prompt=generation_prompt)
        except TemplateRenderError:
            return ""


class AdaptedTemplate(ModelTemplate):
    """A template that is given other messages, or another context, than its caller gives."""

    def __init__(self, template: ModelTemplate, adapt: Adapt) -> None:
        super().__init__(template.source)
        self._template, self._adapt = template, adapt

    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. See `ModelTemplate.render`."""
        return self._template.render(
            *self._adapt(messages, context), generation_prompt=generation_prompt
        )


def common_prefix(one: str, other: str) -> str:
    """Returns the text with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
