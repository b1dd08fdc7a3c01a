"""The parameters that an API has and that a page documents."""

import ast
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def fields_of_sdk(module: ModuleType, name: str) -> set[str]:
    """Fields of a request in an SDK: those of its base, and of its two forms."""
    kinds = (f"{name}{kind}" for kind in ("Base", "NonStreaming", "Streaming"))
    return {field for kind in kinds for field in getattr(module, kind).__annotations__}


def fields_of_vllm(path: str, name: str) -> set[str]:
    """Fields of a request class of vLLM, from its source: importing it takes half a minute.

    Args:
        path: Path of the module within the package.
        name: Name of the class.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    (model,) = (
        one
        for one in ast.parse((Path(spec.origin).parent / path).read_text()).body
        if isinstance(one, ast.ClassDef) and one.name == name
    )
    names = {
        one.target.id
        for one in model.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return {field for field in names if not field.startswith("_")}


def documented(page: Path) -> set[str]:
    """Names in the first column of a page's tables."""
    rows: Iterable[str] = re.findall(r"^\| (`[^|]*`) \|", page.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
