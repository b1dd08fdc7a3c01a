"""The vLLM backend: `AsyncLLM` with token ids in, ids and flat log-probabilities out, no text."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from rollmesh.engine.backend import (
    Chunk,
    Constraint,
    GenerateInput,
    Load,
    ModelLimits,
    PauseMode,
    Sampling,
    Transfer,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.vllm.chunks import chunks, joined
from rollmesh.engine.vllm.constraint import compilable, has_tokenizer
from rollmesh.engine.vllm.heartbeat import Heartbeat
from rollmesh.engine.vllm.images import ImagePrompts
from rollmesh.engine.vllm.options import read_options
from rollmesh.engine.vllm.sampling import sampling_params
from rollmesh.engine.vllm.start import start_llm
from rollmesh.engine.vllm.versions import RunningVersions
from rollmesh.runtime import clock
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.errors import (
    EngineDeadError,
    InvalidConstraintError,
    InvalidFieldError,
    InvalidWeightsError,
    RollmeshError,
    WeightTransferError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, sampling_pb2

_log = logging.getLogger(__name__)
_FINISHES = {
    "stop": sampling_pb2.FINISH_REASON_STOP,
    "length": sampling_pb2.FINISH_REASON_LENGTH,
    "abort": sampling_pb2.FINISH_REASON_ABORT,
}
_HEALTH_CHECK_S = 0.5
_ANY_TEXT = '{"type": "structural_tag", "format": {"type": "any_text"}}'


class VllmBackend:
    """One vLLM replica."""

    name = "vllm"

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
        self._paused = False
        self._sleeping = False
        self._takes_constraints = has_tokenizer(config.model_path)
        self._running: dict[str, bool] = {}  # whether each request was aborted
        self._control = asyncio.Lock()
        self._heartbeat = Heartbeat(self._ping)
        self.limits = ModelLimits(0, 0)
        self.died = asyncio.Event()

    async def start(self) -> None:
        """Loads the model, sets its version and samples one token to warm it up."""
        self._llm = start_llm(
            self._config, self._options, takes_constraints=self._takes_constraints
        )
        self._images = ImagePrompts(self._llm, self._config.image_cache_bytes)
        model = self._llm.vllm_config.model_config
        eos = model.try_get_generation_config().get("eos_token_id", [])
        self.limits = ModelLimits(
            model.get_vocab_size(),
            model.max_model_len,
            frozenset(eos if isinstance(eos, list) else [eos]),
        )
        await self._llm.update_weight_version(str(self._policy_version))
        # With its first constraint vLLM reads the vocabulary, which takes seconds.
        first = Constraint(_ANY_TEXT, strict=False) if self._takes_constraints else None
        one = GenerateInput("warm-up", np.zeros(1, np.uint32), Sampling(max_tokens=2), 1, first)
        async for _ in self.generate(one):
            pass

    async def stop(self) -> None:
        """Stops vLLM's processes."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)

    async def watch(self) -> None:
        """Sets `died` when vLLM's process dies; runs until then."""
        async with self._heartbeat:
            while not self._llm.errored:
                await asyncio.sleep(_HEALTH_CHECK_S)
                self._heartbeat.look(needed=bool(self._running) and not self._is_held)
        self.died.set()

    @property
    def _is_held(self) -> bool:
        """Whether the model does not step for a good reason: a pause, or new weights."""
        return self._paused or self._sleeping or self._control.locked()

    async def _ping(self) -> None:
        """Returns once the scheduler is between two steps; it answers calls only there."""
        await self._llm.engine_core.call_utility_all_async("is_scheduler_paused")

    async def generate(self, request: GenerateInput) -> AsyncGenerator[Chunk, None]:
        """Yields chunks, the last with the finish; closing the iterator aborts the request.

        Raises:
            InvalidConstraintError: The constraint cannot be enforced.
            InvalidFieldError: The model's processor makes other ids of an image, or none.
            EngineDeadError: vLLM's process died.
        """
        self._running[request.request_id] = False
        try:
            tag = await self._structural_tag(request.constraint)
            prompt = await self._images.prompt(request.token_ids, request.images)
            if self._running[request.request_id]:  # vLLM does not know of it yet
                yield Chunk.aborted(request, self._policy_version)
                return
            stream = self._llm.generate(
                prompt, sampling_params(request, tag, self.limits.stop_ids), request.request_id
            )
            async with aclosing(stream) as outputs, aclosing(self._read(outputs, request)) as read:
                async for chunk in read:
                    yield chunk
        except VLLMValidationError as error:
            raise _failure(request) from error
        except VllmEngineDeadError as error:
            self.died.set()
            raise EngineDeadError("the model's process died", retry_delay_ms=5000) from error
        finally:
            del self._running[request.request_id]

    async def _read(
        self, outputs: AsyncIterator[Any], request: GenerateInput
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of a request's outputs."""
        versions = RunningVersions(self._llm.output_processor, request.request_id)
        unread: list[Any] = []
        passed = size = 0
        async for output in outputs:
            completion = output.outputs[0]
            if request.images and not passed and not unread:
                _check_prompt(output, request)
            if completion.finish_reason == "error":
                raise _failure(request)
            unread.append(completion)
            size += len(completion.token_ids)
            starts = versions.starts(completion)
            if output.finished and starts is None:
                raise EngineDeadError("vLLM does not say which weights sampled a request")
            if starts is None or (size < request.collects(passed) and not output.finished):
                continue
            parts: list[Chunk] = []
            for one in unread:
                parts += chunks(one, request, passed, starts)
                passed += len(one.token_ids)
            unread, size = [], 0
            parts = joined(parts, request.max_chunk_tokens)
            if output.finished:
                last = parts.pop() if parts else Chunk.empty(request, self._policy_version)
                finish = _finish(completion, output.num_cached_tokens or 0)
                parts.append(dataclasses.replace(last, finish=finish))
            for part in parts:
                yield part

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests; each finishes with the tokens sampled so far."""
        held = [id_ for id_ in request_ids if id_ in self._running]
        self._running |= dict.fromkeys(held, True)
        await self._llm.abort(held)

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling; if cancelled while waiting for requests to finish, nothing changes."""
        try:
            await self._llm.pause_generation(mode=_name_of(mode), clear_cache=False)
        except asyncio.CancelledError:
            if not self._paused:
                await self._llm.resume_generation()
            raise
        self._paused = True

    async def resume(self) -> None:
        """Resumes sampling."""
        await self._llm.resume_generation()
        self._paused = False

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer; vLLM samples nothing while it waits.

        Raises:
            WeightTransferError: Joining the trainer failed.
            EngineDeadError: The trainer took too long.
        """
        async with self._control:
            if problem := _first(await self._transfer_call("init_transfer", init_info)):
                raise WeightTransferError(problem)

    async def update_weights(
        self, source: Path | Transfer, policy_version: int, mode: PauseMode
    ) -> int:
        """Loads new weights between two steps and drops the KV cache of the old ones.

        Raises:
            InvalidWeightsError: The weights do not fit the model; the old ones stay in use.
            WeightTransferError: The transfer failed before anything was loaded.
            EngineDeadError: The weights were loaded only in part, or a transfer took too long.
        """
        async with self._control:
            await self._check(source)
            was_paused, started = self._paused, clock.monotonic_ms()
            await self._llm.pause_generation(mode=_name_of(mode), clear_cache=True)
            try:
                await self._load(source)
                await self._llm.update_weight_version(str(policy_version))
                self._policy_version = policy_version
            except (WeightTransferError, EngineDeadError):
                raise
            except Exception as error:
                # Some of the new weights may be loaded, so no version would be correct: restart.
                self.died.set()
                raise EngineDeadError(
                    "the weights were loaded in part; the engine is about to restart",
                    retry_delay_ms=5000,
                ) from error
            finally:
                if not was_paused and not self.died.is_set():
                    await self._llm.resume_generation()
            took_ms = clock.monotonic_ms() - started
            _log.info(
                "weights updated", extra=fields(policy_version=policy_version, paused_ms=took_ms)
            )
            return took_ms

    async def _check(self, source: Path | Transfer) -> None:
        if isinstance(source, Transfer):
            problem = _first(await self._transfer_call("check_transfer", list(source.updates)))
        else:
            problem = _first(await self._on_workers("check_weights", str(source)))
        if problem:
            raise InvalidWeightsError("weights", problem)

    async def _load(self, source: Path | Transfer) -> None:
        if isinstance(source, Path):
            await self._on_workers("load_checked_weights", str(source))
            return
        problems = await self._transfer_call("load_transfer", list(source.updates))
        if all(problems):
            raise WeightTransferError(_first(problems))
        if problem := _first(problems):  # other workers have loaded the new weights
            raise RollmeshError(problem)

    async def _transfer_call(self, method: str, argument: object) -> list[str]:
        """Calls the workers, which wait for the trainer; the engine dies if the wait times out."""
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

    async def _on_workers(self, method: str, argument: object) -> list[str]:
        """Calls every worker of every data-parallel rank; vLLM's own call returns only one rank."""
        core = self._llm.engine_core
        ranks = await core.call_utility_all_async("collective_rpc", method, None, (argument,), {})
        return [answer for answers in ranks for answer in answers]

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory; running requests are aborted.

        Raises:
            InvalidFieldError: vLLM was started without its sleep mode.
        """
        if not (current_platform.is_cpu() or self._llm.vllm_config.model_config.enable_sleep_mode):
            raise InvalidFieldError(
                "level", "the engine cannot sleep; start it with enable_sleep_mode in [engine.vllm]"
            )
        await self._llm.sleep(level)
        self._sleeping = True

    async def wake_up(self) -> None:
        """Reallocates the accelerator memory."""
        await self._llm.wake_up()
        self._sleeping = False

    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes; returns False if running requests hold them."""
        return bool(await self._llm.reset_prefix_cache())

    def load(self) -> Load:
        """Returns the load and state; requests that vLLM has not scheduled are waiting."""
        held = len(self._running)
        running = min(held, self._config.lease_capacity)
        return Load(
            self._policy_version,
            running,
            held - running,
            self._paused,
            self._sleeping,
            0 if self._is_held else self._heartbeat.silent_ms,
        )

    async def _structural_tag(self, constraint: Constraint | None) -> str | None:
        if constraint is None:
            return None
        if not self._takes_constraints:
            raise InvalidConstraintError(
                "constraint",
                f"{self._config.model_path} has no tokenizer; use a model that has one",
            )
        return await asyncio.to_thread(compilable, constraint)


def _name_of(mode: PauseMode) -> str:
    """Returns vLLM's name for a pause mode."""
    return name_of(engine_pb2.PauseMode.DESCRIPTOR, mode).lower()


def _first(problems: list[str]) -> str:
    return next(filter(None, problems), "")


def _failure(request: GenerateInput) -> RollmeshError:
    """Returns the error for a request that vLLM gave up on."""
    if request.constraint is None:
        return RollmeshError("vLLM ended the request with an error; see its log")
    return InvalidConstraintError(
        "constraint.structural_tag_json", "vLLM could not compile or follow it; see its log"
    )


def _check_prompt(output: Any, request: GenerateInput) -> None:
    """Checks that vLLM has left the ids of a prompt with images as they are.

    Raises:
        RollmeshError: It has changed them.
    """
    if not np.array_equal(output.prompt_token_ids, request.token_ids):
        raise RollmeshError("vLLM sampled from other ids than it was sent; its images are unsafe")


def _finish(completion: Any, cached_tokens: int) -> engine_pb2.GenerateFinish:
    reason = _FINISHES.get(completion.finish_reason)
    if reason is None:
        raise EngineDeadError(f"vLLM ended a request with {completion.finish_reason!r}")
    stop = completion.stop_reason
    if (
        reason == sampling_pb2.FINISH_REASON_STOP and stop is None
    ):  # the end token that vLLM reads from the model's config
        stop = completion.token_ids[-1] if len(completion.token_ids) else None
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
