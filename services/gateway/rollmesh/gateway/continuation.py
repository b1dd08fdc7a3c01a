r"""Exact continuation of a conversation through the model's own chat template.

Past tokens are never tokenised again. What a new message adds is found by rendering it behind a
short fixed window and cutting the window off, so the cost does not grow with the session.

The cut lies right behind the special token that ends a turn (`<|im_end|>` in ChatML). What the
template prints between two turns (`\n` in ChatML, the *closing*) therefore begins the next piece:

    head    <|im_start|>system ... <|im_end|>
    delta   \n<|im_start|>user ... <|im_end|>
    prompt  \n<|im_start|>assistant\n          then the sampled ids, which end with <|im_end|>

This holds for append-only templates only. At load the template is probed over many role orders,
with and without tools: the pieces joined must equal the template's own full render, as text and as
ids. A template that fails is refused with the order that shows it.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollmesh.gateway.canonical import make_frame, unit_key
from rollmesh.gateway.messages import Frame, Message, RoleName, ToolCall, Unit, units_of
from rollmesh.gateway.template import ChatTemplate, TemplateRenderError
from rollmesh.gateway.tokenizer import Tokenizer
from rollmesh.runtime.arrays import TokenIds

_PROBE_TEXT = "Probe 7 zq"
_HEADS_CACHED = 64
_CONTRACTS_CACHED = 16
_CALL = ToolCall("call_probe", "look_up", '{"key": "value", "limit": 2}')
_WINDOWS: dict[RoleName, tuple[Message, ...]] = {
    "system": (Message("user", "a"), Message("system", "b")),
    "user": (Message("user", "a"),),
    "assistant": (Message("user", "a"), Message("assistant", "b")),
    "tool": (
        Message("user", "a"),
        Message("assistant", "", (_CALL,)),
        Message("tool", "b", tool_call_id=_CALL.id),
    ),
}
_PROBE_TOOLS = (
    b'[{"type": "function", "function": {"name": "look_up", "description": "Looks up.",'
    b' "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}}]'
)


class TemplateRefusedError(Exception):
    """The template cannot be continued exactly; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What the probe found out about a template under one set of options."""

    end_text: str
    """The special token that ends every turn."""
    closing: str
    """What stands between the end of a turn and the next one."""
    generation: str
    """The generation prompt, without the closing before it."""
    windows: dict[RoleName, str]
    """Render of each window, its closing cut off."""


class Continuation:
    """Gives the ids that new messages add, for templates that are append-only."""

    name = "append-only"

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        """Probes the template without options.

        Raises:
            TemplateRefusedError: It cannot be continued exactly.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._contracts: dict[bytes, Contract] = {}
        self._heads: OrderedDict[tuple[bytes, bytes], TokenIds] = OrderedDict()
        contract = self._contract(Frame())
        end_id = tokenizer.special_id(contract.end_text)
        if end_id is None:
            raise TemplateRefusedError(f"{contract.end_text!r} ends a turn and is no token")
        self.end_id: int = end_id
        """Id of the token that ends every turn."""

    @property
    def template_sha256(self) -> str:
        """SHA-256 of the template's source, hexadecimal."""
        return self._template.sha256

    def head(self, unit: Unit, frame: Frame) -> TokenIds:
        """Returns the ids of a conversation's first unit, tools included; uint32 [N].

        Raises:
            TemplateRenderError: The template refuses the unit.
            TemplateRefusedError: The frame's options make it rewrite history.
        """
        key = (frame.key, unit_key(unit))
        if key in self._heads:
            self._heads.move_to_end(key)
            return self._heads[key]
        ids = self._tokenizer.encode(self._head_text(unit, frame, self._contract(frame)))
        ids.flags.writeable = False
        self._heads[key] = ids
        if len(self._heads) > _HEADS_CACHED:
            self._heads.popitem(last=False)
        return ids

    def delta(self, previous: RoleName, unit: Unit, frame: Frame) -> TokenIds:
        """Returns the ids that `unit` adds behind a unit of role `previous`; uint32 [N].

        Raises:
            TemplateRenderError: The template refuses the unit.
        """
        text = self._delta_text(previous, unit, frame, self._contract(frame))
        return self._tokenizer.encode(text)

    def generation_prompt(self, frame: Frame) -> TokenIds:
        """Returns the ids between the last unit and what the model samples; uint32 [N]."""
        contract = self._contract(frame)
        return self._tokenizer.encode(contract.closing + contract.generation)

    def _head_text(self, unit: Unit, frame: Frame, contract: Contract) -> str:
        text = self._template.render(unit, frame)
        ending = contract.end_text + contract.closing
        if not text.endswith(ending):
            raise TemplateRenderError(f"a first {unit[0].role} message does not end its turn")
        return text[: len(text) - len(contract.closing)]

    def _delta_text(self, previous: RoleName, unit: Unit, frame: Frame, contract: Contract) -> str:
        options = Frame(options_json=frame.options_json)
        text = self._template.render((*_WINDOWS[previous], *unit), options)
        window = contract.windows[previous]
        if not text.startswith(window) or not text.endswith(contract.end_text + contract.closing):
            raise TemplateRenderError(f"{unit[0].role} after {previous} does not append a turn")
        return text[len(window) : len(text) - len(contract.closing)]

    def _contract(self, frame: Frame) -> Contract:
        found = self._contracts.get(frame.options_json)
        if found is None:
            try:
                found = self._probe(Frame(options_json=frame.options_json))
            except TemplateRenderError as error:
                raise TemplateRefusedError(f"the template fails on a probe: {error}") from error
            if len(self._contracts) >= _CONTRACTS_CACHED:
                self._contracts.pop(next(iter(self._contracts)))
            self._contracts[frame.options_json] = found
        return found

    def _probe(self, options: Frame) -> Contract:
        contract = self._find_contract(options)
        tools = make_frame(_PROBE_TOOLS, options.options_json)
        bare = make_frame(b"", options.options_json)
        for messages in _probe_conversations():
            for frame in (bare, tools):
                self._check(messages, frame, contract)
        return contract

    def _find_contract(self, options: Frame) -> Contract:
        question = (Message("user", _PROBE_TEXT),)
        asked = self._template.render(question, options)
        _, found, ending = asked.rpartition(_PROBE_TEXT)
        if not found:
            raise TemplateRefusedError("the template does not print a user message as it is")
        end_text = self._leading_special(ending)
        if end_text is None:
            raise TemplateRefusedError(f"a user turn ends with {ending!r}, not a special token")
        closing = ending[len(end_text) :]
        prompted = self._template.render(question, options, generation_prompt=True)
        if not prompted.startswith(asked) or prompted == asked:
            raise TemplateRefusedError("the generation prompt is not appended to the conversation")
        generation = prompted[len(asked) :]
        windows: dict[RoleName, str] = {}
        for role, window in _WINDOWS.items():
            text = self._template.render(window, options)
            if not text.endswith(end_text + closing):
                raise TemplateRefusedError(f"a {role} turn does not end with {ending!r}")
            windows[role] = text[: len(text) - len(closing)]
        answered = self._template.render((*question, Message("assistant", "Yes.")), options)
        if answered != f"{asked}{generation}Yes.{end_text}{closing}":
            raise TemplateRefusedError(
                "an answer in the history is not printed as it was sampled behind the generation "
                f"prompt {generation!r}: the template rewrites history"
            )
        return Contract(end_text, closing, generation, windows)

    def _leading_special(self, text: str) -> str | None:
        rust = self._tokenizer.rust
        names = (added.content for added in rust.get_added_tokens_decoder().values())
        fitting = [name for name in names if name and text.startswith(name)]
        return max(fitting, key=len, default=None)

    def _check(self, messages: tuple[Message, ...], frame: Frame, contract: Contract) -> None:
        order = " ".join(message.role for message in messages) + (
            " with tools" if frame.tools_json else ""
        )
        units = units_of(messages)
        try:
            full = self._template.render(messages, frame, generation_prompt=True)
            pieces = [self._head_text(units[0], frame, contract)]
            pieces += [
                self._delta_text(before[0].role, unit, frame, contract)
                for before, unit in itertools.pairwise(units)
            ]
        except TemplateRenderError as error:
            raise TemplateRefusedError(f"{order}: {error}") from error
        pieces.append(contract.closing + contract.generation)
        if "".join(pieces) != full:
            raise TemplateRefusedError(f"{order}: the template rewrites what stood before")
        ids = np.concatenate([self._tokenizer.encode(piece) for piece in pieces])
        if not np.array_equal(ids, self._tokenizer.encode(full)):
            raise TemplateRefusedError(f"{order}: text at the seams tokenises apart")


def _probe_conversations() -> Iterator[tuple[Message, ...]]:
    """Yields conversations of many role orders: what agents send, and what they send rarely."""
    system, user = Message("system", "Be  brief. "), Message("user", " Where?\n")
    answer, empty = Message("assistant", "  Here. \n"), Message("user", "")
    call = Message("assistant", "", (_CALL,))
    says_and_calls = Message("assistant", "Let me see.", (_CALL, _CALL))
    result = Message("tool", '{"found": "caf\u00e9"}', tool_call_id=_CALL.id)
    turns = (
        (user,),
        (user, answer, user),
        (user, answer, empty, answer, user),
        (user, user),
        (user, call, result),
        (user, says_and_calls, result, result),
        (user, call, result, answer, user),
        (user, call, result, user),
        (user, call, result, call, result, answer, user, call, result),
        (user, answer, system, user),
        (user, answer),
    )
    for turn in turns:
        yield turn
        yield (system, *turn)
