"""Which tool parsers the installed vLLM has, found without importing it."""

import ast
import importlib.util
from pathlib import Path


def problem(name: str) -> str:
    """Returns why a parser of vLLM's would fail at the first answer. Empty if it would not."""
    if importlib.util.find_spec("vllm") is None:
        return f"vllm:{name} needs the vllm package, which is not installed"
    known = names()
    lacks = f"vLLM has no parser {name!r}; it has {', '.join(sorted(known))}"
    return lacks if known and name not in known else ""


def names() -> set[str]:
    """Returns the names of vLLM's parsers, without importing it. Nothing if they are unknown."""
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
