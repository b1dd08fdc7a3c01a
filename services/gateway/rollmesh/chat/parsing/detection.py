"""Chooses the parsers of a model: as configured, or as its chat template shows."""

import ast
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rollmesh.chat.canonical import make_context
from rollmesh.chat.messages import InvalidInputError, Message, RenderContext, ToolCall
from rollmesh.chat.parsing.answer import decoder_of
from rollmesh.chat.parsing.formats import (
    CHANNELS,
    FORMATS,
    UNKNOWN,
    VLLM,
    AnswerFormat,
    tool_schemas,
)
from rollmesh.chat.parsing.parser import MOST_NAME
from rollmesh.chat.parsing.reasoning import REASONING_TAGS, ReasoningSplitter
from rollmesh.chat.rendering import ModelTemplate, common_prefix
from rollmesh.chat.tokenizer import ModelTokenizer

# Checks a format by a round trip: the template prints a call, and the format's parser reads it.
#
# The template's source only hints at a format: it may name the delimiters of another one, and what
# the model was trained on is what the template prints.

_NAME, _ARGUMENTS = "look_up", {"query": "string7zq", "count": 4}
_THOUGHT, _SAID = "thought7zq", "answer7zq"
_CALL_IDS = ("call00001", "functions.look_up:0")  # some templates accept one form only
_NOW = 1_700_000_000  # each render prints the same time
_KINDS = {"query": {"type": "string"}, "count": {"type": "integer"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": _KINDS, "required": ["query"]},
    },
}
_WITHOUT_TOOLS = RenderContext(now=_NOW)
_WITH_TOOLS = replace(make_context(json.dumps([_TOOL]).encode(), b""), now=_NOW)
_USER = Message("user", "Hi.")


