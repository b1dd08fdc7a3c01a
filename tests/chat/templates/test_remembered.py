"""What a template is asked for while it is probed, and afterwards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmesh.chat import Message, RenderContext, Tokenizer
from rollmesh.chat.templates import (
    ModelTemplate,
    RememberedTemplate,
    TemplateRenderError,
    load_template,
    probe,
)

ASK, GREETING = Message("user", "Where?"), Message("assistant", "Hello.")
CONTEXT = RenderContext()


class Counted(ModelTemplate):
    """A model's template that counts how often it renders each conversation."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__("")
        self.renders: Counter[tuple[tuple[Message, ...], RenderContext, bool]] = Counter()
        self._template = load_template(folder, tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        context: RenderContext,
        *,
        generation_prompt: bool = False,
    ) -> str:
        self.renders[tuple(messages), context, generation_prompt] += 1
        if messages[0] == GREETING:
            raise TemplateRenderError("the user begins")
        return self._template.render(messages, context, generation_prompt=generation_prompt)


@pytest.fixture
def counted(tokenizer_dir: Path, tokenizer: Tokenizer) -> Counted:
    return Counted(tokenizer_dir, tokenizer)


def test_each_conversation_is_rendered_once_while_a_template_is_probed(
    counted: Counted, tokenizer: Tokenizer
) -> None:
    probed = probe(counted, b"", tokenizer=tokenizer)
    assert set(counted.renders.values()) == {1}
    asked = counted.renders[(ASK,), CONTEXT, True]
    for _ in range(2):
        probed.template.render((ASK,), CONTEXT, generation_prompt=True)
    assert counted.renders[(ASK,), CONTEXT, True] == asked + 2


def test_contexts_and_generation_prompts_are_told_apart(counted: Counted) -> None:
    template = RememberedTemplate(counted)
    tools = RenderContext(b'[{"type": "function", "function": {"name": "f"}}]')
    plain = template.render([ASK], CONTEXT)
    prompt = template.render([ASK], CONTEXT, generation_prompt=True)
    with_tools = template.render([ASK], tools)
    assert len({plain, prompt, with_tools}) == 3
    assert template.render((ASK,), CONTEXT) == plain
    assert counted.renders.total() == 3


def test_a_refusal_is_repeated(counted: Counted) -> None:
    template = RememberedTemplate(counted)
    for _ in range(2):
        with pytest.raises(TemplateRenderError, match="the user begins"):
            template.render([GREETING], CONTEXT)
    assert counted.renders.total() == 1


def test_a_template_that_forgets_keeps_nothing(counted: Counted) -> None:
    template = RememberedTemplate(counted)
    template.render([ASK], CONTEXT)
    template.forget()
    for _ in range(2):
        template.render([ASK], CONTEXT)
    assert counted.renders.total() == 3
