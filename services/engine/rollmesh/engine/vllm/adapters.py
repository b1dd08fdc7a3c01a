"""Checks the matrices of LoRA adapters against the model, before vLLM's worker reads them.

A failure inside vLLM would come in the middle of a step, and vLLM accepts adapters that it then
applies in part. So shapes, types and values are checked here, while the model samples.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from vllm.lora.peft_helper import PEFTHelper

from rollmesh.engine.backend import Adapter
from rollmesh.engine.checkpoints import read_headers
from rollmesh.runtime.errors import InvalidFieldError, InvalidWeightsError

_PREFIX = "base_model.model."
_A, _B, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
_CONFIG = "header.config_json"
_MATRIX = 2  # dimensions
_BYTES = 4  # of a number, at most
_HEADER_BYTES = 16 * 1024 * 1024


def linear_modules(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of matrices of a checkpoint, by the module. It takes a moment."""
    headers = read_headers(model_path).items()
    return {
        name.removesuffix(_WEIGHT): one.shape for name, one in headers if len(one.shape) == _MATRIX
    }


def modules_of(adapter: Adapter) -> list[str]:
    """Returns the names that an adapter's file gives to modules, as far as it can be read."""
    try:
        with safetensors.safe_open(adapter.file, framework="pt") as file:
            return sorted(set(map(_module_of, file.keys())))
    except (safetensors.SafetensorError, OSError):
        return []


class AdapterChecks:
    """Knows the modules of one model."""

    def __init__(self, modules: Mapping[str, tuple[int, ...]], config: Any) -> None:
        """Takes the shapes of the modules that take adapters, by vLLM's names."""
        self._config = config
        self._modules = modules

    @property
    def most_bytes(self) -> int:
        """Size of the largest file that an adapter may have, bytes."""
        rank: int = self._config.max_lora_rank
        return _HEADER_BYTES + _BYTES * rank * sum(map(sum, self._modules.values()))

    def check(self, adapter: Adapter, names: Mapping[str, str]) -> None:
        """Checks an adapter. Reads all of its file.

        `names` has its modules as vLLM names them, empty if vLLM adapts none there.

        Raises:
            InvalidFieldError: VLLM does not support its config, or a target module is unknown.
            InvalidWeightsError: A tensor does not fit the model.
        """
        try:
            helper = PEFTHelper.from_dict(dict(adapter.config))
            helper.validate_legal(self._config)
        except (ValueError, TypeError) as error:
            raise InvalidFieldError(_CONFIG, str(error)) from error
        targets = adapter.config["target_modules"]
        if isinstance(targets, list):
            taking = itertools.chain(self._modules, (name for name, one in names.items() if one))
            known = set(itertools.chain.from_iterable(map(_ends, taking)))
            if odd := sorted(set(targets) - known):
                raise InvalidFieldError(
                    _CONFIG, f"target_modules: the model has no module {odd[0]!r:.80} to adapt"
                )
            targets = set(targets)
        try:
            with safetensors.safe_open(adapter.file, framework="pt") as file:
                self._check_tensors(file, targets, helper, names)
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidWeightsError("safetensors_chunk", f"cannot be read: {error}") from error

    def _check_tensors(
        self, file: Any, targets: Any, helper: PEFTHelper, modules: Mapping[str, str]
    ) -> None:
        names = set(file.keys())
        if not names:
            raise InvalidWeightsError("safetensors_chunk", "has no tensors")
        for name in sorted(names):
            module = _module_of(name)
            shape = self._modules.get(modules[module])
            if shape is None or name not in {f"{_PREFIX}{module}{one}" for one in (_A, _B)}:
                raise InvalidWeightsError(
                    name,
                    "is no matrix A or B of a module of the model; give what PEFT's "
                    "get_peft_model_state_dict returns, of linear layers",
                )
            if isinstance(targets, set) and targets.isdisjoint(_ends(module)):
                raise InvalidWeightsError(name, "is of no module in target_modules")
            is_a = name.endswith(_A)
            other = f"{_PREFIX}{module}{_B if is_a else _A}"
            if other not in names:
                raise InvalidWeightsError(other, "is missing")
            rank, _ = helper.get_rank_and_scaling(module)
            wanted = [rank, shape[1]] if is_a else [shape[0], rank]
            tensor = file.get_tensor(name)
            if list(tensor.shape) != wanted:
                raise InvalidWeightsError(
                    name, f"has shape {list(tensor.shape)}, the model needs {wanted}"
                )
            if tensor.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
                raise InvalidWeightsError(
                    name, f"has dtype {tensor.dtype}; give float32, float16 or bfloat16"
                )
            if not torch.isfinite(tensor.to(self._config.lora_dtype)).all():
                raise InvalidWeightsError(
                    name, f"has a NaN or an infinite value in {self._config.lora_dtype}"
                )


def _module_of(tensor: str) -> str:
    """Returns the module of a matrix A or B, by its name."""
    return tensor.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)


def _ends(module: str) -> Iterator[str]:
    """Yields the names by which a target of PEFT's config means a module: its ends at a dot."""
    while module:
        yield module
        module = module.partition(".")[2]