class Printed:
    """A template's own print of a call and of reasoning."""

    def __init__(self, template: ModelTemplate, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self.call, self.one_call = "", False
        """Text of a call, empty if the template prints none, and whether it refuses two."""
        for id_ in _CALL_IDS:
            call = ToolCall(id_, _NAME, json.dumps(_ARGUMENTS))
            text = _answer_of(template, Message("assistant", "", (call,)), _WITH_TOOLS)
            if _NAME in text:
                both = Message("assistant", "", (call, replace(call, id=f"{id_[:-1]}2")))
                self.call, self.one_call = text, not template.printed((_USER, both), _WITH_TOOLS)
                break
        thinking = Message("assistant", _SAID, reasoning=_THOUGHT)
        thought = _answer_of(template, thinking, _WITHOUT_TOOLS)
        self.thought = thought if thought and _THOUGHT in thought else ""
        """Text of an answer with reasoning. Empty if the template prints no reasoning."""

    def shows_call(self, format_: AnswerFormat) -> bool:
        """Returns whether the format's parser reads the printed call."""
        parser = format_.parser(_WITH_TOOLS)
        if parser is None:
            return False
        parser.feed(self._decoded(self.call, format_))
        parser.finish()
        return [(name, json.loads(given)) for name, given in parser.calls] == [
            (_NAME, _ARGUMENTS)
        ] and not parser.malformed

    def shows_thought(self, format_: AnswerFormat) -> bool:
        """Returns whether the format's tags part the printed reasoning from the answer."""
        text = self._decoded(self.thought, format_)
        opens = text.find(format_.reasoning_tags[0])
        # The generation prompt may have opened it.
        splitter = ReasoningSplitter(inside=opens < 0, tags=format_.reasoning_tags)
        _, rest = splitter.feed(text[max(opens, 0) :])
        splitter.finish()
        return splitter.reasoning == _THOUGHT and _SAID in rest

    def _decoded(self, text: str, format_: AnswerFormat) -> str:
        """Returns a text as an answer of the same tokens is decoded."""
        decoder = decoder_of(self._tokenizer, format_.delimiters)
        ids = self._tokenizer.encode(text).tolist()
        return decoder.feed_all(ids) + decoder.finish()


def _answer_of(template: ModelTemplate, answer: Message, context: RenderContext) -> str:
    """Returns the text of an answer, without the part that the generation prompt prints."""
    whole = template.printed((_USER, answer), context)
    opened = template.printed((_USER,), context, generation_prompt=True)
    at = len(common_prefix(whole, opened))
    begun = max(whole.rfind("<", 0, at), whole.rfind("[", 0, at))
    if begun >= 0 and not set("]>") & set(whole[begun:at]):
        at = begun  # both go on with a tag, each with another
    return whole[at:]


_SAMPLE_CHARS = 160  # of a printed call in an error
_DEEPSEEK = "<\uff5ctool\u2581call\u2581begin\uff5c>"
# The first format whose delimiters are all in the template's source. The order matters where the
# delimiters of one format are part of those of another.
SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>analysis",)),
    ("muse_glimmer", ("<atem:function_calls>",)),
    ("solar_open", ("<|tool_calls|>", "<|tool_call:args|>")),
    ("gemma4", ("<|tool_call>call:",)),
    ("vllm:seed_oss", ("<seed:tool_call>",)),
    ("vllm:minimax_m3", ("]<]minimax[>[",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("vllm:hy_v3", ("<tool_sep", "<arg_key")),
    ("vllm:k2_horizon", ("<ifm|tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("vllm:deepseek_v32", ("\uff5cDSML\uff5cfunction_calls",)),
    ("vllm:deepseek_v4", ("\uff5cDSML\uff5ctool_calls",)),
    ("deepseek_v3", (_DEEPSEEK, "```json")),
    ("deepseek_v31", (_DEEPSEEK,)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_start|>", '"parameters": ')),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ', "<|eot_id|>")),
    ("vllm:apertus", ("<|tools_prefix|>",)),
    ("vllm:cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    ("vllm:cohere_command3", ("<|START_ACTION|>",)),
    ("vllm:dots", ("<dots_function_call>",)),
    ("vllm:functiongemma", ("<start_function_call>",)),
    ("vllm:granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("vllm:inkling", ("<|content_invoke_tool_json|>",)),
    ("vllm:internlm", ("<|action_start|>",)),
    ("vllm:kimi_k3", ("<|open|>tools<|sep|>",)),
    ("vllm:longcat", ("<longcat_tool_call>",)),
    ("vllm:minimax_m2", ("<minimax:tool_call>",)),
    ("vllm:olmo3", ("<function_calls>",)),
    ("vllm:phi4_mini_json", ("<|/tool|>",)),
    ("vllm:plamo3", ("<|plamo:begin_tool_request:plamo|>",)),
    ("vllm:gigachat3", ("<|function_call|>",)),
    ("vllm:gigachat3", ("function call<|role_sep|>",)),
    ("vllm:minicpm5", ("<function name=", "<param name=")),
    ("vllm:step3", ("<\uff5ctool_calls_begin\uff5c>",)),
)


def detect(template_source: str) -> AnswerFormat:
    """Returns the format whose delimiters a template contains.

    Its tools are `UNKNOWN` where the template prints tools and shows no format, and "none" where
    it prints none.
    """
    name = next(_shown_by(template_source), UNKNOWN if "tools" in template_source else "none")
    shown = (
        tags for tags in REASONING_TAGS.values() if all(tag in template_source for tag in tags)
    )
    tags = next(shown, REASONING_TAGS["think"])
    return AnswerFormat(
        name,
        reasoning=tags[0] in template_source and name not in CHANNELS,
        has_args_delimiter="[ARGS]" in template_source,
        reasoning_tags=tags,
    )


def _shown_by(text: str) -> Iterator[str]:
    """Yields the formats whose delimiters are all in a text, the likeliest first."""
    return (name for name, signs in SIGNS if all(sign in text for sign in signs))


def _verified(found: AnswerFormat, source: str, printed: Printed) -> AnswerFormat:
    """Returns the format that reads the template's calls, among those that its text shows.

    Where the template prints no call, nothing is to be checked. A format that only vLLM can parse
    is taken by its delimiters, because vLLM takes seconds to import.
    """
    if printed.thought and not found.in_channels:
        likely = dict.fromkeys((found.reasoning_tags, *REASONING_TAGS.values()))
        tagged = (replace(found, reasoning=True, reasoning_tags=tags) for tags in likely)
        found = next(filter(printed.shows_thought, tagged), found)
    if not printed.call or found.tools == "none":
        return _available(found)
    # What nothing opens is read at the beginning of an answer only: its text must show it.
    opened = (name for name, one in FORMATS.items() if one.opens and not getattr(one, "bare", 0))
    why = ""
    for name in dict.fromkeys((*_shown_by(f"{source}\n{printed.call}"), *opened, *CHANNELS)):
        one = _available(replace(found, tools=name))
        if one.tools == UNKNOWN:
            why = why or one.why
        elif name.startswith(VLLM) or printed.shows_call(one):
            return replace(one, reasoning=one.reasoning and name not in CHANNELS)
    sample = printed.call.strip()[:_SAMPLE_CHARS]
    return replace(
        found,
        tools=UNKNOWN,
        why=why or f"the chat template prints a call as {sample!r}, which no parser reads back",
    )


def _available(format_: AnswerFormat) -> AnswerFormat:
    """Returns a format as it is, or as unknown where it needs a parser that is not installed."""
    if format_.tools == UNKNOWN:
        return replace(format_, why="the chat template shows no known tool-call format")
    if not format_.tools.startswith(VLLM):
        return format_
    if why := vllm_problem(format_.tools.removeprefix(VLLM)):
        why = f"the model's calls are read by {format_.tools}; {why}"
        return replace(format_, tools=UNKNOWN, why=why)
    return format_


def choose(
    template: ModelTemplate,
    tokenizer: ModelTokenizer,
    *,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    shown: tuple[str, ...] = (),
) -> AnswerFormat:
    """Returns how the model writes calls and reasoning: as configured, or as its template shows.

    A detected format is `UNKNOWN`, with the reason, if its parser does not read what the template
    prints, or if only vLLM can parse it and vLLM is not installed. `shown` are special tokens that
    are text for parsers of vLLM's.

    Raises:
        InvalidInputError: There is no such parser, or it cannot be used here.
    """
    found = detect(template.source)
    printed = Printed(template, tokenizer)
    if tool_parser == "auto" or reasoning_parser == "auto":
        found = _verified(found, template.source, printed)
    tools = found.tools if tool_parser == "auto" else tool_parser
    if tools.startswith(VLLM):
        if why := vllm_problem(tools.removeprefix(VLLM)):
            raise InvalidInputError("tool_parser", why)
    elif tools not in {*FORMATS, *CHANNELS, "none"} and not (
        tools == UNKNOWN and tool_parser == "auto"
    ):
        raise InvalidInputError("tool_parser", f"is {tools!r}; give auto or {known_parsers()}")
    if reasoning_parser not in {"auto", "none", "think"}:
        raise InvalidInputError("reasoning_parser", "give auto, none or think")
    reasoning = {"auto": found.reasoning, "think": True, "none": False}[reasoning_parser]
    channels = found.tools if found.tools in CHANNELS and tools == "none" else ""
    return replace(
        found,
        tools=tools,
        reasoning=reasoning and tools not in CHANNELS and not channels,
        shown=shown if tools.startswith(VLLM) else (),
        one_call=printed.one_call and tools in {*FORMATS, *CHANNELS},
        why=found.why if tools == UNKNOWN else "",
        channels=channels,
    )


def check_readable(format_: AnswerFormat, tools_json: bytes) -> None:
    """Checks that calls of tools can be parsed. Called if a request has tools.

    Raises:
        InvalidInputError: The format of tool calls is unknown, or cannot carry a tool's name.
    """
    if format_.tools == UNKNOWN:
        raise InvalidInputError(
            "tools",
            f"{format_.why or 'the format of calls is not known'}, so calls could not be parsed; "
            f"set tool_parser to one of: {known_parsers()}",
        )
    for name in tool_schemas(tools_json):
        if not format_.carries(name):
            raise InvalidInputError(
                "tools",
                f"the model's calls ({format_.tools}) cannot carry the name {name[:80]!r}; give at "
                f"most {MOST_NAME} letters, digits and _ - . : /, and begin with a letter",
            )


def known_parsers() -> str:
    """Returns the values that `tool_parser` may have, for people."""
    known = ", ".join(sorted((*FORMATS, *CHANNELS)))
    names = vllm_names()
    of_vllm = f"vllm: and one of vLLM's ({', '.join(sorted(names))})" if names else "vllm:NAME"
    return f"none (calls stay text), {known}, or {of_vllm}"


# Tool parsers of the installed vLLM, found without importing it.


def vllm_problem(name: str) -> str:
    """Returns why a parser of vLLM's would fail at the first answer. Empty if it would not."""
    if importlib.util.find_spec("vllm") is None:
        return f"vllm:{name} needs the vllm package, which is not installed"
    known = vllm_names()
    lacks = f"vLLM has no parser {name!r}; it has {', '.join(sorted(known))}"
    return lacks if known and name not in known else ""


def vllm_names() -> set[str]:
    """Returns the names of vLLM's parsers, without importing it. Nothing if they are unknown."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return set()
    source = Path(found.origin).parent / "tool_parsers" / "__init__.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return set()
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [key for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    return {key.value for key in keys if isinstance(key.value, str)}
