"""The vLLM backend: `AsyncLLM` with token ids in, ids and flat log-probabilities out, no text."""

import asyncio
import difflib
import json
import logging
import multiprocessing
import os
import tempfile
import threading
from argparse import SUPPRESS, ArgumentError
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, closing, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np
from vllm import (
    SamplingParams,  # pyright: ignore[reportAttributeAccessIssue]
    __version__ as vllm_release,  # pyright: ignore[reportAttributeAccessIssue]
    envs as vllm_envs,  # pyright: ignore[reportAttributeAccessIssue]
)
from vllm.config import WeightTransferConfig
from vllm.config.logging import LoggingConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger

from rollmesh.engine.backend import (
    FINISHES,
    NO_ID,
    Adapter,
    GenerateInput,
    Load,
    ModelLimits,
    PauseMode,
    ScoreInput,
    Scores,
    Transfer,
    aborted,
    numerics_of,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.requests import MAX_TOP_K, check_temperature, read_generate, vllm_sampling
from rollmesh.engine.vllm.adapters import AdapterChecks, linear_modules, modules_of
from rollmesh.engine.vllm.chunks import (
    Heartbeat,
    RunningRequest,
    keep_rows,
    keep_tensors,
    messages,
    scores_of,
)
from rollmesh.engine.vllm.grammars import Grammars, has_tokenizer, vocabulary_of, written
from rollmesh.engine.vllm.images import ImagePrompts, takes_images
from rollmesh.runtime import clock
from rollmesh.runtime.codec import EXPERTS, SUPPORT, ImageLimits, experts_column, name_of
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineStartError,
    InvalidConstraintError,
    InvalidFieldError,
    InvalidSamplingError,
    InvalidWeightsError,
    RollmeshError,
    WeightTransferError,
)
from rollmesh.runtime.process import end_with_parent
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import engine_pb2, sampling_pb2

# Pass-through options: any argument of the installed vLLM, by its own name.
#
# vLLM's own command line parser checks them, so an option accepts the same values as in `vllm
# serve`. Options that rollmesh sets itself are refused with the name of the setting to use instead.

_OWNED = {
    "model": "the setting model_path",
    "served_model_name": "the setting model",
    "max_model_len": "the setting max_context_tokens",
    "max_num_seqs": "the setting lease_capacity",
    "dtype": "the setting dtype",
    "enforce_eager": "the setting enforce_eager",
    "gpu_memory_utilization": "the setting gpu_memory_utilization",
    "weight_transfer_config": "the setting weight_transfer",
    "disable_log_stats": "the setting metrics_port, which serves vLLM's metrics too",
    "generation_config": "the model's generation_config.json, which names its end tokens",
    "tokenizer": "the tokenizer in model_path, the gateway's",
    "skip_tokenizer_init": "nothing: the engine needs the tokenizer for constraints alone",
    "worker_extension_cls": "nothing: weights reach the workers through it",
    "structured_outputs_config": "nothing: the gateway's constraints are for xgrammar",
    "mm_processor_cache_gb": "the setting image_cache_bytes",
    "logprobs_mode": "the setting logprobs",
    "max_logprobs": "nothing: a scored position has at most 256 ids",
    "kv_sharing_fast_prefill": "nothing: it makes the log-probabilities of scored ids wrong",
    "enable_lora": "the setting max_adapters",
    "max_loras": "the setting max_adapters",
    "max_cpu_loras": "the setting max_adapters",
    "max_lora_rank": "the setting max_adapter_rank",
    "default_mm_loras": "nothing: each request names its adapter",
    "lora_modules": "nothing: adapters are pushed",
}
"""Options that the engine sets itself, and their replacements."""
_SIMILAR = 3
_MOST_CHARS = 400


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for `AsyncEngineArgs`.

    Args:
        options: Values by the names of `AsyncEngineArgs`, as read from JSON or TOML.

    Raises:
        ConfigError: An option is unknown, has a value that vLLM does not accept, or is set by
            rollmesh.
    """
    if not options:
        return {}
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, argument_default=SUPPRESS))
    known = {
        action.dest: action
        for action in parser._actions  # noqa: SLF001 - argparse has no public list
        if action.option_strings
    }
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OWNED:
            raise ConfigError(f"vllm.{name}: is set by rollmesh; use {_OWNED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, _SIMILAR)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(f"vllm.{name}: the installed vLLM has no such option{hint}")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words = [f"--{flag}" if value else f"--no-{flag}"]
        else:
            texts = value if isinstance(value, list) and value else [value]
            words = [
                f"--{flag}",
                *(one if isinstance(one, str) else json.dumps(one) for one in texts),
            ]
        try:
            read[name] = getattr(parser.parse_args(words), name)
        except (ArgumentError, ValueError, ConfigError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"vllm.{name}: vLLM does not take {json.dumps(value)}: {said:.{_MOST_CHARS}}"
            ) from error
    return read


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # mypy has no vLLM
    """Raises an error instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


