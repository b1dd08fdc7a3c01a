"""Structured output: tool calls, a JSON value, or either, as a structural tag.

xgrammar compiles structural tags. This module writes the calls of each format in `formats.FORMATS`
as the chat template prints them; xgrammar has its own builders, but for other formats, and
importing it imports torch. Reasoning is not constrained: the constraint begins after it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from rollmesh.chat.json_values import write_json
from rollmesh.chat.messages import InvalidInputError, RenderContext
from rollmesh.chat.parsing import channels, gemma_calls, json_calls as object_formats
from rollmesh.chat.parsing.formats import (
    CHANNELS,
    FORMATS,
    GEMMA,
    HARMONY,
    MUSE,
    SOLAR,
    AnswerFormat,
    named_functions,
    tool_schemas,
)
from rollmesh.chat.parsing.parser import Schemas
from rollmesh.chat.tokenizer import ModelTokenizer

_MOST_WHITESPACE = 32  # characters in a row. Without a limit some models never stop writing them
_NAME = re.compile(r"[\w.:/-]+", re.ASCII)  # names that every format can carry
# By format: the text that begins the reasoning, the text that ends it, and the text after it.
_CHANNELED = {
    HARMONY: ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
    GEMMA: (f"{gemma_calls.THOUGHT}\n", "<channel|>", ""),
    MUSE: (" to=self<|message|>", "<|eom|>", "<|start|>assistant"),
    SOLAR: ("<|think|>", "<|end|>", "<|begin|>assistant"),
}
_SAID = {
    HARMONY: "<|channel|>final<|message|>",
    GEMMA: "",
    MUSE: " to=user<|message|>",
    SOLAR: "<|content|>",
}
"""Text before the answer's own text, by format."""
_Format = dict[str, Any]


class Calls(Enum):
    """Whether an answer may, must, or must not call tools."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()
    NAMED = auto()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The form that a request asks of its answer."""

    calls: Calls = Calls.AUTO
    tool_name: str = ""
    """The tool to call, with NAMED."""
    one_call: bool = False
    """Whether a second call is forbidden."""
    json_schema: bytes | None = None
    """Schema of the answer's text. None if the text is free."""
    strict: bool = False
    """Whether a schema is refused if a part of it cannot be enforced."""


class Constraint(NamedTuple):
    """The constraint of an answer."""

    structural_tag_json: str
    """The structural tag."""
    strict: bool
    """Whether it must be refused if a part of a schema cannot be enforced."""


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How one format writes calls. NAME is replaced by the tool's name."""

    begin: str
    end: str
    between: str = ""
    """Text between two calls."""
    around: tuple[str, str] = ("", "")
    id: tuple[str, str] = ("", "")
    """After `begin`: a pattern of the call's id, and the text that follows it."""
    style: str = "json"
    """How arguments are written."""
    excluded: tuple[str, ...] = ()
    """Text that no string may contain, because parsers would not read it as part of the string."""
    many: bool = True
    """Whether an answer may contain several calls."""


