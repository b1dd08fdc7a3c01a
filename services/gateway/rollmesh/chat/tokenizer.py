"""A model's tokenizer, loaded from its directory without transformers."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

TokenIds: TypeAlias = NDArray[np.uint32]
"""Token ids, dtype uint32, shape [N]."""

# Noncharacters of Unicode: the first is put into hidden text, the second follows a first that the
# text itself contains, the others surround special tokens that the template printed. No text spells
# these, because each process draws its own.
_HIDDEN, _LITERAL, _OPEN, _CLOSE = "\ufdd3", "\ufdd4", f"\ufdd5{secrets.token_hex(8)}", "\ufdd6"
_ANY_HIDDEN = re.compile(f"{_HIDDEN}{_LITERAL}?")
_BROKEN = "\ufffd"  # of bytes that are no character
_MOST_HELD = 32  # ids of one character. Those of a model that samples bytes alone never end
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_chars() -> dict[str, int]:
    """Returns the byte that each character of a byte-level token stands for, as in GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }


_BYTES = _byte_chars()


class ModelFilesError(Exception):
    """A file of the model's directory is missing or cannot be used. The message names it."""


class SpecialTextError(Exception):
    """Text spells a special token and cannot be encoded as anything else."""


class TextStream(ABC):
    """Decodes ids one by one. A character that spans several ids is held until complete.

    Invariant: the texts returned so far, joined, are a prefix of the text of all ids.
    """

    def feed(self, token_id: int) -> str:
        """Takes one id. Returns the text that is now certain, often empty."""
        return self.feed_all((token_id,))

    @abstractmethod
    def feed_all(self, token_ids: Sequence[int]) -> str:
        """Takes ids. Returns the text that is now certain."""

    @abstractmethod
    def finish(self) -> str:
        """Returns the rest: bytes that did not become a character, as U+FFFD."""


