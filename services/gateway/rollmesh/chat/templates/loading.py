"""Loads the conversation files of a model's directory: its template and its tokenizer."""

from pathlib import Path
from typing import Any

from rollmesh.chat.rendering import ModelTemplate
from rollmesh.chat.templates.jinja import ChatTemplate, variables_of
from rollmesh.chat.templates.probing import TemplatePair
from rollmesh.chat.tokenizer import ModelFilesError, ModelTokenizer, Tokenizer, read_json

_DEFAULT, _TOOL_USE = "default", "tool_use"


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
    if not _sources(model_path, read_json(path) if path.exists() else {}):
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
    config = read_json(path) if path.exists() else {}
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