_DEEPSEEK = object_formats.DEEPSEEK_V3
_SYNTAXES: dict[str, _Syntax] = {
    "hermes": _Syntax(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    "llama3_json": _Syntax('{"name": "NAME", "parameters": ', "}", between="; "),
    "mistral": _Syntax(
        '{"name": "NAME", "arguments": ', "}", between=", ", around=("[TOOL_CALLS] [", "]")
    ),
    "mistral_args": _Syntax("[TOOL_CALLS]NAME[ARGS]", ""),
    "deepseek_v3": _Syntax(
        f"{_DEEPSEEK.open}function{_DEEPSEEK.inside[0]}NAME\n```json\n",
        f"\n```{_DEEPSEEK.close}",
        between="\n",
        around=(_DEEPSEEK.around[0], _DEEPSEEK.around[1]),
    ),
    "deepseek_v31": _Syntax(
        f"{_DEEPSEEK.open}NAME{_DEEPSEEK.inside[0]}",
        _DEEPSEEK.close,
        around=(_DEEPSEEK.around[0], _DEEPSEEK.around[1]),
    ),
    "kimi_k2": _Syntax(
        "<|tool_call_begin|>functions.NAME:",
        "<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        id=(r"\d{1,4}", "<|tool_call_argument_begin|>"),
    ),
    "qwen3_coder": _Syntax(
        "<tool_call>\n<function=NAME>\n",
        "\n</function>\n</tool_call>",
        between="\n",
        style="qwen_xml",
        excluded=("<parameter=", "</parameter>"),
    ),
    "glm45": _Syntax(
        "<tool_call>NAME\n",
        "\n</tool_call>",
        between="\n",
        style="glm_xml",
        excluded=("<arg_value>", "</arg_value>"),
    ),
    # The end token `<|call|>` is not part of the constraint: it comes after its end.
    HARMONY: _Syntax(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "",
        excluded=channels.HARMONY_TOKENS,
        many=False,
    ),
}
CONSTRAINED_FORMATS = frozenset(_SYNTAXES) - {"mistral_args"}
"""Formats whose calls can be constrained."""


def constraint_of(
    wanted: Wanted, format_: AnswerFormat, context: RenderContext, *, inside_reasoning: bool
) -> Constraint | None:
    """Returns the constraint of an answer. None if the answer is free.

    Raises:
        InvalidInputError: The model's format or the name of a tool does not allow the constraint.
    """
    forms: list[_Format] = []
    strict = wanted.strict
    tools, channels_ = format_.tools, format_.in_channels
    schemas = tool_schemas(context.tools_json) if context.tools_json else {}
    callable_ = bool(schemas) and wanted.calls is not Calls.NONE
    required = wanted.calls in {Calls.REQUIRED, Calls.NAMED}
    if callable_ and wanted.one_call and tools not in {*_SYNTAXES, "none"}:
        raise InvalidInputError("parallel_tool_calls", _not_served(format_))
    if required or (callable_ and wanted.json_schema is not None):
        if not schemas:
            raise InvalidInputError(
                "tools_json", "has no function with a name, so no call can be required; send one"
            )
        if wanted.calls is Calls.NAMED:
            schemas = {wanted.tool_name: schemas[wanted.tool_name]}
        for name in schemas:
            if not _NAME.fullmatch(name):
                raise InvalidInputError(
                    "tools_json",
                    f"{name!r} cannot be required; name it with letters, digits and _ - . : / only",
                )
        functions = named_functions(context.tools_json)
        strict |= any(one.get("strict") is True for name, one in functions if name in schemas)
        has_args = tools == "mistral" and format_.has_args_delimiter
        syntax = _SYNTAXES.get("mistral_args" if has_args else tools)
        if syntax is None:
            raise InvalidInputError("tool_choice", _not_served(format_))
        one_call = wanted.one_call or format_.one_call or wanted.calls is Calls.NAMED
        forms.append(_calls(syntax, schemas, one=one_call or not syntax.many))
    if wanted.json_schema is not None and not required:
        value = json.loads(wanted.json_schema) if wanted.json_schema else {"type": "object"}
        if channels_:
            forms.append(_sequence(_text(_SAID[channels_]), _schema(value, CHANNELS[channels_])))
        else:
            calls = FORMATS.get(tools) if callable_ else None
            forms.append(_schema(value, () if calls is None else calls.opens))
    if not forms:
        return None
    # The part before the answer is free text up to the delimiter that ends the reasoning.
    thought: _Format | None = None
    if channels_:
        begin, end, after = _CHANNELED[channels_]
        others = [delimiter for delimiter in CHANNELS[channels_] if delimiter != end]
        thought = _sequence(_free("" if inside_reasoning else begin, end, others), _text(after))
    elif format_.reasoning:
        begin, end = format_.reasoning_tags
        free = _free("" if inside_reasoning else begin, end)
        thought = _sequence(free, {"type": "regex", "pattern": "\n*"})
    if thought is not None and not inside_reasoning:
        thought = {"type": "optional", "content": thought}
    answer = _sequence(*([] if thought is None else [thought]), _one_of(forms))
    return Constraint(write_json({"type": "structural_tag", "format": answer}), strict)


def _not_served(format_: AnswerFormat) -> str:
    known = ", ".join(sorted(CONSTRAINED_FORMATS))
    return f"is not supported with tool_parser {format_.tools}; use one of: {known}"


def _calls(syntax: _Syntax, schemas: Schemas, *, one: bool) -> _Format:
    calls: list[_Format] = []
    pattern, after = syntax.id
    id_ = [{"type": "regex", "pattern": pattern}, _text(after)] if pattern else []
    for name, schema in schemas.items():
        begin = _text(syntax.begin.replace("NAME", name))
        arguments = _schema({**schema, "type": "object"}, syntax.excluded)
        calls.append(_sequence(begin, *id_, arguments | {"style": syntax.style}, _text(syntax.end)))
    call, (before, behind) = _one_of(calls), syntax.around
    more = {"type": "star", "content": _sequence(_text(syntax.between), call)}
    return _sequence(_text(before), call, *([] if one else [more]), _text(behind))


def _free(begin: str, end: str, excluded: Iterable[str] = ()) -> _Format:
    text = {"type": "any_text", "excludes": list(excluded)}
    return {"type": "tag", "begin": begin, "content": text, "end": end}


def _schema(schema: Any, excluded: tuple[str, ...]) -> _Format:
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE}
    return form | {"excludes": list(excluded)} if excluded else form


def _text(value: str) -> _Format:
    return {"type": "const_string", "value": value}


def _sequence(*parts: _Format) -> _Format:
    kept = [part for part in parts if part != _text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def _one_of(forms: list[_Format]) -> _Format:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}


# Masked tokens: `bad_words` as vLLM reads them.


def bad_sequences(words: Iterable[str], tokenizer: ModelTokenizer) -> list[list[int]]:
    """Returns the ids of each word at the beginning of a text and after a space.

    The second form is returned if it has as many tokens and another first token, as in vLLM's
    `SamplingParams.update_from_tokenizer`.

    Raises:
        InvalidInputError: A word has no tokens.
    """
    sequences: list[list[int]] = []
    for at, word in enumerate(words):
        plain: list[int] = tokenizer.encode(word.lstrip()).tolist()
        if not plain:
            raise InvalidInputError(f"bad_words[{at}]", "encodes to no tokens; leave it out")
        sequences.append(plain)
        after: list[int] = tokenizer.encode(f" {word.lstrip()}").tolist()
        if len(after) == len(plain) and after[0] != plain[0]:
            sequences.append(after)
    return sequences
