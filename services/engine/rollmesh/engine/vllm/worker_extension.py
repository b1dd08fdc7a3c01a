"""Loads new weights inside vLLM's worker process.

vLLM mixes `WeightReceiver` into its worker (`worker_extension_cls`). Weights go through the model
runner's `reload_weights`, which restores the loaders that post-processing removed: calling
`model.load_weights` on a running CPU model fails once parameters have been replaced.

New weights are checked against the checkpoint that the model was started from before any parameter
is modified, because a failure inside vLLM would end the worker. vLLM's transfer backends load the
weights themselves. For them the description of the transfer is checked.
"""

import base64
import io
import pickle  # noqa: TID251 - a subclass that knows one class
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors

from rollmesh.engine.checkpoints import Header, find_fault, find_misfit, read_headers, weight_files
from rollmesh.engine.vllm.prepared import PreparedWeights
from rollmesh.runtime.codec import BYTES, FIELDS

# Keeps pickle out of weight transfers, whatever vLLM's environment allows.
#
# Two of vLLM's paths unpickle bytes that the starter of a transfer controls: CUDA IPC handles that
# come as `ipc_handles_pickled` (with VLLM_ALLOW_INSECURE_SERIALIZATION=1), and the objects that
# ranks exchange over the TCP store at `master_address` when they join. Handles come as JSON
# instead, and of the store's objects only NCCL's unique id is read.

_UNIQUE_ID = {
    ("_ctypes", "_unpickle"),
    ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"),
}


def with_handles(update: Any) -> Any:
    """Returns an update with its CUDA IPC handles as vLLM's IPC backend takes them.

    Raises:
        ValueError: A handle is malformed or pickled.
    """
    if isinstance(update, list):
        return [with_handles(one) for one in update]
    if update.get("ipc_handles_pickled") is not None:
        raise ValueError("ipc_handles_pickled is not read; give ipc_handles as JSON")
    handles = update.get("ipc_handles")
    if handles is None:
        return update
    taken: list[dict[str, tuple[Any, ...]]] = []
    for one in handles if isinstance(handles, list) else [handles]:
        _check(isinstance(one, dict), "map the UUID of each GPU to a handle")
        taken.append({uuid: _arguments(handle) for uuid, handle in one.items()})
    return {**update, "ipc_handles": taken if isinstance(handles, list) else taken[0]}


def _arguments(handle: Any) -> tuple[Any, ...]:
    """Returns the arguments of torch's `rebuild_cuda_tensor`."""
    import torch

    known = isinstance(handle, dict) and handle.keys() == set(FIELDS)
    _check(known, f"give a handle the fields {', '.join(FIELDS)}")
    given: dict[str, Any] = {name: _value(name, handle[name]) for name in FIELDS}
    dtype = getattr(torch, given["dtype"], None)
    _check(isinstance(dtype, torch.dtype), f"dtype {given['dtype']!r:.40} is not one of torch's")
    given |= {"dtype": dtype, "tensor_size": torch.Size(given["tensor_size"])}
    first = [given[name] for name in FIELDS[:3]]
    return torch.Tensor, *first, torch.storage.TypedStorage, *[given[name] for name in FIELDS[3:]]


def _value(name: str, value: Any) -> Any:
    """Returns one field of a handle, checked for its type."""
    if name in BYTES and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if name in {"tensor_size", "tensor_stride"} and isinstance(value, list):
        return tuple(_value("", one) for one in value)
    if name in {"requires_grad", "event_sync_required"}:
        kind: type[Any] = bool
    else:
        kind = str if name == "dtype" else int
    fits = name not in BYTES and type(value) is kind and (kind is not int or value >= 0)
    _check(fits, f"{name or 'a size'} has another type")
    return value