# Writes a request as vLLM's sampling parameters.


def sampling_params(
    request: GenerateInput, structural_tag: str | None, stop_ids: Collection[int]
) -> SamplingParams:
    """Returns vLLM's parameters for a request.

    Without a tokenizer vLLM does not know all end tokens of the model, `stop_ids`.
    """
    generate, sampling = request.generate, request.generate.sampling
    own = vllm_sampling(sampling)
    own["stop_token_ids"] += () if sampling.ignore_eos else stop_ids
    return SamplingParams(
        **own,
        # vLLM derives these from bad_words. The gateway has already turned their text into ids.
        _bad_words_token_ids=[
            *(list(one.token_ids) for one in sampling.bad_sequences),
            *([one] for one in generate.banned_token_ids),
        ]
        or None,
        routed_experts_prompt_start=(
            generate.routed_experts_start if EXPERTS in generate.columns else len(request.token_ids)
        ),
        logprobs=generate.top_logprobs,
        structured_outputs=(
            None
            if structural_tag is None
            else StructuredOutputsParams(structural_tag=structural_tag)
        ),
        output_kind=(
            RequestOutputKind.DELTA if request.max_chunk_tokens else RequestOutputKind.FINAL_ONLY
        ),
        stream_interval=RunningRequest.interval if request.collect_ms else 1,
    )


def score_params(request: ScoreInput, *, samples_last: bool) -> SamplingParams:
    """Returns vLLM's parameters to score a sequence.

    Such a request fills the prefix cache and does not read it, because positions that are not
    computed have no log-probabilities (vLLM 0.32). With `samples_last` the prompt lacks the last
    id, which is the only one to be sampled.
    """
    # With return_sampling_mask, vLLM takes no request that is greedy or without top_k.
    own: dict[str, Any] = {"top_k": 1, "max_tokens": 1, "detokenize": False}
    if request.ids is not None:
        given = np.where(request.ids == NO_ID, -1, request.ids.astype(np.int64))
        ids = np.column_stack((request.token_ids[request.start :], given))
        own |= {"prompt_logprob_token_ids": ids, "prompt_logprob_start": request.start - 1}
    else:
        own |= {"prompt_logprobs": request.top_k, "flat_logprobs": True}
    if samples_last:
        last = int(request.token_ids[-1])
        own |= {"logprobs": request.top_k, "allowed_token_ids": [last]}
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **own)


# Finds out why vLLM could not start: the first exception that any of its processes logs.
#
# vLLM's scheduler and workers run in separate processes. Their exceptions go to the log. The caller
# only gets "see root cause above". This module adds a handler to vLLM's logging configuration,
# which vLLM passes on to all of its processes. They make the handler before they connect to their
# parent or load anything, so it is also what ties them to the parent.

_NAME = "rollmesh-failure"


