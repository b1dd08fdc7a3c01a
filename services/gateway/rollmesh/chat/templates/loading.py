"""The chat template and the tokenizer of a model's directory, as transformers reads them.

A template is rendered as in that reference implementation: in an environment that is sandboxed and
immutable, with blocks trimmed, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and `{% generation %}` as a plain block.
"""

import json
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollmesh.chat.json_values import escape_surrogates, read_json, replace_surrogates
from rollmesh.chat.messages import Message, RenderContext, write_call, write_message
from rollmesh.chat.rendering import AdaptedTemplate, Messages, ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.cutter import ANY_TOOLS
from rollmesh.chat.tokenizer import ModelFilesError, ModelTokenizer, Tokenizer, read_config

_DEFAULT, _TOOL_USE = "default", "tool_use"
_PROBE = "string7zq"
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def load_model(model_path: Path) -> tuple[ModelTemplate, ModelTokenizer]:
    """Returns template and tokenizer of a model's directory.

    A directory with a chat template is read as transformers does. One without, but with
    `tekken.json` or `tokenizer.model.v*`, is left to `mistral_common`, as its makers do.

    Raises:
        ModelFilesError: A file is missing or cannot be read, or the package is not installed.
        TemplateRenderError: The template does not compile.
    """
    path = model_path / "tokenizer_config.json"
    mistral = None
    if not _sources(model_path, read_config(path) if path.exists() else {}):
        # `tekken.json` comes before the files of older models.
        files = [*model_path.glob("tekken*.json"), *sorted(model_path.glob("*.model.v*"))[::-1]]
        mistral = next(iter(files), None)
    if mistral is None:
        tokenizer = Tokenizer(model_path)
        return load_template(model_path, tokenizer), tokenizer
    try:
        from rollmesh.chat.templates.mistral import (  # an extra, for such models only
            MistralTemplate,
            MistralTokenizer,
        )
    except ImportError as error:
        raise ModelFilesError(
            f"{mistral}: is read by mistral_common: pip install 'rollmesh-chat[mistral]'"
        ) from error
    own = MistralTokenizer(mistral)
    return MistralTemplate(own), own


def load_template(model_path: Path, tokenizer: Tokenizer) -> ModelTemplate:
    """Loads a model directory's template, or its pair of templates, as transformers does.

    The template `default` is `chat_template.jinja`, else the one in the tokenizer's config.
    `tool_use` is in `additional_chat_templates`, else in the config's list of templates.

    Raises:
        ModelFilesError: There is no template, or none of that name.
        TemplateRenderError: One does not compile.
    """
    sources = _sources(model_path, tokenizer.config)
    if not sources:
        raise ModelFilesError(
            f"{model_path}: has neither a chat_template.jinja nor a chat template in its config"
        )
    if _DEFAULT not in sources:
        names = ", ".join(sorted(sources))
        raise ModelFilesError(f"{model_path}: has chat templates {names}, and none is {_DEFAULT}")
    variables = variables_of(tokenizer)
    plain = ChatTemplate(sources[_DEFAULT], variables)
    if _TOOL_USE not in sources:
        return plain
    return TemplatePair(plain, ChatTemplate(sources[_TOOL_USE], variables))


def vocabulary_of(model_path: Path) -> int:
    """Returns the number of ids of the model as its `config.json` has it. 0 if it has none."""
    return _size_of(model_path, "vocab_size")


def context_of(model_path: Path) -> int:
    """Returns the longest context of the model, ids, as its `config.json` has it. 0 if it does not.

    Raises:
        ModelFilesError: The file cannot be read.
    """
    return _size_of(model_path, "max_position_embeddings")


def _size_of(model_path: Path, name: str) -> int:
    """Returns a size of the language model. A vision model's config has it in a part of its own."""
    path = model_path / "config.json"
    config = read_config(path) if path.exists() else {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        size = part.get(name)
        if isinstance(size, int) and size > 0:
            return size
    return 0


def _sources(model_path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the templates of a model's directory by name. Files come before the config."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    else:
        named = {_DEFAULT: value}
    sources = {str(name): one for name, one in named.items() if isinstance(one, str) and one}
    folder = model_path / "additional_chat_templates"
    paths = {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    paths[_DEFAULT] = model_path / "chat_template.jinja"
    for name, path in paths.items():
        if path.exists():
            sources[name] = path.read_text(encoding="utf-8")
    return sources


class TemplatePair(ModelTemplate):
    """Two templates, of which a request's tools choose one, as in transformers."""

    def __init__(self, plain: ModelTemplate, tool_use: ModelTemplate) -> None:
        """Takes the templates of requests without tools and with tools."""
        super().__init__(f"{plain.source}\n{tool_use.source}")
        # The second is only rendered with tools: of windows without tools it is given one.
        self.plain = plain
        self.tool_use = AdaptedTemplate(
            tool_use,
            lambda messages, context: (
                messages,
                context if context.tools_json else replace(context, tools_json=ANY_TOOLS),
            ),
        )

    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. See `ModelTemplate.render`."""
        return self.of(context).render(messages, context, generation_prompt=generation_prompt)

    def of(self, context: RenderContext) -> ModelTemplate:
        """Returns the template of a request."""
        return self.tool_use if context.tools_json else self.plain


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
