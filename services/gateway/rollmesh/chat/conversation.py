"""One linear conversation with a model, held as exact token ids."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.chat.canonical import make_context
from rollmesh.chat.images import (
    ImageRefusedError,
    ImageRule,
    Placeholder,
    PlacementError,
    load_reserved_ids,
    load_rule,
    locate,
    read_image,
    reserved_texts,
)
from rollmesh.chat.messages import (
    Image,
    InvalidInputError,
    Message,
    MessageGroup,
    group_messages,
    images_of,
    new_call_id,
    read_messages,
    write_message,
)
from rollmesh.chat.parsing.answer import Answer, decoder_of
from rollmesh.chat.parsing.detection import check_readable, choose
from rollmesh.chat.parsing.formats import UNKNOWN, VLLM, AnswerFormat
from rollmesh.chat.parsing.parser import ParserEvent
from rollmesh.chat.rendering import TemplateRenderError
from rollmesh.chat.templates.continuation import Continuation, Seen
from rollmesh.chat.templates.cutter import TemplateRefusedError
from rollmesh.chat.templates.loading import load_model, unix_now
from rollmesh.chat.templates.special_text import SpecialText
from rollmesh.chat.tokenizer import ModelTokenizer, SpecialTextError, TokenIds

_REFUSALS = (TemplateRenderError, TemplateRefusedError, SpecialTextError)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The conversation format of a model directory. Load it once and share it."""

    tokenizer: ModelTokenizer
    continuation: Continuation
    """Adds messages to a conversation. Its `profile` describes the chat template."""
    format: AnswerFormat
    """How the model writes tool calls and reasoning."""
    image_rule: ImageRule | None = None
    """How its processor represents images. None if it takes none."""
    reserved_ids: tuple[int, ...] = ()
    """Ids that stand for images, video and sound, and for nothing else."""

    @classmethod
    def load(
        cls, path: str | Path, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ChatModel":
        """Loads the tokenizer and the chat template of a model directory and probes the template.

        Args:
            path: The directory. Weights are not needed.
            tool_parser: Format of tool calls, or "auto" to detect it in the chat template.
            reasoning_parser: "think", "none", or "auto" to detect it in the chat template.

        Raises:
            ModelFilesError: A file is missing or cannot be read.
            TemplateRenderError: The chat template does not compile.
            TemplateRefusedError: The chat template cannot be continued exactly.
            InvalidInputError: There is no such parser, or it needs the gateway.
        """
        template, tokenizer = load_model(Path(path))
        format_ = choose(
            template,
            tokenizer,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        if format_.tools.startswith(VLLM):
            if tool_parser != "auto":
                raise InvalidInputError("tool_parser", f"{tool_parser} needs the gateway")
            format_ = replace(
                format_,
                tools=UNKNOWN,
                shown=(),
                why=f"the model's calls are read by {format_.tools}, which needs the gateway",
            )
        rule, reserved = load_rule(Path(path)), load_reserved_ids(Path(path))
        return cls(tokenizer, Continuation(template, tokenizer, rule), format_, rule, reserved)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which sampling must stop. Pass them to the engine."""
        return self.continuation.stop_ids


class Conversation:
    """A conversation that only grows.

    For each turn call `prompt`, then `feed` with the sampled ids as they arrive, then `finish`.
    Invariant: the ids of each prompt begin with all ids of the turns before it, prompt and sampled.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        special_text: str = "parity",
    ) -> None:
        """Begins an empty conversation.

        Args:
            model: The model.
            tools: Tools in their OpenAI form.
            template_options: Extra variables of the chat template.
            special_text: The treatment of text of messages that spells a special token: "parity"
                (it becomes that token, as in `apply_chat_template`), "plain" (it stays text) or
                "refuse" (an error).

        Raises:
            InvalidInputError: There are tools, and the format of their calls is not known.
        """
        self._model = model
        context = make_context(_dump(tools), _dump(template_options))
        if tools:
            check_readable(model.format, context.tools_json)
        self._context = replace(context, now=unix_now())
        reserved = reserved_texts(model.reserved_ids, model.tokenizer)
        self._special_text = SpecialText(model.tokenizer, special_text, reserved)
        self.images: dict[str, bytes] = {}
        """The files of all images, by the SHA-256 of their bytes, hexadecimal."""
        self._held: list[_HeldGroup] = []
        self._turn: _Turn | None = None
        self._answer = Message("assistant")
        self.malformed = False
        """Whether the last answer held something like a tool call that was not a complete one."""

    @property
    def token_ids(self) -> TokenIds:
        """Ids of all finished turns. Uint32 [N]."""
        return _joined(one.token_ids for one in self._held)

    @property
    def answer(self) -> dict[str, Any]:
        """The last finished answer in its OpenAI form. The reasoning is in `reasoning_content`."""
        return write_message(self._answer)

    @property
    def placeholders(self) -> list[Placeholder]:
        """Where the images are in the last prompt, in order."""
        turn, rule = self._turn, self._model.image_rule
        held = [*self._held, *(turn.held if turn is not None else ())]
        if rule is None:
            return []
        ids = _joined(one.token_ids for one in held)
        return locate(ids, images_of(one.messages for one in held), rule)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that must not be sampled, because they stand for images. Pass them to the engine."""
        return self._model.reserved_ids

    def prompt(self, messages: Iterable[Mapping[str, Any]]) -> TokenIds:
        """Begins a turn. Calling it again before `finish` restarts the turn.

        Args:
            messages: The messages after the last answer, in their OpenAI form: tool results or the
                next user message. Images are data URLs.

        Returns:
            Ids of the complete prompt, uint32 [N].

        Raises:
            InvalidInputError: A message has another form, or the template refuses the messages.
        """
        fresh = group_messages(read_messages(messages, self._read_image), begins=not self._held)
        if not fresh:
            raise InvalidInputError(
                "messages", "is empty; give the messages that follow the last answer"
            )
        start, groups = len(self._held), [*(one.messages for one in self._held), *fresh]
        continuation, format_ = self._model.continuation, self._model.format
        try:
            shown, context, _ = self._special_text.apply(groups, start, self._context)
            added = continuation.token_ids(shown, start, context)
            if self._held:
                added[0] = continuation.after(self._held[-1], added[0])
            opening, tag = continuation.generation_prompt(groups, self._context), format_.opening
            inside = bool(tag) and continuation.opens_reasoning(groups, self._context, tag)
        except (*_REFUSALS, PlacementError, ImageRefusedError) as error:
            raise InvalidInputError("messages", f"the chat template: {error}") from error
        held = [_HeldGroup(*one) for one in zip(fresh, added, strict=True)]
        parser = format_.parser(self._context, inside_reasoning=inside)
        answer = Answer(
            decoder_of(self._model.tokenizer, format_.delimiters),
            (),
            parser=parser,
            reasoning=format_.splitter(parser, inside=inside),
            new_call_id=new_call_id,
            one_call=format_.one_call,
        )
        self._turn = _Turn(held, opening, answer, [])
        return _joined((self.token_ids, *added, opening))

    def feed(self, token_ids: Sequence[int]) -> list[ParserEvent]:
        """Takes sampled ids, end tokens included. Returns the newly certain part of the answer."""
        turn = self._begun()
        ids = [int(id_) for id_ in token_ids]
        turn.sampled += ids
        return turn.answer.feed(ids)

    def finish(self) -> list[ParserEvent]:
        """Ends the turn and adds its ids to the conversation. Returns the last events."""
        turn = self._begun()
        events = [*turn.answer.end_text(), *turn.answer.finish()]
        self._answer, self.malformed = turn.answer.message(), turn.answer.malformed
        # Where the template allows one call, the text after it is no part of the answer.
        sampled = np.array(turn.sampled[: turn.answer.stopped_at], np.uint32)
        ended = bool(len(sampled)) and int(sampled[-1]) in self._model.continuation.closing_ids
        ids = np.concatenate([turn.opening, sampled])
        self._held += [
            *turn.held,
            _HeldGroup((self._answer,), ids, was_sampled=True, ends_turn=ended),
        ]
        end = 0
        for one in self._held:
            end = one.end = end + len(one.token_ids)
        self._turn = None
        return events

    def _read_image(self, field: str, part: Mapping[str, Any]) -> Image:
        image, data = read_image(field, part)
        self.images[image.sha256] = data
        return image

    def _begun(self) -> "_Turn":
        if self._turn is None:
            raise RuntimeError("call prompt first")
        return self._turn


@dataclass(slots=True)
class _HeldGroup:
    messages: MessageGroup
    token_ids: TokenIds
    was_sampled: bool = False
    ends_turn: bool = True
    end: int = 0
    as_printed: bool | None = None
    seen: Seen | None = None


@dataclass(slots=True)
class _Turn:
    held: list[_HeldGroup]
    """The groups that the turn's messages add."""
    opening: TokenIds
    """The generation prompt."""
    answer: Answer
    sampled: list[int]


def _joined(parts: Iterable[TokenIds]) -> TokenIds:
    return np.concatenate([np.empty(0, np.uint32), *parts])


def _dump(value: object) -> bytes:
    return json.dumps(value).encode() if value else b""
