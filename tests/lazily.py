"""Large libraries, loaded where a test uses them and not wherever its module is collected."""

import sys
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["anthropic", "genai"]


def _lazily(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = loader = LazyLoader(spec.loader)
    sys.modules[name] = module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if TYPE_CHECKING:
    import anthropic
    import google.genai as genai  # noqa: PLR0402 - pyright takes `google` for stubs alone
else:
    anthropic, genai = _lazily("anthropic"), _lazily("google.genai")
