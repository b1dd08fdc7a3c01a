"""The list of a request's tools, which every protocol bounds alike."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError

_MAX_TOOLS = 2048


def list_tools(tools: Any, field: str = "tools") -> list[Any]:
    """Returns a list of tools; empty if there are none.

    Args:
        tools: The list.
        field: Its name.

    Raises:
        InvalidFieldError: They are not a list, or too many.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidFieldError(field, "must be a list")
    check_number(len(tools), field)
    return tools


def check_number(tools: int, field: str = "tools") -> None:
    """Checks the number of a request's tools.

    Args:
        tools: Their number.
        field: Name of their list.

    Raises:
        InvalidFieldError: They are too many.
    """
    if tools > _MAX_TOOLS:
        raise InvalidFieldError(field, f"has {tools} tools; give at most {_MAX_TOOLS}")
