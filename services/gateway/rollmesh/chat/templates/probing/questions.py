"""Questions about a chat template that a few renders answer; see `probe`."""

import re

from rollmesh.chat.messages import Message, RenderContext, ToolCall
from rollmesh.chat.parsing.reasoning import OPEN
from rollmesh.chat.templates.boundaries import Boundaries
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.probing import conversations as probes
from rollmesh.chat.templates.profile import WHITESPACE, Stripped
from rollmesh.chat.templates.windows import CALL

_DATE = re.compile(r"strftime_now|date_string")


class Questions:
    """Questions about one template with one set of options."""

    def __init__(
        self,
        template: ModelTemplate,
        boundaries: Boundaries,
        bare: RenderContext,
        tools: RenderContext,
    ) -> None:
        """Takes the template, and the contexts without and with tools."""
        self._template = template
        self._boundaries = boundaries
        self._bare = bare
        self._tools = tools

    def prints_date(self) -> bool:
        """Returns whether the template prints the current date."""
        return _DATE.search(self._template.source) is not None

    def ignores_tools(self) -> bool:
        """Returns whether tools do not change the render."""
        return self._render((probes.USER,), self._bare) == self._render((probes.USER,), self._tools)

    def repeats_tools(self) -> bool:
        """Returns whether a later turn prints the tools again."""
        first = self._render((probes.USER,), self._tools).count('"look_up"')
        later = (probes.USER, probes.PLAIN, probes.USER, probes.PLAIN, probes.USER)
        whole = self._render(later, self._tools)
        return first > 0 and '"look_up"' in whole.rpartition(self._boundaries.last_end)[2]

    def moves_system(self) -> bool:
        """Returns whether a later user turn prints the first system message."""
        try:
            whole = self._render(
                (probes.SYSTEM, probes.USER, probes.PLAIN, probes.USER), self._bare
            )
        except TemplateRenderError:
            return False
        return probes.SYSTEM.content.strip() in whole.rpartition(self._boundaries.last_end)[2]

    def generation_prompt_begins_answers(self) -> bool:
        """Returns whether an earlier answer is printed as it is sampled."""
        asked = self._template.render((probes.USER,), self._bare, generation_prompt=True)
        answered = self._render((probes.USER, probes.PLAIN, probes.USER), self._bare)
        return answered.startswith(f"{asked}{probes.PLAIN.content}{self._boundaries.ends.text}")

    def drops_reasoning(self, context: RenderContext) -> bool:
        """Returns whether an answer's reasoning is dropped once another answer follows.

        Args:
            context: Context of conversations with calls.
        """
        kept, thinks = set[bool](), OPEN in self._template.source
        for answer in (probes.THOUGHT, probes.INLINE):
            last = self._render((probes.USER, answer), self._bare)
            earlier = self._render((probes.USER, answer, probes.USER), self._bare)
            if probes.THOUGHT.reasoning in last or thinks:
                kept.add(probes.THOUGHT.reasoning in earlier)
        return False in kept or self._drops_reasoning_of_calls(context)

    def stripped(self) -> Stripped:
        """Returns the whitespace that is stripped from earlier answers."""

        def earlier(said: str) -> str:
            return self._render((probes.USER, Message("assistant", said), probes.USER), self._bare)

        plain = earlier("Here.")
        leading = (space for space in WHITESPACE if earlier(f"{space}Here.") == plain)
        trailing = (space for space in WHITESPACE if earlier(f"Here.{space}") == plain)
        return Stripped("".join(leading), "".join(trailing))

    def prints_call_ids(self, context: RenderContext) -> bool:
        """Returns whether the ids of tool calls change the render in a context."""
        other = ToolCall("other9zq1", CALL.name, CALL.arguments)
        renders = []
        for call in (CALL, other):
            result = Message("tool", "x", tool_call_id=call.id, name=call.name)
            messages = (probes.USER, Message("assistant", "", (call,)), result)
            try:
                renders.append(self._render(messages, context))
            except TemplateRenderError:
                return False
        return renders[0] != renders[1]

    def _drops_reasoning_of_calls(self, context: RenderContext) -> bool:
        called = (probes.USER, probes.THOUGHT_CALLS, probes.RESULT)
        try:
            last = self._render(called, context)
            earlier = self._render((*called, probes.PLAIN, probes.USER), context)
        except TemplateRenderError:
            return False
        return probes.THOUGHT.reasoning in last and probes.THOUGHT.reasoning not in earlier

    def _render(self, messages: tuple[Message, ...], context: RenderContext) -> str:
        return self._template.render(messages, context)
