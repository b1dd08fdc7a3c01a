"""Renders a model's chat template as its reference implementation (transformers) does.

The environment is the same: sandboxed and immutable, blocks trimmed, loop controls, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, and `{% generation %}` as a plain block.
"""

import json
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollmesh.chat.json_values import escape_surrogates, read_json, replace_surrogates
from rollmesh.chat.messages import Message, RenderContext, write_call, write_message
from rollmesh.chat.rendering import Messages, ModelTemplate, TemplateRenderError
from rollmesh.chat.tokenizer import Tokenizer

_PROBE = "string7zq"
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate(ModelTemplate):
    """One compiled chat template."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        """Compiles a template.

        Raises:
            TemplateRenderError: The source does not compile.
        """
        super().__init__(source)
        self._variables = variables
        self._parts = False
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRenderError(str(error)) from error
        # Whether content is rendered as a string. Multimodal templates expect parts.
        try:
            self._parts = _PROBE not in self.render((Message("user", _PROBE),), RenderContext())
        except TemplateRenderError as error:
            self._parts = "has no attribute" in str(error)

    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. See `ModelTemplate.render`."""
        options = json.loads(context.options_json) if context.options_json else {}
        try:
            moment = datetime.fromtimestamp(context.now or unix_now()).astimezone()
            text = self._template.render(
                messages=list(map(partial(as_template_message, parts=self._parts), messages)),
                tools=json.loads(context.tools_json) if context.tools_json else None,
                add_generation_prompt=generation_prompt,
                **{
                    "documents": None,
                    "strftime_now": moment.strftime,
                    **self._variables,
                    **options,
                },
            )
            return replace_surrogates(text)
        except RecursionError as error:
            raise TemplateRenderError("a value is nested too deeply for the template") from error
        except Exception as error:  # what a template of others makes of a value may raise anything
            raise TemplateRenderError(str(error)) from error


def variables_of(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the special tokens of a tokenizer's config by name, as templates use them."""
    variables = {}
    for name in _SPECIALS:
        value = tokenizer.config.get(name)
        if value is not None:
            variables[name] = value["content"] if isinstance(value, dict) else str(value)
    return variables


def as_template_message(message: Message, *, parts: bool = False) -> dict[str, Any]:
    """Returns a message as templates expect it. Keys without a value are omitted.

    `parts` makes its content a list of one text part. With images it is always a list.
    """
    result = write_message(message)
    if message.images:
        result["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in message.parts
        ]
    elif parts:
        result["content"] = [{"type": "text", "text": message.content}]
    if message.reasoning:
        result["reasoning"] = message.reasoning  # vLLM gives templates both names
    if message.tool_calls:
        result["tool_calls"] = calls = []
        for call in message.tool_calls:
            arguments: Any = call.arguments
            with suppress(ValueError):  # templates call `tojson` themselves. Invalid ones stay text
                arguments = read_json(arguments) if arguments.strip() else {}
            calls.append(write_call(call, arguments))
    return result


class _GenerationBlock(jinja2.ext.Extension):
    """Makes `{% generation %}...{% endgeneration %}` render its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # templates pass these by name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return escape_surrogates(json.dumps(value, ensure_ascii=ensure_ascii, **form))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def unix_now() -> int:
    """Returns the current time, unix seconds."""
    return time.time_ns() // 1_000_000_000
