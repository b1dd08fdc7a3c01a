"""Compares the prompts of a session with transformers' own render of the same messages.

A prompt is equal, or flagged (a session's own comparison finds the difference, and the turn carries
TEMPLATE_REWRITE), or refused. Anything else is wrong.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.chat import (
    Message,
    MessageGroup,
    ModelTokenizer,
    TokenIds,
    ToolCall,
    group_messages,
    make_context,
)
from rollmesh.chat.templates import (
    Continuation,
    ModelTemplate,
    Seen,
    TemplateRenderError,
    load_model,
)
from tests.chat import families

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOOLS = (
    b'[{"type": "function", "function": {"name": "add", "description": "Adds, \\"fast\\".",'
    b' "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}]'
)


def _call(at: int) -> ToolCall:
    # Nine letters and digits: the strictest template wants ids of that form.
    return ToolCall(f"callid{at:03d}", "add", f'{{"n": {at}, "why": "caf\u00e9"}}')


def _got(at: int, content: str = "42\n") -> Message:
    return Message("tool", content, tool_call_id=_call(at).id, name="add")


def _called(*at: int, said: str = "", thought: str = "") -> Message:
    return Message("assistant", said, tuple(map(_call, at)), reasoning=thought)


SYSTEM, ASK, MORE = Message("system", "Be brief."), Message("user", "And 1?"), Message("user", "2?")
SAID, AGAIN = Message("assistant", "Two, or\n\nso."), Message("assistant", "Yes.")
THOUGHT = Message("assistant", "Three.", reasoning="One and two.")
BLANK = (Message("system", " You   add.\n"), Message("user", "\tAnd 1?  "))
USUAL: tuple[tuple[Message, ...], ...] = (
    (ASK,),
    (SYSTEM, ASK),
    BLANK,
    (ASK, SAID, MORE, AGAIN, ASK),
    (SYSTEM, ASK, SAID, MORE, AGAIN, ASK),
    (ASK, THOUGHT, MORE, THOUGHT, ASK),
    (SYSTEM, ASK, THOUGHT, MORE, SAID, ASK),
    (ASK, _called(1), _got(1)),
    (SYSTEM, ASK, _called(1), _got(1), SAID, MORE),
    (SYSTEM, ASK, _called(1), _got(1), _called(2), _got(2), SAID, MORE),
    (ASK, _called(1), _got(1), _called(1), _got(1), SAID, MORE),
    (ASK, _called(1, 2), _got(1), _got(2, "7"), SAID, MORE),
    (SYSTEM, ASK, _called(1, 2), _got(1), _got(2, "7"), _called(3), _got(3), SAID),
    (ASK, _called(1, 2), _got(2, "7"), _got(1), SAID, MORE),
    (ASK, _called(1, said="Let me see."), _got(1), SAID, MORE),
    (ASK, _called(1, thought="I add."), _got(1), THOUGHT, MORE, SAID, ASK),
    (SYSTEM, ASK, _called(1, 2, thought="I add."), _got(1), _got(2), THOUGHT, MORE),
    (ASK, _called(1), _got(1), MORE),
)
ODD: tuple[tuple[Message, ...], ...] = (
    (SYSTEM, SYSTEM, ASK, SAID, MORE),
    (ASK, SYSTEM, SAID, MORE),
    (SYSTEM, ASK, SAID, SYSTEM, MORE, AGAIN, SYSTEM),
    (SYSTEM, ASK, _called(1), _got(1), SYSTEM, SAID, MORE),
    (ASK, SAID, SYSTEM),
    (SYSTEM,),
    (SYSTEM, SYSTEM),
    (SAID, ASK, AGAIN, MORE),
    (SYSTEM, SAID, ASK),
    (ASK, SAID, AGAIN, MORE),
    (SYSTEM, ASK, SAID, AGAIN, THOUGHT, MORE),
    (ASK, MORE, SAID, ASK, MORE),
    (_got(1), ASK),
    (ASK, _got(1), SAID, MORE),
    (ASK, SAID, _got(1), AGAIN, MORE),
    (ASK, _called(1), SAID, MORE),
    (ASK, _called(1), _called(2), _got(1), _got(2)),
    (ASK, _called(1), MORE, _got(1)),
    (ASK, _called(1, 2), _got(1), SAID, MORE),
    (ASK, _called(1), _got(1), _got(1), SAID),
    (Message("user"),),
    (Message("system"), Message("user"), Message("assistant"), MORE),
    (ASK, Message("assistant"), MORE, SAID, ASK),
    (ASK, _called(1), _got(1, ""), Message("assistant"), MORE),
    (ASK, Message("assistant", reasoning="Hm."), MORE),
)


class Outcome(StrEnum):
    EQUAL = "equal"
    FLAGGED = "flagged"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(slots=True)
class Held:
    """A group of a session, as the gateway holds it."""

    messages: MessageGroup
    token_ids: TokenIds
    was_sampled: bool = False
    ends_turn: bool = True
    end: int = 0
    as_printed: bool | None = None
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a session, beside transformers' render."""

    outcome: Outcome
    messages: tuple[Message, ...]
    tools: bool
    sampled: bool
    """Whether earlier answers are the session's own samples, else the agent wrote them."""
    reason: str = ""
    """Why it was refused."""

    def __str__(self) -> str:
        roles = " ".join(_shown(message) for message in self.messages)
        how = "sampled" if self.sampled else "told"
        return f"{self.outcome} {how}{' with tools' if self.tools else ''}: {roles} {self.reason}"


