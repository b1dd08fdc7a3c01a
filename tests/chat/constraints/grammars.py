"""Grammars of forced answers, compiled by xgrammar over a real tokenizer, and what models write."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from examples.demo.chatml import make_tokenizer
from rollmesh.chat import (
    CONSTRAINED_FORMATS,
    Calls,
    RenderContext,
    Wanted,
    constraint_of,
    make_context,
)
from rollmesh.chat.parsing import CHANNELS, FORMATS, AnswerFormat
from tests.models import CORPUS

SCHEMAS: dict[str, Any] = {
    "add": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "look_up": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "kind": {"enum": ["web", "file"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "exact": {"type": "boolean"},
        },
        "required": ["query", "kind"],
    },
    "stop-now": {"type": "object", "properties": {}},
    "move": {
        "properties": {
            "to": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x", "y"],
            }
        },
        "required": ["to"],
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CONTEXT = make_context(json.dumps(TOOLS).encode(), b"")
MARKS = sorted(
    {mark for form in FORMATS.values() for mark in form.delimiters if len(mark) > 1}
    | {mark for marks in CHANNELS.values() for mark in marks}
    | {"<think>", "</think>"}
)
END = "<|im_end|>"
ARGS = AnswerFormat("mistral", reasoning=False, has_args_delimiter=True)
ALL = [
    *(
        pytest.param(AnswerFormat(name, reasoning=False), id=name)
        for name in sorted(CONSTRAINED_FORMATS)
    ),
    pytest.param(ARGS, id="mistral args"),
]
REQUIRED, ONE = Wanted(Calls.REQUIRED), Wanted(Calls.REQUIRED, one_call=True)


class Compiler:
    """xgrammar over a tokenizer in which the marks are special tokens, or text."""

    def __init__(self, folder: Path, *, special: bool) -> None:
        import xgrammar  # imports torch
        from transformers import PreTrainedTokenizerFast

        tokenizer = make_tokenizer(CORPUS * 50, 400, folder, 2048)
        if special:
            tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
        self._xgrammar = xgrammar
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
        info = xgrammar.TokenizerInfo.from_huggingface(
            self.tokenizer, stop_token_ids=[tokenizer.token_to_id(END)]
        )
        self.stop = tokenizer.token_to_id(END)
        self._compiler = xgrammar.GrammarCompiler(info)
        self._size = info.vocab_size
        texts = self.tokenizer.batch_decode([[id_] for id_ in range(self._size)])
        self._ends = np.array([text[:1] in set('"}]<') for text in texts])
        self._ends[self.stop] = True

    def matcher(self, tag: str) -> Any:
        return self._xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(tag))

    def accepts(self, tag: str, text: str) -> bool:
        """Says whether a whole answer is let through, as the tokenizer writes it."""
        matcher = self.matcher(tag)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return all(matcher.accept_token(id_) for id_ in ids) and matcher.accept_token(self.stop)

    def spells(self, tag: str, text: str) -> bool:
        """Says whether an answer is let through letter by letter, marks too."""
        matcher = self.matcher(tag)
        return bool(matcher.accept_string(text) and matcher.accept_token(self.stop))

    def sample(self, tag: str, seed: int, begin: str = "") -> str | None:
        """Returns a random answer that ends. None where it did not within 2,000 tokens."""
        matcher, chance = self.matcher(tag), random.Random(seed)
        assert not begin or matcher.accept_string(begin)
        mask = self._xgrammar.allocate_token_bitmask(1, self._size)
        ids: list[int] = []
        while len(ids) < 2000:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self._size])
            # Rather what ends something: random text would go on for ever.
            closing = allowed[self._ends[allowed]]
            pool = closing if len(closing) and chance.random() < 0.5 else allowed
            chosen = int(chance.choice(pool))
            if chosen == self.stop:
                return begin + str(self.tokenizer.decode(ids, skip_special_tokens=False))
            assert matcher.accept_token(chosen)
            ids.append(chosen)
        return None


def tag_of(wanted: Wanted, format_: AnswerFormat, *, inside: bool = False) -> str:
    constraint = constraint_of(wanted, format_, CONTEXT, inside_reasoning=inside)
    assert constraint is not None
    return constraint.structural_tag_json


def read(format_: AnswerFormat, text: str, context: RenderContext = CONTEXT) -> Any:
    parser = format_.parser(context)
    assert parser is not None
    for char in text:
        parser.feed(char)
    parser.finish()
    return parser


_DS = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in (
        "calls\u2581begin",
        "call\u2581begin",
        "sep",
        "call\u2581end",
        "calls\u2581end",
    )
]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 4, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 4, "b": 2}}]',
    "mistral args": '[TOOL_CALLS]add[ARGS]{"a": 4, "b": 2}',
    "deepseek_v3": f"{_DS[0]}{_DS[1]}function{_DS[2]}add\n```json\n"
    f'{{"a": 4, "b": 2}}\n```{_DS[3]}{_DS[4]}',
    "deepseek_v31": f'{_DS[0]}{_DS[1]}add{_DS[2]}{{"a": 4, "b": 2}}{_DS[3]}{_DS[4]}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 4, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n4\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>4</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "openai": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 4, "b": 2}',
}
