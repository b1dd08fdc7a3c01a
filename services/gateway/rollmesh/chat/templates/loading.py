"""Loads what a model's directory says about conversations: its template and its tokenizer."""

from pathlib import Path

from rollmesh.chat.templates.jinja import ModelTemplate, load_template
from rollmesh.chat.tokenizer import ModelFilesError, ModelTokenizer, Tokenizer, read_json


def load_model(model_path: Path) -> tuple[ModelTemplate, ModelTokenizer]:
    """Returns template and tokenizer of a model's directory.

    A directory with a chat template is read as transformers does. One without, but with
    `tekken.json` or `tokenizer.model.v*`, is left to `mistral_common`, as its makers do.

    Raises:
        ModelFilesError: A file is missing or cannot be read, or the package is not installed.
        TemplateRenderError: The template does not compile.
    """
    mistral = None if _has_template(model_path) else _mistral_file(model_path)
    if mistral is None:
        tokenizer = Tokenizer(model_path)
        return load_template(model_path, tokenizer), tokenizer
    try:
        from rollmesh.chat.templates.mistral import (  # noqa: PLC0415 - an extra, for such models only
            MistralTemplate,
            MistralTokenizer,
        )
    except ImportError as error:
        raise ModelFilesError(
            f"{mistral}: is read by mistral_common: pip install 'rollmesh[gateway-mistral]'"
        ) from error
    own = MistralTokenizer(mistral)
    return MistralTemplate(own), own


def vocabulary_of(model_path: Path) -> int:
    """Returns the number of ids of the model as its `config.json` has it; 0 if it has none."""
    return _size_of(model_path, "vocab_size")


def context_of(model_path: Path) -> int:
    """Returns the longest context of the model, ids, as its `config.json` has it; 0 if it does not.

    Raises:
        ModelFilesError: The file cannot be read.
    """
    return _size_of(model_path, "max_position_embeddings")


def _size_of(model_path: Path, name: str) -> int:
    """Returns a size of the language model; a vision model's config has it in a part of its own."""
    path = model_path / "config.json"
    config = read_json(path) if path.exists() else {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        size = part.get(name)
        if isinstance(size, int) and size > 0:
            return size
    return 0


def _has_template(model_path: Path) -> bool:
    if (model_path / "chat_template.jinja").exists():
        return True
    config = model_path / "tokenizer_config.json"
    return config.exists() and bool(read_json(config).get("chat_template"))


def _mistral_file(model_path: Path) -> Path | None:
    """Returns the file that `mistral_common` reads: `tekken.json` before an older model's."""
    found = [*model_path.glob("tekken*.json"), *sorted(model_path.glob("*.model.v*"))[::-1]]
    return next(iter(found), None)