@dataclass(frozen=True, slots=True)
class Model:
    """A template with a tokenizer, in our chat room and in transformers."""

    template: ModelTemplate
    tokenizer: ModelTokenizer
    continuation: Continuation
    reference: "PreTrainedTokenizerFast"
    in_parts: bool = False
    """Whether the template takes content as a list of parts."""
    renders: dict[tuple[object, ...], list[int] | None] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "Model":
        """Loads the files of a model.

        Raises:
            TemplateRefusedError: Its template cannot be continued.
        """
        from transformers import PreTrainedTokenizerFast  # it is large

        template, tokenizer = load_model(folder)
        continuation = Continuation(template, tokenizer)
        reference = PreTrainedTokenizerFast.from_pretrained(folder)
        model = cls(template, tokenizer, continuation, reference)
        asked = model.rendered((ASK,), b"")
        parts = asked is None or ASK.content not in reference.decode(asked)
        return replace(model, in_parts=parts, renders={})

    def rendered(
        self, messages: Sequence[Message], tools_json: bytes, *, prompt: bool = True
    ) -> list[int] | None:
        """Transformers' ids of a conversation. None where the template refuses it."""
        key = (tuple(messages), tools_json, prompt)
        if key not in self.renders:
            self.renders[key] = self._rendered(messages, tools_json, prompt=prompt)
        return self.renders[key]

    def _rendered(
        self, messages: Sequence[Message], tools_json: bytes, *, prompt: bool
    ) -> list[int] | None:
        plain = [families.plain_message(one, in_parts=self.in_parts) for one in messages]
        given: dict[str, Any] = {"tools": json.loads(tools_json)} if tools_json else {}
        try:
            ids = self.reference.apply_chat_template(
                plain,
                chat_template=self.template.source,
                add_generation_prompt=prompt,
                tokenize=True,
                return_dict=False,
                **given,
            )
        except Exception:  # whatever a template raises
            return None
        return [int(id_) for id_ in ids]

    def turns(self, conversations: Sequence[tuple[Message, ...]]) -> Iterator[Turn]:
        """Yields every prompt of conversations, without and with tools."""
        for messages in conversations:
            for tools in (b"", TOOLS):
                yield from self.told(messages, tools)
                yield from self.sampled(messages, tools)

    def told(self, messages: tuple[Message, ...], tools: bytes) -> Iterator[Turn]:
        """Yields the first prompt of a session whose agent brings its history along."""
        yield self._turn([], messages, tools, sampled=False)[0]

    def sampled(self, messages: tuple[Message, ...], tools: bytes) -> Iterator[Turn]:
        """Yields the prompts of a session whose answers were sampled as they are printed."""
        path: list[Held] = []
        groups = group_messages(messages)
        for at, group in enumerate(groups):
            if group[0].role != "assistant" or at == 0:
                continue
            before = tuple(one for each in groups[:at] for one in each)
            turn, opening, fresh = self._turn(path, before, tools, sampled=True)
            if len(before) > 1:
                yield turn
            sample = self._sample(before, group, tools, opening)
            if turn.outcome in {Outcome.REFUSED, Outcome.WRONG} or sample is None:
                return
            path += fresh
            ids = np.concatenate([opening, sample])
            ends = bool(len(sample)) and int(sample[-1]) in self.continuation.closing_ids
            path.append(Held(group, ids, was_sampled=True, ends_turn=ends))
            path[-1].end = sum(len(one.token_ids) for one in path)
        if path and groups[-1][0].role != "assistant":
            yield self._turn(path, messages, tools, sampled=True)[0]

    def _turn(
        self, path: list[Held], messages: tuple[Message, ...], tools: bytes, *, sampled: bool
    ) -> tuple[Turn, TokenIds, list[Held]]:
        continuation, groups = self.continuation, group_messages(messages)
        context = make_context(tools, b"")
        nothing = np.empty(0, np.uint32)

        def turn(outcome: Outcome, reason: str = "") -> Turn:
            return Turn(outcome, messages, bool(tools), sampled, reason)

        try:
            added = continuation.token_ids(groups, len(path), context)
            opening = continuation.generation_prompt(groups, context)
        except TemplateRenderError as error:
            return turn(Outcome.REFUSED, str(error)), nothing, []
        if path and added:
            added[0] = continuation.after(path[-1], added[0])
        elif path:
            opening = continuation.after(path[-1], opening)
        new = [Held(*one) for one in zip(groups[len(path) :], added, strict=True)]
        at, seen = continuation.compare(path, groups[len(path) :], context, [*added, opening], list)
        ids = np.concatenate([*(one.token_ids for one in path), *added, opening]).tolist()
        full = self.rendered(families.given(continuation, messages), tools)
        outcome = Outcome.EQUAL if ids == full else Outcome.WRONG
        if at is not None:
            outcome = Outcome.FLAGGED
        end = path[-1].end if path else 0
        for one in new:
            end = one.end = end + len(one.token_ids)
        if new:
            new[-1].seen = seen
        return turn(outcome, "" if full is not None else "transformers refuses it"), opening, new

    def _sample(
        self, before: tuple[Message, ...], group: MessageGroup, tools: bytes, opening: TokenIds
    ) -> TokenIds | None:
        """Returns an answer's ids as the template prints them behind its own opening."""
        context, groups = make_context(tools, b""), [*group_messages(before), group]
        try:
            printed = self.continuation.token_ids(groups, len(groups) - 1, context)[0]
        except TemplateRenderError:
            return None
        size = min(len(printed), len(opening))
        same = printed[:size] == opening[:size]
        return printed[size if same.all() else int(same.argmin()) :]


def _shown(message: Message) -> str:
    calls = (
        f"({','.join(call.id[-1] for call in message.tool_calls)})" if message.tool_calls else ""
    )
    thought = "*" if message.reasoning else ""
    return f"{message.role}{thought}{calls}{'' if message.content or calls else ' empty'}"