class FailureHandler(logging.Handler):
    """Writes the first logged exception to a file that all processes share."""

    def __init__(self, path: str) -> None:
        """Takes the path of the file. The process that creates it has failed first."""
        end_with_parent()  # the first thing of ours that runs in any of vLLM's processes
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record's exception unless another process was first."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        with suppress(OSError), self._path.open("x") as file:
            file.write(f"{type(error).__name__}: {error}")


# Starts vLLM with the arguments of rollmesh and those that the user passes through.

_LOOK_S, _LOOKS = 0.1, 100
_LOGPROBS_MODES = {"raw": "raw_logprobs", "sampled": "processed_logprobs"}


def start_llm(
    config: EngineConfig, options: Mapping[str, Any], takes_constraints: bool
) -> AsyncLLM:
    """Returns vLLM with the model loaded by all of its workers.

    Raises:
        EngineStartError: vLLM could not start. The message gives the reason in one line.
    """
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    with tempfile.TemporaryDirectory(prefix="rollmesh-vllm-") as folder:
        failure, file = Path(folder, "failure"), Path(folder, "logging.json")
        own = vllm_envs.VLLM_LOGGING_CONFIG_PATH
        log = json.loads(Path(own).read_text()) if own else deepcopy(DEFAULT_LOGGING_CONFIG)
        handler = {"()": f"{__name__}.FailureHandler", "path": str(failure)}
        log.setdefault("handlers", {})[_NAME] = handler
        logger = log.setdefault("loggers", {}).setdefault("vllm", {})
        logger["handlers"] = [*logger.get("handlers", ()), _NAME]
        file.write_text(json.dumps(log))
        settings = {"logging_config": LoggingConfig(pylogging_config_file=str(file))}
        try:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    **(settings | engine_arguments(config, options, takes_constraints))
                ),
                stat_loggers=[PrometheusStatLogger] if config.metrics_port >= 0 else None,
            )
        except Exception as error:
            reason = failure.read_text() if failure.exists() else f"{type(error).__name__}: {error}"
            raise EngineStartError(f"vLLM could not start: {' '.join(reason.split())}") from error


def engine_arguments(
    config: EngineConfig,
    options: Mapping[str, Any],
    takes_constraints: bool,
) -> dict[str, Any]:
    """Returns the arguments of vLLM's engine. Options of its own table win over ours."""
    own: dict[str, Any] = {
        "model": str(config.model_path),
        # The gateway handles text. Only constraints need the tokenizer.
        "skip_tokenizer_init": not takes_constraints,
        "structured_outputs_config": {"backend": "xgrammar"},
        "max_model_len": config.max_context_tokens or None,
        "dtype": config.dtype,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": _LOGPROBS_MODES[config.logprobs],
        "max_num_seqs": config.lease_capacity,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_logprobs": 1 + MAX_TOP_K,
        "disable_log_stats": True,  # vLLM logs no statistics. Its metrics go to Prometheus
        "worker_extension_cls": "rollmesh.engine.vllm.worker_extension.WeightReceiver",
        "weight_transfer_config": (
            WeightTransferConfig(config.weight_transfer) if config.weight_transfer else None
        ),
    }
    if config.max_adapters:
        ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= config.max_adapter_rank]
        # A revision is loaded before the one that it replaces is unloaded. On CPUs, vLLM 0.32 takes
        # the last slot for requests of the base model beside others (vllm#48421): it stays empty.
        slots = config.max_adapters + (2 if current_platform.is_cpu() else 1)
        own |= {"enable_lora": True, "max_loras": slots, "max_lora_rank": min(ranks)}
    if takes_images(config.model_path):  # each request carries its processed images: see `images`
        own["mm_processor_cache_gb"] = 0
    if current_platform.is_cpu():
        # vLLM's default on CPUs is a separate worker process, and the scheduler busy-waits for its
        # answers. With few cores this takes a core from the model and starves the threads that move
        # requests and tokens into and out of the scheduler: streams stalled for seconds, and aborts
        # and pauses took effect only after the request had ended. vLLM would bind the model's
        # threads to cores in the worker. Here the environment sets them instead.
        environ = os.environ  # noqa: TID251 - the only way to set the threads of vLLM's process
        environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) - 1, 1)))
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) == 1:
            own["distributed_executor_backend"] = UniProcExecutor
        else:  # else vLLM binds each worker to a NUMA node, and there may be too few
            environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return own | dict(options)


