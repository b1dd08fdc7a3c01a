"""TEMPLATE_REWRITE is true of its turn: it is said exactly where the template's own ids differ.

The reference is transformers' render of the whole conversation, tokenised at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import Message, RenderContext, ToolCall, group_messages, make_context
from rollmesh.chat.templates import MOVING, Continuation, Finding, SpecialText, TemplateRenderError
from rollmesh.gateway import Node, Prompt, Sample, Tree, build_prompt, new_tree
from rollmesh.runtime.codec import TokenIds
from rollmesh.v1 import sampling_pb2, trajectory_pb2
from tests.chat import families

TOOLS = (
    b'[{"type": "function", "function": {"name": "f", "description": "Does.",'
    b' "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]'
)
CONTEXTS = (make_context(b"", b""), make_context(TOOLS, b""))
CALLS = (ToolCall("aaaaaaaa1", "f", '{"a": "x"}'), ToolCall("bbbbbbbb2", "f", '{"a":  "y"}'))


@dataclass(frozen=True)
class Step:
    """One turn of an agent: its question, the model's answer, and its form."""

    asked: str
    answer: Message
    form: int
    """How the answer was written: as the template prints it, or in a way of the model's own."""
    apart: bool
    """Whether it was sampled letter by letter, as no tokenizer would cut it."""
    cut: bool
    echoes_reasoning: bool
    answers_calls: bool
    restarted: bool
    """Whether the gateway was restarted before the turn: the journal has no memory of renders."""


said = st.sampled_from(["Here.", "", "So it is.\n\nYes", " a ", "x</think>y", "caf\u00e9"])
answers = st.builds(
    Message,
    st.just("assistant"),
    said,
    st.sampled_from([(), (), CALLS[:1], CALLS]),
    reasoning=st.sampled_from(["", "Hm.", "Well\nthen"]),
)
steps = st.builds(
    Step,
    st.sampled_from(["why", "and", " then? "]),
    answers,
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    st.integers(0, 5).map(lambda one: one == 0),
    st.integers(0, 5).map(lambda one: one == 0),
    st.booleans(),
    st.integers(0, 4).map(lambda one: one > 0),
    st.integers(0, 4).map(lambda one: one == 0),
)
sessions = st.lists(steps, min_size=2, max_size=4)


def loaded(name: str) -> tuple[families.Family, Continuation]:
    return families.load(name), families.continuation(name)


def reference(
    family: families.Family, messages: Sequence[Message], context: RenderContext
) -> list[int] | None:
    """The ids that transformers would give. None where the template refuses the conversation."""
    text = families.rendered(family, messages, context.tools_json)
    if text is None:
        return None
    return list(family.tokenizer.rust.encode(text, add_special_tokens=False).ids)


class Played:
    """A session as a gateway holds it, without engines. Tests choose the samples."""

    def __init__(self, name: str, context: RenderContext, *, rewrite: bool) -> None:
        self.family, self.continuation = loaded(name)
        self.context = context
        self.tree: Tree = new_tree(self.continuation)
        self._rewrite = rewrite

    def turns(self, session: Sequence[Step]) -> Iterator[tuple[Prompt, list[Message]]]:
        """Plays a session. Yields each prompt with its messages."""
        messages: list[Message] = []
        calls: tuple[ToolCall, ...] = ()
        for step in session:
            if step.restarted:
                for node in self.tree.nodes.values():
                    node.seen, node.as_printed = None, None
            if calls and step.answers_calls:
                messages += [
                    Message("tool", "42", tool_call_id=call.id, name=call.name) for call in calls
                ]
            else:
                messages.append(Message("user", step.asked))
            groups = group_messages(tuple(messages))
            match = self.tree.search(self.tree.start(self.context, groups), groups)[0]
            try:
                prompt = build_prompt(
                    self.continuation,
                    SpecialText(self.family.tokenizer, "parity"),
                    match,
                    groups,
                    self.context,
                    rewrite=self._rewrite,
                )
            except TemplateRenderError:
                return
            held = [message for node in prompt.match.node.path() for message in node.messages]
            fresh = [message for group in groups[prompt.match.depth :] for message in group]
            yield prompt, held + fresh
            self._commit(prompt, step)
            calls = step.answer.tool_calls
            reasoning = step.answer.reasoning if step.echoes_reasoning else ""
            messages.append(Message("assistant", step.answer.content, calls, reasoning=reasoning))

    def _commit(self, prompt: Prompt, step: Step) -> Node:
        parent = prompt.match.node
        for group, ids, _ in prompt.new_groups:
            parent = self.tree.add_messages(parent, group, ids)
        parent.seen = prompt.seen or parent.seen
        ids = self._sampled(prompt, step)
        spans = (sampling_pb2.VersionSpan(end=len(ids)),)
        finish = sampling_pb2.FINISH_REASON_LENGTH if step.cut else sampling_pb2.FINISH_REASON_STOP
        sample = Sample(ids, np.zeros(len(ids), np.float32), spans, finish, 0, 0, 0)
        opening, reasons = prompt.generation_prompt, prompt.match.reasons
        return self.tree.add_sample(parent, step.answer, opening, sample, reasons)

    def _sampled(self, prompt: Prompt, step: Step) -> TokenIds:
        answer, end = step.answer, self.continuation.profile.stops[0]
        thought = f"{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
        forms = [
            self._printed(prompt, answer) or f"{answer.content}{end}",
            f"{answer.content}{end}",
            f"<think>\n{thought}{answer.content}{end}",
            f"{thought}{answer.content}{end}",
        ]
        text = forms[step.form]
        if step.cut:
            text = text.partition(end)[0]
        encode = self.family.tokenizer.encode
        if not step.apart:
            return encode(text)
        begun = text.removesuffix(end)
        pieces = [encode(letter) for letter in begun] + [encode(text[len(begun) :])]
        return np.concatenate([np.empty(0, np.uint32), *pieces])

    def _printed(self, prompt: Prompt, answer: Message) -> str:
        """The template's render of the answer after this prompt. Empty if it has none."""
        held = [message for node in prompt.match.node.path() for message in node.messages]
        held += [message for group, _, _ in prompt.new_groups for message in group]
        then = [Message("user", "next7zq")]
        if answer.tool_calls:
            then = [
                Message("tool", "next7zq", tool_call_id=call.id, name=call.name)
                for call in answer.tool_calls
            ]
        template = self.family.template
        try:
            asked = template.render(held, self.context, generation_prompt=True)
            text = template.render([*held, answer, *then], self.context)
        except TemplateRenderError:
            return ""
        if not text.startswith(asked):
            return ""
        text = text[len(asked) :].partition("next7zq")[0]
        ends = [self.continuation.profile.end_text, self.continuation.profile.call_end_text]
        found = [text.rfind(end) + len(end) for end in ends if end and end in text]
        return text[: max(found)] if found else ""


