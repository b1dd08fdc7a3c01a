"""The protocol that a path speaks, for errors of requests that reach no endpoint."""

import re

from rollmesh.sidecar.anthropic_messages.protocol import Messages
from rollmesh.sidecar.openai_chat.protocol import ChatCompletions
from rollmesh.sidecar.turns.protocol import Protocol

_MESSAGES = re.compile(r"(?:https?://[^/]*)?(?:/sessions/[^/?]*)?/v1/messages(?:[/?]|$)")
_ANTHROPIC, _OPENAI = Messages(), ChatCompletions()


def protocol_of(path: str, prefix: str = "") -> Protocol:
    """Returns Messages for its paths, and chat completions for all others.

    Args:
        path: Path of a request, perhaps with its query.
        prefix: What may precede it.
    """
    return _ANTHROPIC if _MESSAGES.match(path.removeprefix(prefix)) else _OPENAI
