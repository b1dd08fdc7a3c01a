"""Exact continuation of a conversation through the model's own chat template.

May import `messages`, `canonical`, `json_values` and `tokenizer`, and `parsing` for reasoning tags.
"""

from rollmesh.chat.rendering import (
    ModelTemplate as ModelTemplate,
    TemplateRenderError as TemplateRenderError,
)
from rollmesh.chat.templates.continuation import (
    Continuation as Continuation,
    Seen as Seen,
    shown_time as shown_time,
)
from rollmesh.chat.templates.cutter import (
    RefusedOrder as RefusedOrder,
    TemplateRefusedError as TemplateRefusedError,
    readable as readable,
)
from rollmesh.chat.templates.loading import (
    ChatTemplate as ChatTemplate,
    context_of as context_of,
    load_model as load_model,
    load_template as load_template,
    vocabulary_of as vocabulary_of,
)
from rollmesh.chat.templates.probing import (
    MOVING as MOVING,
    REWRITING as REWRITING,
    Finding as Finding,
    Kind as Kind,
    RememberedTemplate as RememberedTemplate,
    SystemRule as SystemRule,
    TemplateProfile as TemplateProfile,
    probe as probe,
)
from rollmesh.chat.templates.special_text import SpecialText as SpecialText
