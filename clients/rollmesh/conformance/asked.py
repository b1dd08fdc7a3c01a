"""The questions of the checks to a model, and its tool, in every protocol."""

from typing import Any

QUESTION = "What is 6 times 7?"
DOUBT = "Are you sure?"
CALCULATE = "Use the calculator: what is 6 times 7?"
ARGUMENTS = '{"a": 6,  "b":7, "note": "caf\\u00e9 "}'
"""Arguments as a model may sample them: two spaces, no space, an escape, a trailing space."""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "enum": [6]},
        "b": {"type": "integer", "enum": [7]},
        "note": {"type": "string", "enum": ["café "]},
    },
    "required": ["a", "b", "note"],
    "additionalProperties": False,
}
"""JSON schema of the tool's arguments: few, so that a forced call ends."""
ANSWER_TOKENS = 48
"""Most tokens of an answer."""
CALL_TOKENS = 192
"""Most tokens of a forced call. A longer one is not seen."""
