"""Prepares new weights beside the old ones, so that a pause only exchanges them.

It runs inside vLLM's worker on a CPU, in a thread. The weights are loaded by vLLM's own layerwise
reload into a copy of the model's modules that has no tensors in common with the model. Loading and
packing take most of the time of an update. The exchange takes milliseconds.

Models with layers that keep something elsewhere than in their modules are loaded in the pause.
"""

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, TypeAlias

import torch

_log = logging.getLogger(__name__)
_TENSORS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_Loaded: TypeAlias = set[tuple[Any, str]]


class UnpreparedError(Exception):
    """A layer cannot be prepared, so the weights are loaded in the pause."""


class PreparedWeights:
    """New weights of a model, which a thread prepares."""

    def __init__(self, model: Any, tensors: Iterable[tuple[str, Any]], tied: Any) -> None:
        """Begins.

        Args:
            model: The model, which samples meanwhile.
            tensors: The new weights by name, as in a checkpoint.
            tied: Returns the output layer and the embedding of a model if the layer is tied to it.
        """
        self._model = model
        self._tensors = tensors
        self._tied = tied
        self._pairs: list[tuple[Any, Any]] = []
        """The modules of the model, each with its copy."""
        self._lock = threading.Lock()
        self._ended = self._dropped = False
        self._loaded: _Loaded = set()
        """The copies and names of the tensors that were loaded."""
        self.ready = False
        """Whether the weights can be exchanged. Final when the thread has ended."""
        self._thread = threading.Thread(target=self._run, name="prepared-weights", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._prepare()
            self.ready = True
        except Exception as error:  # loading in the pause then raises it, or succeeds
            _log.info("weights are loaded in the pause: %s: %s", type(error).__name__, error)
        with self._lock:
            self._ended = True
            if self._dropped or not self.ready:
                self._forget()

    def drop(self) -> None:
        """Lets go of the weights, which are not exchanged. The thread may still prepare them."""
        with self._lock:
            self._dropped = True
            if self._ended:
                self._forget()

    def _prepare(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        copies: dict[Any, Any] = {}
        model = _copied(self._model, copies)
        self._pairs = list(copies.items())
        for live, own in self._pairs:
            self._own_tensors(live, own)
        layerwise.initialize_layerwise_reload(model)
        for _, own in self._pairs:
            layerwise.get_layerwise_info(own).kernel_tensors = None  # the model's stay as they are
        model.load_weights(self._tensors)
        for _, own in self._pairs:
            info = layerwise.get_layerwise_info(own)
            if info.can_load() and info.load_numel > 0:  # a part of it is padding
                layerwise._layerwise_process(own, info)  # noqa: SLF001
        if (tied := self._tied(model)) is not None:
            head, embedding = tied
            _parameters(head)["weight"] = _parameters(embedding)["weight"]
            head.quant_method.process_weights_after_loading(head)
            self._loaded.add((head, "weight"))
        self._check()

    def _own_tensors(self, live: Any, own: Any) -> None:
        """Gives a copy what it loads into, and loaders that load into nothing else."""
        from vllm.model_executor.model_loader.reload import layerwise, meta

        info = layerwise.get_layerwise_info(live)
        for name, parameter in _parameters(own).items():
            if parameter is not None and name in meta.SKIP_TENSORS:  # it is loaded as it is
                mine = parameter.data.clone()
                mine.__class__, mine.__dict__ = parameter.__class__, parameter.__dict__.copy()
                _parameters(own)[name] = self._with_loader(mine, own, name)
        parts = [
            {
                name: self._with_loader(meta.to_meta_tensor(tensor), own, name)
                for name, tensor in part.items()
            }
            for part in info.restore_metadata
        ]
        layerwise.LAYERWISE_INFO[own] = type(info)(
            restore_metadata=(parts[0], parts[1]), restore_device=info.restore_device
        )

    def _with_loader(self, tensor: Any, own: Any, name: str) -> Any:
        """Makes the loader of a tensor one of the copy, which notes that it was called."""
        from vllm.model_executor.model_loader.reload import layerwise

        loader: Callable[..., Any] = layerwise._get_original_loader(tensor)  # noqa: SLF001
        if isinstance(loader, MethodType) and not isinstance(loader.__self__, torch.Tensor):
            loader = loader.__func__.__get__(own)

        @functools.wraps(loader)
        def noting(*args: Any, **options: Any) -> Any:
            self._loaded.add((own, name))
            return loader(*args, **options)

        tensor.weight_loader = noting
        return tensor

    def _check(self) -> None:
        """Checks that all parameters were loaded and no buffer, and that layers keep all they have.

        Raises:
            UnpreparedError: It is not so.
        """
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        known = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
        found: _Loaded = set()
        for _, own in self._pairs:
            names = {name for name, one in _parameters(own).items() if one is not None}
            found |= {(own, name) for name in names}
            if names and type(getattr(own, "quant_method", None)) not in known:
                raise UnpreparedError(f"{type(own).__name__} cannot be prepared")
        for own, name in found ^ self._loaded:
            raise UnpreparedError(f"{name} of {type(own).__name__} cannot be prepared")

    def exchange(self, dtype: torch.dtype) -> None:
        """Puts the weights into the model, which must not run."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        former: list[Any] = []
        for live, own in self._pairs:
            for name, parameter in _parameters(live).items():
                if (own, name) in self._loaded:
                    former.append(parameter.data)
                    parameter.data = _parameters(own)[name].data
            for name, value in own.__dict__.items():
                if name not in _TENSORS and live.__dict__.get(name) is not value:
                    former.append(live.__dict__.get(name))
                    live.__dict__[name] = value
        for live, _ in self._pairs:
            if is_deferred_attention_layer(live):
                live.process_weights_after_loading(dtype)
        self._forget()
        # Freeing gigabytes takes longer than the exchange.
        threading.Thread(target=former.clear, daemon=True).start()

    def _forget(self) -> None:
        """Lets go of the copies. Their loaders refer to them, and vLLM's table to the loaders."""
        from vllm.model_executor.model_loader.reload import layerwise

        for _, own in self._pairs:
            layerwise.LAYERWISE_INFO.pop(own, None)
            for table in _TENSORS & own.__dict__.keys():
                own.__dict__[table].clear()
        self._pairs.clear()
        self._loaded.clear()


def _parameters(module: Any) -> dict[str, Any]:
    """Returns the parameters of a module itself, by name. Missing ones are None."""
    own: dict[str, Any] = module.__dict__["_parameters"]
    return own


def _copied(module: Any, copies: dict[Any, Any]) -> Any:
    """Returns a copy of a module and of those in it, whose tables of tensors are its own."""
    if module in copies:
        return copies[module]
    own = copies[module] = copy.copy(module)
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        own.__dict__[table] = module.__dict__[table].copy()
    own.__dict__["_modules"] = {
        name: None if one is None else _copied(one, copies)
        for name, one in module.__dict__["_modules"].items()
    }
    return own
