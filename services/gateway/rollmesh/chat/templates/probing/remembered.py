"""Renders that are kept while a template is probed."""

from collections.abc import Sequence

from rollmesh.chat.messages import Message, RenderContext
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError


class RememberedTemplate:
    """A template that renders each conversation once, until it forgets.

    The probes grow turn by turn and share their beginnings and windows: most of what they ask for
    has been rendered before.
    """

    def __init__(self, template: ModelTemplate) -> None:
        """Takes the template."""
        self.source, self.sha256 = template.source, template.sha256
        self._template = template
        self._keeps = True
        self._renders: dict[object, str | TemplateRenderError] = {}

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
        if not self._keeps:
            return self._template.render(messages, context, generation_prompt=generation_prompt)
        key = (tuple(messages), context, generation_prompt)
        known = self._renders.get(key)
        if known is None:
            try:
                known = self._template.render(
                    messages, context, generation_prompt=generation_prompt
                )
            except TemplateRenderError as error:
                known = error
            self._renders[key] = known
        if isinstance(known, TemplateRenderError):
            raise TemplateRenderError(str(known)) from known
        return known

    def forget(self) -> None:
        """Drops the renders, and keeps none from now on."""
        self._keeps = False
        self._renders = {}
