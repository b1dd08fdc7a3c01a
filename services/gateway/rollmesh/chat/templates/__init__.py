"""Exact continuation of a conversation through the model's own chat template.

May import `messages`, `canonical`, `json_values` and `tokenizer`, and `parsing` for reasoning tags.
"""

from rollmesh.chat.rendering import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.continuation import Continuation, Seen, shown_time
from rollmesh.chat.templates.jinja import ChatTemplate
from rollmesh.chat.templates.loading import (
    context_of,
    load_model,
    load_template,
    vocabulary_of,
)
from rollmesh.chat.templates.probing import RememberedTemplate, SystemRule, probe
from rollmesh.chat.templates.profile import (
    MOVING,
    REWRITING,
    Finding,
    Kind,
    TemplateProfile,
)
from rollmesh.chat.templates.special_text import SpecialText
from rollmesh.chat.templates.windows import RefusedOrder, TemplateRefusedError, readable

__all__ = [
    "MOVING",
    "REWRITING",
    "ChatTemplate",
    "Continuation",
    "Finding",
    "Kind",
    "ModelTemplate",
    "RefusedOrder",
    "RememberedTemplate",
    "Seen",
    "SpecialText",
    "SystemRule",
    "TemplateProfile",
    "TemplateRefusedError",
    "TemplateRenderError",
    "context_of",
    "load_model",
    "load_template",
    "probe",
    "readable",
    "shown_time",
    "vocabulary_of",
]
