"""Lets SGLang run on a CPU, beside the packages of `.venv`. Its processes import it at their start.

SGLang imports packages that exist for GPUs only. They get empty modules: on a CPU without AMX,
SGLang computes with torch alone, and never calls them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_EMPTY = {
    "IPython", "cutlass", "gguf", "sgl_kernel", "soundfile", "torchaudio", "torchvision", "triton",
}  # fmt: skip
_ABSENT = {"driver", "runtime"}
"""Without Triton's driver, SGLang takes the CPU."""


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Module(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _ABSENT:
            raise AttributeError(name)
        is_class = name[0].isupper()
        found: Any = _Class(name, (), {"__init__": _init}) if is_class else MagicMock(name=name)
        setattr(self, name, found)
        return found


def _init(self: object, *_: object, **__: object) -> None:
    pass


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = fullname.partition(".")[0] in _EMPTY
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