def _check(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(f"ipc_handles: {problem}")


@contextmanager
def only_unique_ids() -> Iterator[None]:
    """Lets this thread unpickle nothing but NCCL's unique id while vLLM joins a group."""
    from vllm.distributed import utils

    module: Any = utils
    former, own = module.pickle, threading.get_ident()

    def loads(data: Any) -> Any:
        if threading.get_ident() != own:
            return former.loads(data)
        return _UniqueIds(io.BytesIO(data)).load()

    module.pickle = SimpleNamespace(loads=loads, dumps=former.dumps)
    try:
        yield
    finally:
        module.pickle = former


class _UniqueIds(pickle.Unpickler):
    """Reads the object that the first rank of a group sends to the others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _UNIQUE_ID:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a unique id")
        return super().find_class(module, name)


_EMBEDDINGS = {"embed_tokens", "lm_head", "logits_processor"}
"""Modules whose adapters have other matrices than those of a linear layer."""
_HEADER_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


class WeightReceiver:
    """Methods added to vLLM's worker and called by `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    rank: int
    _prepared: tuple[str, PreparedWeights] | None = None

    def check_weights(self, source: str) -> str:
        """Returns the fault of new weights. Empty if they fit the running model."""
        self._drop_prepared()
        try:
            return find_fault(Path(source), self._own_headers(), tied=self._is_tied)
        except (safetensors.SafetensorError, OSError) as error:
            return f"cannot be read: {error}"

    def prepare_weights(self, source: str) -> bool:
        """Begins to prepare checked weights beside those in use. Returns whether it does."""
        config = self.vllm_config
        if config.device_config.device_type != "cpu" or config.lora_config is not None:
            return False
        tied = _tied_layers if self._is_tied else lambda _model: None
        prepared = PreparedWeights(self.model_runner.get_model(), self._wanted(source), tied)
        self._prepared = source, prepared
        return True

    def is_preparing(self) -> bool:
        """Returns whether weights are being prepared."""
        return self._prepared is not None and self._prepared[1].running

    def load_checked_weights(self, source: str) -> None:
        """Loads weights that `check_weights` has accepted, or exchanges prepared ones."""
        runner, prepared = self.model_runner, self._prepared
        if prepared is not None and prepared[0] == source and prepared[1].ready:
            self._prepared = None
            prepared[1].exchange(self.vllm_config.model_config.dtype)
            runner.reset_encoder_cache()
            runner.reset_mm_cache()
            return
        self._drop_prepared()
        with _watched(runner.get_model()), _packed_experts(runner.get_model()):
            runner.reload_weights(weights_iterator=self._wanted(source))
        if self._is_tied:
            _tie_again(runner.get_model())

    def _drop_prepared(self) -> None:
        """Lets go of weights that were prepared, and whose update was given up or took too long."""
        if self._prepared is not None:
            self._prepared[1].drop()
            self._prepared = None

    def _wanted(self, source: str) -> Iterator[tuple[str, Any]]:
        wanted = self._own_headers().keys()
        return (pair for pair in _tensors(Path(source)) if pair[0] in wanted)

    @property
    def _is_tied(self) -> bool:
        return bool(self.vllm_config.model_config.hf_text_config.tie_word_embeddings)

    def attention_backends(self) -> str:
        """Returns the names of the attention backends in use, separated by commas."""
        groups = (group for groups in self.model_runner.attn_groups for group in groups)
        return ",".join(sorted({group.backend.get_name() for group in groups}))

    def adapted_modules(self, names: list[str]) -> list[str]:
        """Returns the modules that take adapters, as vLLM names them. Empty for all others.

        A checkpoint or PEFT has these names.
        """
        from vllm.lora.layers import BaseLayerWithLoRA

        model = self.model_runner.get_model()
        packed = getattr(model, "packed_modules_mapping", {})
        adapted = set[str]()
        for name, module in model.named_modules():
            parent, dot, last = name.rpartition(".")
            if isinstance(module, BaseLayerWithLoRA) and last not in _EMBEDDINGS:
                adapted |= {f"{parent}{dot}{part}" for part in packed.get(last, [last])}
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        renamed = mapper.get_rename_mapper().map_name if mapper is not None else str
        found = [str(renamed(f"{name}.weight")).removesuffix(".weight") for name in names]
        return [name if name in adapted else "" for name in found]

    def init_transfer(self, init_info: dict[str, Any]) -> str:
        """Joins the trainer. Returns why that failed, or an empty string."""
        engine = self.weight_transfer_engine
        try:
            typed = engine.parse_init_info(init_info)
            engine.shutdown()  # a trainer joined earlier is gone or is joining again
            with only_unique_ids():
                engine.init_transfer_engine(typed)
        except Exception as error:  # a backend may raise anything
            return f"{type(error).__name__}: {error}"
        return ""

    def check_transfer(self, updates: list[Any]) -> str:
        """Returns the fault in the description of a transfer. Empty if it fits."""
        engine = self.weight_transfer_engine
        try:
            updates = with_handles(updates)
            infos = [engine.parse_update_info(self._own_part(update)) for update in updates]
        except Exception as error:  # a backend may raise anything
            return f"{type(error).__name__}: {error}"
        if not _loads_whole(engine):
            return ""
        names = Counter(name for info in infos for name in info.names)
        if twice := [name for name, count in names.items() if count > 1]:
            return f"{twice[0]} is announced twice; send it once"
        announced = {
            name: Header(_HEADER_NAMES.get(dtype) or dtype.upper(), tuple(shape))
            for info in infos
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
        }
        return find_misfit(announced, self._own_headers())

    def load_transfer(self, updates: list[Any]) -> str:
        """Loads the weights that the trainer sends now.

        Returns:
            Why nothing was loaded and the old weights are in place. Empty if all were loaded.

        Raises:
            Exception: Any exception means that a part of the weights may have been loaded.
        """
        worker: Any = self
        updates = with_handles(updates)  # checked before
        model = self.model_runner.get_model()
        with _watched(model) as loads, _packed_experts(model):
            worker.start_weight_update()
            try:
                for update in updates:
                    worker.update_weights(update)
            except Exception as error:
                if loads or not _loads_whole(self.weight_transfer_engine):
                    raise
                from vllm.config import set_current_vllm_config

                with set_current_vllm_config(self.weight_transfer_engine.vllm_config):
                    # Layers that were not loaded get their weights back.
                    self.weight_transfer_engine.finish_weight_update()
                return f"{type(error).__name__}: {error}"
            worker.finish_weight_update()
        if self._is_tied:
            _tie_again(model)
        return ""

    def _own_part(self, update: Any) -> Any:
        """Returns this worker's part of an update, selected as vLLM's own `update_weights` does."""
        if not isinstance(update, list):
            return update
        parallel = self.vllm_config.parallel_config
        return update[parallel.data_parallel_index * parallel.world_size + self.rank]

    def _own_headers(self) -> dict[str, Header]:
        return read_headers(Path(self.vllm_config.model_config.model))


def _loads_whole(engine: Any) -> bool:
    """Returns whether a backend loads a complete checkpoint, all of it through the model's loader.

    Other backends write into parameters directly, some of them only in part (sparse updates).
    """
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine

    return isinstance(
        engine, nccl_engine.NCCLWeightTransferEngine | ipc_engine.IPCWeightTransferEngine
    )


@contextmanager
def _watched(model: Any) -> Iterator[list[bool]]:
    """Yields a list that is empty until the model's loader is called, and checks what it does."""
    load_weights, loads = model.load_weights, list[bool]()

    def watched(weights: Any) -> Any:
        loads.append(True)
        loaded = load_weights(weights)
        _check_loaded(model, loaded or ())
        return loaded

    model.load_weights = watched
    try:
        yield loads
    finally:
        del model.load_weights


def _check_loaded(model: Any, loaded: Collection[str]) -> None:
    """Checks that a reload has what the model says it has loaded.

    Some models of vLLM (GPT-OSS) write into parameters without their loaders. A reload does not
    see it, and keeps the former weights.

    Raises:
        RuntimeError: It has not.
    """
    from vllm.model_executor.model_loader.reload import layerwise, meta

    for prefix, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():  # it has been loaded as a whole
            continue
        noted = meta.SKIP_TENSORS | {name for name, _ in info.loaded_weights}
        for name, _ in layer.named_parameters(recurse=False):
            if name not in noted and f"{prefix}.{name}" in loaded:
                raise RuntimeError(
                    f"{prefix}.{name} keeps its former weights: vLLM's {type(model).__name__} "
                    "does not reload them; use a model whose weights can be pushed"
                )


@contextmanager
def _packed_experts(model: Any) -> Iterator[None]:
    """Has new experts packed for the CPU, and padded. vLLM does so only when it loads a model.

    A layer has its experts packed when it has been loaded, because packed ones have another shape.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    methods = list[Any]()
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            process = partial(_process_experts, method.process_weights_after_loading, experts)
            method.process_weights_after_loading = process
            methods.append(method)
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading


def _process_experts(process: Callable[[Any], None], experts: Any, layer: Any) -> None:
    process(layer)
    experts.process_weights_after_loading(layer)


def _tie_again(model: Any) -> None:
    """Ties the output layer to the new embedding. `reload_weights` does not update a tied layer.

    On CPU the layer also holds a packed copy of its weight, made by post-processing. In a pipeline
    only the last worker has the layer.
    """
    if (tied := _tied_layers(model)) is not None:
        head, embedding = tied
        head.weight.data.copy_(embedding.weight.data)
        head.quant_method.process_weights_after_loading(head)


def _tied_layers(model: Any) -> tuple[Any, Any] | None:
    """Returns the output layer and the embedding of a model in which they are tied.

    None if this worker has no output layer, or the model has none of its own.
    """
    from vllm.model_executor.models.utils import PPMissingLayer

    # A vision model holds its language model, under a name that differs between models.
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    head = getattr(language, "lm_head", None)  # Gemma has no layer beside the embedding
    if head is None or isinstance(head, PPMissingLayer):
        return None
    return head, language.model.embed_tokens


def _tensors(source: Path) -> Iterator[tuple[str, Any]]:
    for path in weight_files(source):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                yield name, file.get_tensor(name)
