"""Chooses the parsers of a model: as configured, or as its chat template shows."""

from dataclasses import replace

from rollmesh.chat.parsing.formats import CHANNELS, FORMATS, UNKNOWN, VLLM, AnswerFormat
from rollmesh.chat.parsing.reasoning import REASONING_TAGS
from rollmesh.chat.parsing.vllm import installed as vllm_parsers
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import InvalidFieldError

_DEEPSEEK = "<\uff5ctool\u2581call\u2581begin\uff5c>"
# The first format whose delimiters are all in the template's source. The order matters where the
# delimiters of one format are part of those of another.
SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>analysis",)),
    ("muse_glimmer", ("<atem:function_calls>",)),
    ("gemma4", ("<|tool_call>call:",)),
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
    ("vllm:seed_oss", ("<seed:tool_call>",)),
    ("vllm:step3", ("<\uff5ctool_calls_begin\uff5c>",)),
)


def detect(template_source: str) -> AnswerFormat:
    """Returns the format whose delimiters a template contains.

    Its tools are `UNKNOWN` where the template prints tools and shows no format, and "none" where
    it prints none.
    """
    found = (name for name, signs in SIGNS if all(sign in template_source for sign in signs))
    name = next(found, UNKNOWN if "tools" in template_source else "none")
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


def choose(
    template_source: str, *, tool_parser: str, reasoning_parser: str, shown: tuple[str, ...]
) -> AnswerFormat:
    """Returns how the model writes calls and reasoning: as configured, or as its template shows.

    A detected format that only vLLM can parse is `UNKNOWN` if vLLM is not installed.

    Args:
        template_source: What the format is detected in.
        tool_parser: The setting of the gateway.
        reasoning_parser: The setting of the gateway.
        shown: Special tokens that are text for parsers of vLLM's.

    Raises:
        ConfigError: There is no such parser, or it cannot be used here.
    """
    found = detect(template_source)
    tools = found.tools if tool_parser == "auto" else tool_parser
    if tool_parser == "auto" and tools.startswith(VLLM) and not vllm_parsers.installed():
        tools = UNKNOWN
    if tools.startswith(VLLM):
        vllm_parsers.check(tools.removeprefix(VLLM))
    elif tools not in {*FORMATS, *CHANNELS, "none"} and not (
        tools == UNKNOWN and tool_parser == "auto"
    ):
        raise ConfigError(f"tool_parser: is {tools!r}; give auto or {known_parsers()}")
    if reasoning_parser not in {"auto", "none", "think"}:
        raise ConfigError("reasoning_parser: give auto, none or think")
    reasoning = {"auto": found.reasoning, "think": True, "none": False}[reasoning_parser]
    channels = found.tools if found.tools in CHANNELS and tools == "none" else ""
    return replace(
        found,
        tools=tools,
        reasoning=reasoning and tools not in CHANNELS and not channels,
        shown=shown if tools.startswith(VLLM) else (),
        channels=channels,
    )


def check_readable(format_: AnswerFormat) -> None:
    """Checks that tool calls can be parsed; called if a request has tools.

    Raises:
        InvalidFieldError: The format of tool calls is unknown.
    """
    if format_.tools == UNKNOWN:
        raise InvalidFieldError(
            "tools",
            "the model's chat template shows no known tool-call format, so calls could not be "
            f"parsed; set tool_parser to one of: {known_parsers()}",
        )


def known_parsers() -> str:
    """Returns the values that `tool_parser` may have, for people."""
    known = ", ".join(sorted((*FORMATS, *CHANNELS)))
    names = vllm_parsers.names()
    of_vllm = f"vllm: and one of vLLM's ({', '.join(sorted(names))})" if names else "vllm:NAME"
    return f"none (calls stay text), {known}, or {of_vllm}"
