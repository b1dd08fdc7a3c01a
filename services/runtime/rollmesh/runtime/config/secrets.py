"""Values that are secrets: they come by file or environment, and nobody prints them."""

import json
import re
from collections.abc import Mapping
from typing import Any

_PASSWORD = re.compile(r"://[^/?#\s@]*:[^/?#\s@]+@|\bpassword\s*=", re.IGNORECASE)
_OF_URL = re.compile(r"(://[^/?#\s@:]*:)\S*@")
_OF_PARAMETER = re.compile(r"(\bpassword\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)
_OF_JSON = re.compile(
    r"""(["'][^"']*(?:token|password|secret|api_key)["']\s*:\s*)(["'])(?:(?!\2).)+\2?""",
    re.IGNORECASE,
)
_SECRET_KEY = re.compile(r"(?:token|password|secret|api_key)$", re.IGNORECASE)
_MASK = "***"


def has_secret(value: object) -> bool:
    """Returns whether a value has a password or a token.

    So do a database's URL or libpq's parameters with a password, and a table, also as JSON, with a
    key such as vLLM's `hf_token`.
    """
    if isinstance(value, str):
        return _PASSWORD.search(value) is not None or has_secret(_table(value))
    if isinstance(value, Mapping):
        return any(_is_secret(key, one) for key, one in value.items())
    return False


def masked(value: Any) -> Any:
    """Returns a value to print: with `***` in place of each password and token."""
    if isinstance(value, str):
        if has_secret(table := _table(value)):
            return json.dumps(masked(table))
        for pattern, mask in (
            (_OF_URL, rf"\g<1>{_MASK}@"),
            (_OF_PARAMETER, rf"\g<1>{_MASK}"),
            (_OF_JSON, rf"\g<1>{_MASK}"),
        ):
            value = pattern.sub(mask, value)
        return value
    if isinstance(value, Mapping):
        return {
            key: _MASK if _is_secret(key, one) and isinstance(one, str) else masked(one)
            for key, one in value.items()
        }
    return value


def _table(text: str) -> object:
    """Returns the table that a text is in JSON; None if it is none."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_secret(key: object, value: object) -> bool:
    if isinstance(value, str) and value and _SECRET_KEY.search(str(key)):
        return True
    return has_secret(value)
