"""Which tool parsers the installed vLLM has, found without importing it."""

import ast
import importlib.util
from pathlib import Path

from rollmesh.runtime.config import ConfigError


def check(name: str) -> None:
    """Says at start what would fail at the first answer, without importing vLLM.

    Raises:
        ConfigError: vLLM is not installed, or has no parser of this name.
    """
    if not installed():
        raise ConfigError(
            f"tool_parser: vllm:{name} needs the vllm package, which is not installed"
        )
    known = names()
    if known and name not in known:
        raise ConfigError(
            f"tool_parser: vLLM has no parser {name!r}; it has {', '.join(sorted(known))}"
        )


def installed() -> bool:
    """Returns whether the vllm package is there, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def names() -> set[str]:
    """Returns the names of vLLM's parsers, without importing it; nothing if they are unknown."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return set()
    source = Path(found.origin).parent / "tool_parsers" / "__init__.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return set()
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [key for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    return {key.value for key in keys if isinstance(key.value, str)}
