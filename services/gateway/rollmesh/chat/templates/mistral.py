r"""Models without a chat template: `mistral_common` encodes their conversations.

That package builds ids, not text: each message is tokenized separately and placed between control
tokens, which no text can spell. So that such conversations can be continued like any other, they
are written as text in which two Unicode noncharacters enclose each control token:

    <NC0>[INST]<NC1>Where?<NC0>[/INST]<NC1>

`<NC0><NC1>` parts texts that are tokenized apart without a control token between them. The
tokenizer reads this form back. For ids and text in between, it is `mistral_common`'s own.
"""

import codecs
import copy
import json
import re
from collections.abc import Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.normalize import get_normalizer
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Reference
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from rollmesh.chat.json_values import replace_surrogates
from rollmesh.chat.messages import Message, RenderContext, write_message
from rollmesh.chat.rendering import Messages, ModelTemplate, TemplateRenderError
from rollmesh.chat.tokenizer import ModelFilesError, ModelTokenizer, TextStream, TokenIds

_OPEN, _CLOSE, _LITERAL = "\ufdd0", "\ufdd1", "\ufdd2"
_SEAM = _OPEN + _CLOSE
_CONTROL = re.compile(f"{_OPEN}([^{_OPEN}-{_LITERAL}]*){_CLOSE}")
_TEXT_IDS = 1 << 32
"""Ids from here on represent texts that have not been tokenized yet."""
_REFUSALS = (
    MistralCommonException,
    AssertionError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class MistralTokenizer(ModelTokenizer):
    """A tokenizer of `mistral_common`. No text spells one of its control tokens."""

    def __init__(self, path: Path) -> None:
        """Loads `tekken.json` or a SentencePiece model.

        Raises:
            ModelFilesError: The file cannot be read, or is of an unknown version.
        """
        try:
            self.reference: Any = Reference.from_file(path, mode=ValidationMode.agnostic)
        except Exception as error:
            raise ModelFilesError(f"{path}: {error}") from error
        self._text: Any = self.reference.instruct_tokenizer.tokenizer
        self._is_tekken = isinstance(self._text, Tekkenizer)
        self.special_ids = frozenset(int(id_) for id_ in self._text.special_ids)
        self._names = {id_: self._text.id_to_piece(id_) for id_ in sorted(self.special_ids)}
        self._ids = {name: id_ for id_, name in self._names.items()}
        self.control_names = tuple(self._ids)
        self.stop_ids = frozenset({int(self._text.eos_id)})
        self.special_texts = tuple(f"{_OPEN}{name}{_CLOSE}" for name in self._ids)
        self.added_texts = (*self.special_texts, _SEAM)

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of a text in this module's form. Dtype uint32, shape [N]."""
        ids: list[int] = []
        at = 0
        for control in _CONTROL.finditer(text):
            ids += self._encode_plain(text[at : control.start()])
            if control[1]:
                ids.append(self._ids[control[1]])
            at = control.end()
        return np.asarray(ids + self._encode_plain(text[at:]), dtype=np.uint32)

    def special_id(self, text: str) -> int | None:
        """Returns the id of a control token, as this module or as its makers write it."""
        return self._ids.get(text.removeprefix(_OPEN).removesuffix(_CLOSE))

    def shown(self, text: str) -> str:
        """Returns a control token as its makers write it."""
        return text.removeprefix(_OPEN).removesuffix(_CLOSE)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that an id adds to a text. A control token's are its name's."""
        return self.stream().bytes_of(token_id)

    def stream(self, hidden: frozenset[int] = frozenset()) -> "_Stream":
        """Returns what turns ids into text one by one, without `hidden` ids."""
        return _Stream(self._text, self._names, hidden, is_tekken=self._is_tekken)

    def _encode_plain(self, text: str) -> list[int]:
        plain = text.replace(_OPEN + _LITERAL, _OPEN)
        ids: list[int] = self._text.encode(plain, bos=False, eos=False)
        return ids


class MistralTemplate(ModelTemplate):
    """How `mistral_common` encodes a conversation, in this module's form of text."""

    def __init__(self, tokenizer: MistralTokenizer) -> None:
        """Takes validator, normaliser and encoder that belong to the tokenizer's version."""
        reference = tokenizer.reference
        self._instruct = reference.instruct_tokenizer
        version, settings = reference.version, self._instruct.tokenizer.model_settings_builder
        self._normalizer = get_normalizer(version, settings)
        self._thinks = getattr(self._instruct, "BEGIN_THINK", None) is not None
        self._any_end = get_validator(version, mode=ValidationMode.agnostic)
        self._before_answer = get_validator(version, mode=ValidationMode.test)
        # Version and control tokens decide how answers are written.
        super().__init__(f"mistral_common {version.value} {' '.join(tokenizer.control_names)}")

    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. See `ModelTemplate.render`."""
        if context.options_json:
            raise TemplateRenderError(
                "the model has no chat template, so template options cannot be used"
            )
        validator = self._before_answer if generation_prompt else self._any_end
        tools = json.loads(context.tools_json) if context.tools_json else None
        recorder = _Recorder(self._instruct.tokenizer)
        instruct = copy.copy(self._instruct)
        instruct.tokenizer = recorder
        try:
            request: Any = ChatCompletionRequest.from_openai(
                [_as_openai(one, thinks=self._thinks) for one in messages], tools
            )
            normal = self._normalizer.from_chat_completion_request(
                validator.validate_request(request)
            )
            ids = instruct.encode_instruct(normal).tokens
        except _REFUSALS as error:
            raise TemplateRenderError(str(error)) from error
        return replace_surrogates(recorder.written(ids))


class _Recorder:
    """Stands in for a tokenizer: remembers the texts instead of tokenizing them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, bos: bool, eos: bool) -> list[int]:
        assert not bos
        assert not eos
        if not text:
            return []
        self._texts.append(text)
        return [_TEXT_IDS + len(self._texts) - 1]

    def decode(self, *_: object, **__: object) -> str:
        """Returns nothing: the caller wants ids and makes text of them that nobody reads."""
        return ""

    def written(self, ids: list[int]) -> str:
        """Returns the text of an encoded conversation."""
        parts: list[str] = []
        for id_, following in zip(ids, [*ids[1:], _TEXT_IDS], strict=True):
            if id_ < _TEXT_IDS:
                parts.append(f"{_OPEN}{self._tokenizer.id_to_piece(id_)}{_CLOSE}")
                continue
            parts.append(self._texts[id_ - _TEXT_IDS].replace(_OPEN, _OPEN + _LITERAL))
            if following >= _TEXT_IDS:
                parts.append(_SEAM)
        return "".join(parts)