def ids_of(prompt: Prompt) -> list[int]:
    """The ids of the complete prompt."""
    parts = [node.token_ids for node in prompt.match.node.path()]
    parts += [ids for _, ids, _ in prompt.new_groups]
    ids: list[int] = np.concatenate([*parts, prompt.generation_prompt]).tolist()
    return ids


def without_text_beside_calls(step: Step) -> Step:
    return (
        replace(step, answer=replace(step.answer, content="")) if step.answer.tool_calls else step
    )


@pytest.mark.parametrize("name", families.parameters())
@given(session=sessions, context=st.sampled_from(CONTEXTS))
@families.for_each
def test_a_turn_is_flagged_exactly_where_the_templates_ids_differ(
    name: str, session: list[Step], context: RenderContext
) -> None:
    played = Played(name, context, rewrite=False)
    for prompt, messages in played.turns(session):
        ids = reference(played.family, messages, context)
        flagged = trajectory_pb2.FIDELITY_REASON_TEMPLATE_REWRITE in prompt.match.reasons
        assert flagged == (ids != ids_of(prompt))


@pytest.mark.parametrize("name", families.parameters())
@given(session=sessions, context=st.sampled_from(CONTEXTS))
@families.for_each
def test_a_rewritten_history_equals_the_templates_print(
    name: str, session: list[Step], context: RenderContext
) -> None:
    played = Played(name, context, rewrite=True)
    findings = played.continuation.profile.findings
    assert not findings & MOVING
    if Finding.TEXT_AFTER_RESULTS in findings:  # no place for it in a tree: such turns are kept
        session = [without_text_beside_calls(step) for step in session]
    for prompt, messages in played.turns(session):
        ids = reference(played.family, messages, context)
        if ids is not None:
            assert ids_of(prompt) == ids


class Counting:
    """A template or tokenizer that counts the characters it is given or gives."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, *arguments: Any, **options: Any) -> str:
        text = str(self._inner.render(*arguments, **options))
        self.chars += len(text)
        return text

    def encode(self, text: str) -> TokenIds:
        self.chars += len(text)
        ids: TokenIds = self._inner.encode(text)
        return ids


PLAIN = Step("why", Message("assistant", "Here."), 0, False, False, True, True, False)


@pytest.mark.parametrize(
    ("name", "form", "renders_all"),
    [
        pytest.param("qwen2_5", 0, False, id="append-only"),
        pytest.param("qwen2_5", 3, False, id="append-only, flagged"),
        pytest.param("qwen3", 0, True, id="rewrites"),
        pytest.param("qwen3", 3, True, id="rewrites, flagged"),
    ],
)
def test_the_hundredth_turn_is_compared_at_the_cost_of_the_tenth(
    name: str, form: int, *, renders_all: bool
) -> None:
    family = families.load(name)
    template: Any = Counting(family.template)
    tokenizer: Any = Counting(family.tokenizer)
    played = Played(name, CONTEXTS[0], rewrite=False)
    played.continuation = Continuation(template, tokenizer)
    step = replace(PLAIN, form=form, answer=replace(PLAIN.answer, reasoning="Hm."))
    costs: list[tuple[int, int]] = []
    for prompt, _ in played.turns([step] * 100):
        costs.append((template.chars, tokenizer.chars))
        flagged = trajectory_pb2.FIDELITY_REASON_TEMPLATE_REWRITE in prompt.match.reasons
        assert flagged == (form == 3 and len(costs) > 1)
        template.chars = tokenizer.chars = 0
    assert costs[99][1] == costs[9][1]  # what is tokenised
    assert (costs[99][0] > costs[9][0]) == renders_all
