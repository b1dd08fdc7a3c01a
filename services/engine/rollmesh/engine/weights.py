"""Takes new weights inside vLLM's worker process.

vLLM mixes `WeightReceiver` into its worker (`worker_extension_cls`). Weights go through the model
runner's `reload_weights`, which restores the loaders that post-processing took away: calling
`model.load_weights` on a running CPU model fails after parameters were replaced.
Everything is checked against the checkpoint that the model was started from before a parameter is
touched, because a failure inside vLLM would end the worker.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors


class WeightReceiver:
    """Methods that vLLM's worker gains; called by `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def check_weights(self, source: str) -> str:
        """Returns what is wrong with new weights; empty where they fit the running model."""
        try:
            offered = read_shapes(Path(source))
        except (safetensors.SafetensorError, OSError) as error:
            return f"cannot be read: {error}"
        wanted = read_shapes(Path(self.vllm_config.model_config.model))
        return find_misfit(offered, wanted)

    def load_checked_weights(self, source: str) -> None:
        """Takes weights that `check_weights` found to fit."""
        self.model_runner.reload_weights(weights_iterator=_tensors(Path(source)))
        if self.vllm_config.model_config.hf_text_config.tie_word_embeddings:
            _tie_again(self.model_runner.get_model())


def _tie_again(model: Any) -> None:
    """Gives the output layer the new embedding: `reload_weights` leaves a tied one as it was.

    On CPU the layer also holds a packed copy of its weight, made by post-processing.
    """
    head, embedding = model.lm_head, model.model.embed_tokens
    head.weight.data.copy_(embedding.weight.data)
    head.quant_method.process_weights_after_loading(head)


def find_misfit(offered: dict[str, list[int]], wanted: dict[str, list[int]]) -> str:
    """Returns what is wrong with the names and shapes of a checkpoint; empty where they fit."""
    for name, shape in wanted.items():
        if name not in offered:
            return f"{name} is missing"
        if offered[name] != shape:
            return f"{name} has shape {offered[name]}, the model has {shape}"
    # Trainers often send the tied output layer beside the embedding it equals.
    extra = offered.keys() - wanted.keys() - {"lm_head.weight"}
    return f"{min(extra)} is no tensor of the model" if extra else ""


def weight_files(source: Path) -> list[Path]:
    """Returns the safetensors files of a directory, or the file itself."""
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def read_shapes(source: Path) -> dict[str, list[int]]:
    """Returns the shape of every tensor by name.

    Raises:
        safetensors.SafetensorError: A file is damaged or cut.
        OSError: A file cannot be read, or there is none.
    """
    files = weight_files(source)
    if not files:
        raise FileNotFoundError(f"{source} has no safetensors files")
    shapes: dict[str, list[int]] = {}
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = list(file.get_slice(name).get_shape())
    return shapes


def _tensors(source: Path) -> Iterator[tuple[str, Any]]:
    for path in weight_files(source):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