class _Stream(TextStream):
    def __init__(
        self, tokenizer: Any, names: dict[int, str], hidden: frozenset[int], *, is_tekken: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._hidden = hidden
        self._is_tekken = is_tekken
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = is_tekken

    def feed_all(self, token_ids: Sequence[int]) -> str:
        ids = filterfalse(self._hidden.__contains__, token_ids)
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes that an id adds within a text."""
        name = self._names.get(token_id)
        if name is not None:
            return name.encode()
        if self._is_tekken:
            return bytes(self._tokenizer.id_to_byte_piece(token_id, SpecialTokenPolicy.KEEP))
        text = str(self._tokenizer.id_to_piece(token_id))
        if byte := _BYTE.fullmatch(text):
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()

    def _bytes(self, token_id: int) -> bytes:
        text = self.bytes_of(token_id)
        if self._begun or token_id in self._names:
            return text
        self._begun = True
        # SentencePiece puts a space in front of every text, and takes it away again.
        is_byte = _BYTE.fullmatch(str(self._tokenizer.id_to_piece(token_id)))
        return text if is_byte else text.removeprefix(b" ")


def _as_openai(message: Message, *, thinks: bool) -> dict[str, Any]:
    result = write_message(message)
    if not thinks:
        result.pop("reasoning_content", None)
    if message.role == "tool":
        result["tool_call_id"] = message.tool_call_id
    else:
        result.pop("name", None)
        result.pop("tool_call_id", None)
    return result