_log = logging.getLogger(__name__)
_HEALTH_CHECK_S = 0.5
_PREPARED_S = 300.0
"""Time that weights have to be prepared while the model samples, seconds."""
_READS_PROMPT, _READS_SAMPLE = "_update_prompt_logprobs", "_update_sample_logprobs"  # vLLM 0.32
setattr(LogprobsProcessor, _READS_PROMPT, keep_tensors)
setattr(LogprobsProcessor, _READS_SAMPLE, keep_rows)
_ANY_TEXT = '{"type": "structural_tag", "format": {"type": "any_text"}}'


class VllmBackend:
    """One vLLM replica."""

    name = "vllm"
    death = "the model's process died"

    def __init__(self, config: EngineConfig) -> None:
        """Takes the settings of the engine.

        Raises:
            ConfigError: vLLM has no such option.
        """
        self._config = config
        self._options = read_options(config.vllm)
        self.weight_transfer = config.weight_transfer
        self._policy_version = 0
        self._llm: Any = None
        self._ended = threading.Event()
        """Ends the thread that has started vLLM, and with it what is left of its processes."""
        self._images: Any = None
        self._adapters: Any = None
        self._held = False
        self._busy = False
        self._takes_constraints = has_tokenizer(config.model_path)
        self._grammars = Grammars()
        self._running: dict[str, bool] = {}  # whether each request was aborted
        self._heartbeat = Heartbeat(self._ping)
        self.limits = ModelLimits(0, 0)
        self.numerics = sampling_pb2.Numerics()
        self.died = asyncio.Event()

    async def start(self) -> None:
        """Loads the model, sets its version and samples one token to warm it up."""
        self._llm = await self._loaded()
        if self._takes_constraints:  # started after vLLM's processes, which inherit descriptors
            await self._grammars.start()
            vocabulary = await asyncio.to_thread(vocabulary_of, self._llm)
            await self._grammars.set_vocabulary(vocabulary)
        limits = ImageLimits(self._config.max_image_bytes, self._config.max_image_pixels)
        self._images = ImagePrompts(self._llm, self._config.image_cache_bytes, limits)
        model = self._llm.vllm_config.model_config
        eos = model.try_get_generation_config().get("eos_token_id", [])
        if self._config.max_adapters:
            shapes = await asyncio.to_thread(linear_modules, self._config.model_path)
            names = await self._adapted_modules(list(shapes))
            taking = {name: shapes[one] for one, name in names.items() if name}
            self._adapters = AdapterChecks(taking, self._llm.vllm_config.lora_config)
        # VLLM's own checks allowed the columns that it was started to return.
        aux = self._llm.vllm_config.aux_output_config
        columns = {SUPPORT: model.return_sampling_mask, EXPERTS: aux.enable_return_routed_experts}
        self.limits = ModelLimits(
            model.get_vocab_size(),
            model.max_model_len,
            frozenset(eos if isinstance(eos, list) else [eos]),
            scores_given_ids=self._llm.vllm_config.use_v2_model_runner,
            # The mask of the last id is part of sampled log-probabilities.
            scores_whole_context=self._config.logprobs == "raw",
            max_adapter_bytes=self._adapters.most_bytes if self._adapters else 0,
            columns=frozenset(kind for kind, is_on in columns.items() if is_on),
        )
        attention = _first(await self._on_workers("attention_backends"))
        self.numerics = _numerics(self._llm.vllm_config, attention, self._config.logprobs)
        await self._llm.update_weight_version(str(self._policy_version))
        # With its first constraint vLLM reads the vocabulary, which takes seconds.
        warm_up = engine_pb2.GenerateRequest(request_id="warm-up", token_ids_u32le=bytes(4))
        warm_up.sampling.max_tokens, warm_up.sampling.top_k = 2, 1
        if self._takes_constraints:
            warm_up.constraint.structural_tag_json = _ANY_TEXT
        asked = engine_pb2.StreamedGenerate(generate=warm_up, max_chunk_tokens=1)
        async for _ in self.generate(read_generate(asked, self.limits)):
            pass

    async def stop(self) -> None:
        """Stops vLLM's processes."""
        self.died.set()  # an update that stands still asks nothing more of them
        self._grammars.stop()
        if self._images is not None:
            await self._images.close()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
        self._ended.set()

    async def _loaded(self) -> Any:
        """Returns vLLM with the model loaded. If this call is cancelled, its processes are killed.

        A thread loads it, so that health is answered and a stop is obeyed meanwhile. It lives until
        `stop`, because vLLM's processes end with the thread that started them. It is a daemon,
        because vLLM cannot be told to give up a start.

        Raises:
            EngineStartError: vLLM could not start. The message gives the reason in one line.
        """
        loaded: Future[AsyncLLM] = Future()

        def load() -> None:
            try:
                loaded.set_result(start_llm(self._config, self._options, self._takes_constraints))
            except BaseException as error:  # the edge of the thread
                loaded.set_exception(error)
            self._ended.wait()

        waiting = asyncio.wrap_future(loaded)
        threading.Thread(target=load, name="vllm", daemon=True).start()
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            for _ in range(_LOOKS):
                if waiting.done():
                    break
                for process in multiprocessing.active_children():
                    process.kill()
                await asyncio.sleep(_LOOK_S)
            if waiting.done() and not waiting.exception():  # else asyncio would log the error
                await asyncio.to_thread(waiting.result().shutdown)
            raise

    async def watch(self) -> None:
        """Sets `died` when vLLM's process dies. Runs until then."""
        async with self._heartbeat:
            while not self._llm.errored:
                await asyncio.sleep(_HEALTH_CHECK_S)
                self._heartbeat.look(needed=bool(self._running) and not self._is_held)
        self.died.set()

    @property
    def _is_held(self) -> bool:
        """Whether the model does not step for a good reason: a pause, or new weights."""
        return self._held or self._busy

    async def _ping(self) -> None:
        """Returns once the scheduler is between two steps. It answers calls only there."""
        await self._llm.engine_core.call_utility_all_async("is_scheduler_paused")

    async def generate(self, request: GenerateInput) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
        """Yields messages, the last with the finish. Closing the iterator aborts the request."""
        generate = request.generate
        request_id, sampling = generate.request_id, generate.sampling
        if SUPPORT in self.limits.columns and not (sampling.top_k and sampling.temperature):
            raise InvalidSamplingError(
                "sampling.top_k",
                "is missing, or temperature is 0, and the engine runs with return_sampling_mask; "
                "give top_k and a temperature above 0",
            )
        if self._config.logprobs == "sampled":
            check_temperature(sampling)
        running = RunningRequest(self._llm.output_processor, request_id, request.collect_ms)
        unread: list[Any] = []
        passed = 0
        with self._counted(request_id, lambda: _failure(request)), closing(running):
            tag = await self._structural_tag(generate)
            prompt = await self._images.prompt(request)
            if self._running[request_id]:  # vLLM does not know of it yet
                yield aborted()
                return
            lora = None if request.adapter is None else _lora(request.adapter)
            stream = self._llm.generate(
                prompt,
                sampling_params(request, tag, self.limits.stop_ids),
                request_id,
                lora_request=lora,
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    if self._running[request_id] and not (passed or unread or output.finished):
                        yield aborted()  # vLLM took it in a thread, and did not know of it yet
                        return
                    if output.lora_request != lora:
                        raise RollmeshError("vLLM sampled with another adapter than it was told")
                    is_first = generate.images and not passed and not unread
                    if is_first and not np.array_equal(output.prompt_token_ids, request.token_ids):
                        raise RollmeshError(
                            "vLLM sampled from other ids than it was sent; its images are unsafe"
                        )
                    if completion.finish_reason == "error":
                        raise _failure(request)
                    unread.append(completion)
                    starts = running.starts(completion)
                    if output.finished and starts is None:
                        raise EngineDeadError("vLLM does not say which weights sampled a request")
                    if starts is None:
                        continue
                    running.collect()
                    parts: list[engine_pb2.TokenChunk] = []
                    for one in unread:
                        parts += messages(one, request, passed, starts)
                        passed += len(one.token_ids)
                    unread = []
                    if output.finished:
                        parts = parts or [engine_pb2.TokenChunk()]
                        finish = _finish(completion, output.num_cached_tokens or 0)
                        parts[-1].finish.CopyFrom(finish)
                        rows = completion.routed_experts
                        if EXPERTS in generate.columns and rows is not None:
                            column = experts_column(generate.routed_experts_start, rows)
                            parts[-1].columns.append(column)
                    for part in parts:
                        yield part

    async def score(self, request: ScoreInput) -> Scores | None:
        """Returns the scores of a sequence. None if it was aborted."""
        self._images.check_rest((), request.token_ids)
        samples_last = len(request.token_ids) == self.limits.max_context_tokens
        ids = request.token_ids[:-1] if samples_last else request.token_ids
        prompt = {"prompt_token_ids": ids.tolist()}
        params = score_params(request, samples_last=samples_last)
        with self._counted(request.request_id, _unexpected):
            async with aclosing(self._llm.generate(prompt, params, request.request_id)) as outputs:
                async for output in outputs:  # one, at the end
                    reason = output.outputs[0].finish_reason
                    if reason == "error":
                        raise _unexpected()
                    return None if reason == "abort" else scores_of(output, request)
        raise EngineDeadError("vLLM ended a request without an output")

    @contextmanager
    def _counted(self, request_id: str, refused: Callable[[], RollmeshError]) -> Iterator[None]:
        """Counts a request while it runs. `refused` returns its error if vLLM does not take it."""
        self._running[request_id] = False
        try:
            yield
        except VLLMValidationError as error:
            raise refused() from error
        except VllmEngineDeadError as error:
            self.died.set()
            raise EngineDeadError("the model's process died", retry_delay_ms=5000) from error
        finally:
            del self._running[request_id]

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests. Each finishes with the tokens sampled so far."""
        held = [id_ for id_ in request_ids if id_ in self._running]
        self._running |= dict.fromkeys(held, True)
        await self._llm.abort(held)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stops sampling. Drops the KV cache with `clear_cache`."""
        if clear_cache and mode == engine_pb2.PAUSE_MODE_KEEP:
            # As below, less 20 ms of sleep after which outputs that are under way have been read.
            await self._llm.renderer.clear_mm_cache_async()
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        else:
            name = name_of(engine_pb2.PauseMode.DESCRIPTOR, mode).lower()
            await self._llm.pause_generation(mode=name, clear_cache=clear_cache)
        self._held = True

    async def resume(self) -> None:
        """Resumes sampling."""
        await self._llm.resume_generation()
        self._held = False

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer. VLLM samples nothing while it waits."""
        with self._occupied():
            if problem := _first(await self._transfer_call("init_transfer", init_info)):
                raise WeightTransferError(problem)

    async def check_weights(self, source: Path | Transfer, *, prepares: bool = False) -> None:
        """Asks the workers whether they can load the weights, and has them prepare."""
        with self._occupied():
            if isinstance(source, Transfer):
                problems = await self._transfer_call("check_transfer", list(source.updates))
            else:
                problems = await self._on_workers("check_weights", str(source))
        if problem := _first(problems):
            raise InvalidWeightsError("weights", problem)
        if prepares and any(await self._on_workers("prepare_weights", str(source))):
            with suppress(TimeoutError):  # then the pause is as long as without
                async with asyncio.timeout(_PREPARED_S):
                    while True:
                        if not any(await self._on_workers("is_preparing")):
                            break
                        await asyncio.sleep(_HEALTH_CHECK_S / 10)

    async def load_weights(self, source: Path | Transfer, policy_version: int) -> None:
        """Loads weights that were checked."""
        started = clock.monotonic_ms()
        try:
            if isinstance(source, Path):  # both at once: the model stands still meanwhile
                await asyncio.gather(
                    self._on_workers("load_checked_weights", str(source)),
                    self._llm.update_weight_version(str(policy_version)),
                )
            else:
                await self._load_transfer(source)
                await self._llm.update_weight_version(str(policy_version))
            self._policy_version = policy_version
        except (WeightTransferError, EngineDeadError):
            raise
        except Exception as error:
            # Some of the new weights may be loaded, so no version would be correct: restart.
            _log.error("weights loaded in part: %s", error)
            self.died.set()
            raise EngineDeadError(
                "the weights were loaded in part; the engine is about to restart",
                retry_delay_ms=5000,
            ) from error
        took_ms = clock.monotonic_ms() - started
        _log.info("weights updated", extra=fields(policy_version=policy_version, load_ms=took_ms))

    @contextmanager
    def _occupied(self) -> Iterator[None]:
        """Marks a call for which the model may stand still."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _load_transfer(self, source: Transfer) -> None:
        problems = await self._transfer_call("load_transfer", list(source.updates))
        if all(problems):
            raise WeightTransferError(_first(problems))
        if problem := _first(problems):  # other workers have loaded the new weights
            raise RollmeshError(problem)

    async def _transfer_call(self, method: str, argument: object) -> list[str]:
        """Calls the workers, which wait for the trainer. The engine dies if the wait times out."""
        try:
            async with asyncio.timeout(self._config.weight_transfer_timeout_ms / 1000):
                return await self._on_workers(method, argument)
        except TimeoutError as error:
            self.died.set()
            raise EngineDeadError(
                "the trainer kept a transfer waiting for longer than weight_transfer_timeout_ms; "
                "the engine is about to restart",
                retry_delay_ms=5000,
            ) from error

    async def _on_workers(self, method: str, *arguments: object) -> list[Any]:
        """Calls every worker of every data-parallel rank. VLLM's own call returns only one rank."""
        core = self._llm.engine_core
        ranks = await core.call_utility_all_async("collective_rpc", method, None, arguments, {})
        return [answer for answers in ranks for answer in answers]

    async def check_adapter(self, adapter: Adapter) -> None:
        """Checks the matrices of an adapter in a thread.

        Raises:
            InvalidFieldError: The model does not fit its config.
            InvalidWeightsError: A tensor does not fit the model.
        """
        names = await self._adapted_modules(await asyncio.to_thread(modules_of, adapter))
        await asyncio.to_thread(self._adapters.check, adapter, names)

    async def _adapted_modules(self, modules: list[str]) -> dict[str, str]:
        """Returns modules as vLLM names them, empty if vLLM adapts none there."""
        answers = await self._on_workers("adapted_modules", modules)
        return dict(zip(modules, map(max, *answers, [""] * len(modules)), strict=True))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Has the workers read an adapter between two steps.

        Raises:
            InvalidWeightsError: VLLM refuses it.
        """
        try:
            await self._llm.add_lora(_lora(adapter))
        except VllmEngineDeadError as error:
            self.died.set()
            raise EngineDeadError("the model's process died", retry_delay_ms=5000) from error
        except Exception as error:  # the workers may raise anything
            raise InvalidWeightsError("header.adapter", f"vLLM refuses it: {error}") from error

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Has the workers drop an adapter."""
        await self._llm.remove_lora(adapter.number)

    def check_sleep(self) -> None:
        """Checks that vLLM was started with its sleep mode."""
        if not (current_platform.is_cpu() or self._llm.vllm_config.model_config.enable_sleep_mode):
            raise InvalidFieldError(
                "level", "the engine cannot sleep; start it with enable_sleep_mode in [engine.vllm]"
            )

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory. Running requests are aborted."""
        self._held = True
        self._running |= dict.fromkeys(self._running, True)  # of some vLLM may not know yet
        await self._llm.sleep(level)

    async def wake_up(self) -> None:
        """Reallocates the accelerator memory. VLLM samples again."""
        await self._llm.wake_up()
        self._held = False

    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes. Returns False if running requests hold them."""
        return bool(await self._llm.reset_prefix_cache())

    def load(self) -> Load:
        """Returns the load. Requests that vLLM has not scheduled are waiting."""
        held = len(self._running)
        running = min(held, self._config.lease_capacity)
        return Load(
            self._policy_version,
            running,
            held - running,
            0 if self._is_held else self._heartbeat.silent_ms,
        )

    async def _structural_tag(self, generate: engine_pb2.GenerateRequest) -> str | None:
        if not generate.HasField("constraint"):
            return None
        if not self._takes_constraints:
            raise InvalidConstraintError(
                "constraint",
                f"{self._config.model_path} has no tokenizer; use a model that has one",
            )
        text = await asyncio.to_thread(written, generate.constraint)
        # The warm-up does not wait for the process.
        if generate.constraint.structural_tag_json != _ANY_TEXT:
            await self._grammars.check(text)
        return text


def _lora(adapter: Adapter) -> LoRARequest:
    """Returns vLLM's request for an adapter. VLLM keeps the KV cache by its name and path."""
    name = f"{adapter.ref.name}@{adapter.ref.version}#{adapter.number}"
    return LoRARequest(name, adapter.number, str(adapter.folder))


def _first(answers: list[str]) -> str:
    return next(filter(None, answers), "")


def _numerics(config: Any, attention: str, logprobs: str) -> sampling_pb2.Numerics:
    """Returns the numerics of vLLM."""
    model, parallel = config.model_config, config.parallel_config
    speculative = config.speculative_config
    return numerics_of(
        "vllm",
        logprobs,
        release=vllm_release,
        platform=current_platform.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=config.cache_config.cache_dtype,
        quantization=model.quantization or "",
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        attention=attention,
        batch_invariant=vllm_envs.VLLM_BATCH_INVARIANT,
        speculation=speculative.method or "" if speculative else "",
    )


def _failure(request: GenerateInput) -> RollmeshError:
    """Returns the error for a request that vLLM gave up on."""
    if not request.generate.HasField("constraint"):
        return _unexpected()
    return InvalidConstraintError(
        "constraint.structural_tag_json", "vLLM could not compile or follow it; see its log"
    )


def _unexpected() -> RollmeshError:
    return RollmeshError("vLLM ended the request with an error; see its log")


def _finish(completion: Any, cached_tokens: int) -> engine_pb2.GenerateFinish:
    reason = FINISHES.get(completion.finish_reason)
    if reason is None:
        raise EngineDeadError(f"vLLM ended a request with {completion.finish_reason!r}")
    stop = completion.stop_reason
    if reason == sampling_pb2.FINISH_REASON_STOP and stop is None and len(completion.token_ids):
        stop = completion.token_ids[-1]  # the end token that vLLM reads from the model's config
    return engine_pb2.GenerateFinish(
        reason=reason,
        stop_token_id=stop if isinstance(stop, int) else None,
        version_spans=[
            sampling_pb2.VersionSpan(
                policy_version=int(span.version), start=span.start, end=span.end
            )
            for span in completion.weight_versions or ()
        ],
        cached_tokens=cached_tokens,
    )