class ModelTokenizer(ABC):
    """Encodes a template's text and decodes ids. By default no text spells a special token."""

    stop_ids: frozenset[int]
    """Ids at which the model is known to stop."""
    special_ids: frozenset[int]
    special_texts: tuple[str, ...]
    """The special tokens as the template prints them."""
    added_texts: tuple[str, ...]
    """Text that is never merged with its neighbours: a single token wherever it occurs."""

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """Returns the ids of template text without adding any. Dtype uint32, shape [N].

        Raises:
            SpecialTextError: Hidden text cannot be encoded without the special token.
        """

    @abstractmethod
    def special_id(self, text: str) -> int | None:
        """Returns the id of a token that is never split. None if `text` is not such a token."""

    def spells(self, text: str, *, except_for: Sequence[str] = ()) -> bool:
        """Returns whether a text contains the text of a special token that is not an exception."""
        return False

    def hide(self, text: str, *, only: Sequence[str] | None = None) -> str:
        """Returns a text for the template to print. Special tokens in it are encoded as text.

        With `only`, these special tokens alone.
        """
        return text

    def escape(self, text: str) -> str:
        """Returns a text for the template to print. It is encoded unchanged."""
        return text

    def shown(self, text: str) -> str:
        """Returns a special token as people write it."""
        return text

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that an id adds to a text. For a special token, its name."""

    @abstractmethod
    def stream(self, hidden: frozenset[int] = frozenset()) -> TextStream:
        """Returns an incremental decoder. The text lacks `hidden` ids, and has special tokens."""


class Tokenizer(ModelTokenizer):
    """Turns template text into ids and ids into text.

    Text of special tokens becomes those tokens, as in the reference implementation of chat
    templates, so a message that spells `<|im_end|>` ends its turn. Hidden text does not: it
    contains a marker, which the template prints and `encode` removes.
    """

    def __init__(self, model_path: Path) -> None:
        """Loads `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

        Raises:
            ModelFilesError: A file is missing or cannot be read.
        """
        self.config: dict[str, Any] = read_config(model_path / "tokenizer_config.json")
        try:
            self.rust = RustTokenizer.from_file(str(model_path / "tokenizer.json"))
        except Exception as error:
            raise ModelFilesError(f"{model_path / 'tokenizer.json'}: {error}") from error
        self.rust.no_truncation()
        self.rust.no_padding()
        generation = model_path / "generation_config.json"
        eos = read_config(generation).get("eos_token_id", []) if generation.exists() else []
        self.stop_ids: frozenset[int] = frozenset(eos if isinstance(eos, list) else [eos])
        added = self.rust.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            id_ for id_, one in added.items() if one.special
        )
        self._added_ids = {one.content: id_ for id_, one in added.items()}
        self._bytes: dict[int, bytes] = {}
        self._is_byte_level = b'"ByteLevel"' in (
            b"" if self.rust.decoder is None else self.rust.decoder.__getstate__()
        )
        tokens = [one for one in added.values() if one.content]
        self.special_texts = tuple(one.content for one in tokens if one.special)
        self.added_texts = tuple(one.content for one in tokens)
        # A single-character special token could not be hidden. No known model has one.
        self._special = _any_of([text for text in self.special_texts if len(text) > 1])
        self._plain: tuple[RustTokenizer, dict[int, int]] | None = None

    def spells(self, text: str, *, except_for: Sequence[str] = ()) -> bool:
        """Returns whether a text contains the text of a special token that is not an exception."""
        return not set(self._special.findall(text)).issubset(except_for)

    def hide(self, text: str, *, only: Sequence[str] | None = None) -> str:
        """Returns a text for the template to print. Special tokens in it are encoded as text."""
        pattern = self._special if only is None else _any_of(tuple(only))
        text = self.escape(text)
        while pattern.search(text):  # again: the rest may spell a shorter token
            text = pattern.sub(lambda one: f"{one[0][0]}{_HIDDEN}{one[0][1:]}", text)
        return text

    def escape(self, text: str) -> str:
        """Returns a text for the template to print. It is encoded unchanged."""
        return text.replace(_HIDDEN, _HIDDEN + _LITERAL)

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of template text without adding any. Dtype uint32, shape [N]."""
        if _HIDDEN in text:
            return self._encode_hidden(text)
        # The fast variant leaves out offsets, which nobody reads, and takes a quarter of the time.
        (encoding,) = self.rust.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def _encode_hidden(self, text: str) -> TokenIds:
        """Encodes text in which some special tokens are hidden. The others are the template's own.

        A second tokenizer treats special tokens as text. It has one extra token for each of them,
        in place of those that the template printed. Everything else is encoded as by the first.
        """
        if self._plain is None:
            rust = RustTokenizer.from_str(self.rust.to_str())
            rust.encode_special_tokens = True
            added = self.rust.get_added_tokens_decoder().items()
            marked = {
                f"{_OPEN}{one.content}{_CLOSE}": (id_, one)
                for id_, one in added
                if one.special and one.content
            }
            rust.add_tokens(
                [
                    AddedToken(
                        marked_text,
                        single_word=one.single_word,
                        lstrip=one.lstrip,
                        rstrip=one.rstrip,
                        normalized=False,
                    )
                    for marked_text, (_, one) in marked.items()
                ]
            )
            ids = {rust.token_to_id(one): id_ for one, (id_, _) in marked.items()}
            # At once, when it is complete: several threads tokenize.
            self._plain = rust, {new: id_ for new, id_ in ids.items() if new is not None}
        rust, stands_for = self._plain
        text = self._special.sub(lambda one: f"{_OPEN}{one[0]}{_CLOSE}", text)
        text = _ANY_HIDDEN.sub(lambda one: _HIDDEN if one[0].endswith(_LITERAL) else "", text)
        (encoding,) = rust.encode_batch_fast([text], add_special_tokens=False)
        if set(encoding.ids) & set(stands_for.values()):
            raise SpecialTextError(
                "text that spells a special token cannot be encoded as other tokens"
            )
        return np.asarray([stands_for.get(id_, id_) for id_ in encoding.ids], dtype=np.uint32)

    def special_id(self, text: str) -> int | None:
        """Returns the id of a token that is never split. None if `text` is not such a token."""
        return self._added_ids.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that an id adds to a text. For a special token, its name."""
        found = self._bytes.get(token_id)
        if found is not None:
            return found
        token = self.rust.id_to_token(token_id)
        if token is None:  # a model may have more ids than its tokenizer has tokens
            found = b""
        elif token in self._added_ids:
            found = token.encode()
        elif self._is_byte_level:
            found = bytes(_BYTES.get(char, 0) for char in token)
        elif byte := _BYTE_TOKEN.fullmatch(token):
            found = bytes.fromhex(byte[1])
        else:
            # Decoded twice in a row, because some decoders strip the space of the first token.
            alone = str(self.rust.decode([token_id], skip_special_tokens=False))
            twice = str(self.rust.decode([token_id, token_id], skip_special_tokens=False))
            found = twice[len(alone) :].encode()
        self._bytes[token_id] = found
        return found

    def stream(self, hidden: frozenset[int] = frozenset()) -> TextStream:
        """Returns an incremental decoder. The text lacks `hidden` ids, and has special tokens."""
        return _Stream(self.rust, hidden)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern of texts, the longest first. It matches nothing if there are none."""
    longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(longest_first) or "(?!)")


@dataclass(slots=True, eq=False)
class _Stream(TextStream):
    """The library's decoder, with the text that is left at the end."""

    _rust: RustTokenizer
    _hidden: frozenset[int]
    _stream: DecodeStream = field(default_factory=DecodeStream)
    _begun: bool = False
    _pending: list[int] = field(default_factory=list)

    def feed_all(self, token_ids: Sequence[int]) -> str:
        ids = [*filterfalse(self._hidden.__contains__, token_ids)]
        # The first ids may be the complete answer: decoding them at once takes a tenth of the time.
        if ids and not self._begun:
            self._begun, piece = True, self._stream.step(self._rust, ids)
            if piece is not None and _BROKEN not in piece:  # else it depends on how ids come
                return piece
            self._stream = DecodeStream()
        text = ""
        for token_id in ids:
            self._pending.append(token_id)
            try:
                piece = self._stream.step(self._rust, token_id)
            except Exception:  # it would take back a character: a broken one follows it
                piece = self._restart()
            if piece is not None:
                self._pending.clear()
                text += piece
            elif len(self._pending) % _MOST_HELD == 0:
                text += self._pass_on()
        return text

    def _pass_on(self) -> str:
        """Returns the text of held ids that no later one changes, and holds the others."""
        held, decode = self._pending, partial(self._rust.decode, skip_special_tokens=False)
        for size in range(len(held) - 1, len(held) - _MOST_HELD // 4, -1):
            text, rest = str(decode(held[:size])), str(decode(held[size:]))
            if rest.endswith(_BROKEN) and text + rest == decode(held):
                self._pending = held[size:]
                self._restart()
                return text
        return ""

    def _restart(self) -> str | None:
        """Begins anew with the held ids. Returns their text, if it is certain."""
        self._stream = DecodeStream()
        return self._stream.step(self._rust, self._pending)

    def finish(self) -> str:
        return str(self._rust.decode(self._pending, skip_special_tokens=False))


def read_config(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a file.

    Raises:
        ModelFilesError: The file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: is not a JSON object")
    return value
