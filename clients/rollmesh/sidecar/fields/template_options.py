"""Options that a body passes to the chat template, besides messages and tools."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import string, to_json

# The gateway or transformers passes these to every template.
_TEMPLATE_ARGUMENTS = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "tokenize",
}  # fmt: skip


def read_template_options(
    options: Any, *, effort: Any, effort_field: str, documents: Any = None
) -> str:
    """Returns template options as a JSON object; empty if there are none.

    Args:
        options: The `chat_template_kwargs` of the body; may be None.
        effort: How much the model reasons; may be None.
        effort_field: Name of the parameter that gives it.
        documents: Documents to answer from; may be None.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise InvalidFieldError("chat_template_kwargs", "is not an object")
    if taken := options.keys() & _TEMPLATE_ARGUMENTS:
        raise InvalidFieldError(
            f"chat_template_kwargs.{min(taken)}", "is not an option; leave it out"
        )
    if effort is not None:  # templates use two names for it
        options = {
            "enable_thinking": effort != "none",
            **options,
            "reasoning_effort": string(effort, effort_field),
        }
    if documents is not None:
        options = {**options, "documents": _documents(documents)}
    return to_json(options, "chat_template_kwargs") if options else ""


def _documents(documents: Any) -> list[dict[str, str]]:
    if not isinstance(documents, list):
        raise InvalidFieldError("documents", "must be a list")
    for at, one in enumerate(documents):
        texts = isinstance(one, dict) and all(isinstance(text, str) for text in one.values())
        if not texts:
            raise InvalidFieldError(f"documents[{at}]", "is not an object of strings")
    return documents
