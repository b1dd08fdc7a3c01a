"""Takes new weights inside vLLM's worker process.

vLLM mixes `WeightReceiver` into its worker (`worker_extension_cls`). Weights go through the model
runner's `reload_weights`, which restores the loaders that post-processing took away: calling
`model.load_weights` on a running CPU model fails after parameters were replaced.
Everything is checked against the checkpoint that the model was started from before a parameter is
touched, because a failure inside vLLM would end the worker.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

_EMBEDDING, _TIED_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONVERTIBLE = {"F32", "F16", "BF16"}


class WeightReceiver:
    """Methods that vLLM's worker gains; called by `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def check_weights(self, source: str) -> str:
        """Returns what is wrong with new weights; empty where they fit the running model."""
        try:
            offered = read_headers(Path(source))
        except (safetensors.SafetensorError, OSError) as error:
            return f"cannot be read: {error}"
        return find_misfit(offered, self._own_headers())

    def load_checked_weights(self, source: str) -> None:
        """Takes weights that `check_weights` found to fit."""
        wanted = self._own_headers().keys()
        tensors = (pair for pair in _tensors(Path(source)) if pair[0] in wanted)
        self.model_runner.reload_weights(weights_iterator=tensors)
        if self.vllm_config.model_config.hf_text_config.tie_word_embeddings:
            _tie_again(self.model_runner.get_model())

    def _own_headers(self) -> "dict[str, Header]":
        return read_headers(Path(self.vllm_config.model_config.model))


def _tie_again(model: Any) -> None:
    """Gives the output layer the new embedding: `reload_weights` leaves a tied one as it was.

    On CPU the layer also holds a packed copy of its weight, made by post-processing.
    """
    head, embedding = model.lm_head, model.model.embed_tokens
    head.weight.data.copy_(embedding.weight.data)
    head.quant_method.process_weights_after_loading(head)


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of one tensor."""

    dtype: str
    """As safetensors writes it, such as `BF16`."""
    shape: tuple[int, ...]


def find_misfit(offered: Mapping[str, Header], wanted: Mapping[str, Header]) -> str:
    """Returns what is wrong with the tensors of a checkpoint; empty where they fit."""
    for name, header in wanted.items():
        if name not in offered:
            return f"{name} is missing"
        if problem := _difference(offered[name], header):
            return f"{name} {problem}"
    # Trainers often send the tied output layer beside the embedding it equals.
    for name in sorted(offered.keys() - wanted.keys()):
        if name != _TIED_HEAD or _EMBEDDING not in wanted:
            return f"{name} is no tensor of the model"
        if problem := _difference(offered[name], wanted[_EMBEDDING]):
            return f"{name} {problem}"
    return ""


def _difference(offered: Header, wanted: Header) -> str:
    if offered.shape != wanted.shape:
        return f"has shape {list(offered.shape)}, the model has {list(wanted.shape)}"
    if offered.dtype == wanted.dtype or {offered.dtype, wanted.dtype} <= _CONVERTIBLE:
        return ""
    return f"has dtype {offered.dtype}, the model has {wanted.dtype}"


def weight_files(source: Path) -> list[Path]:
    """Returns the safetensors files of a directory, or the file itself."""
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def read_headers(source: Path) -> dict[str, Header]:
    """Returns dtype and shape of every tensor by name.

    Raises:
        safetensors.SafetensorError: A file is damaged or cut.
        OSError: A file cannot be read, or there is none.
    """
    files = weight_files(source)
    if not files:
        raise FileNotFoundError(f"{source} has no safetensors files")
    headers: dict[str, Header] = {}
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_slice(name)
                headers[name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))
    return headers


def _tensors(source: Path) -> Iterator[tuple[str, Any]]:
    for path in weight_files(source):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
