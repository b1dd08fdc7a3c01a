"""The vllm-http backend: adapts a vLLM server that runs already.

The engine gives the server's weights a name that no other process gives, `rollmesh-ID-VERSION`.
Every answer names the weights that sampled it, and each connection is checked before its first
token. So a server that was restarted, or whose weights another process has renamed, is noticed
before its tokens leave the engine under a wrong version.
"""

import asyncio
import dataclasses
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from rollmesh.engine.attached.answers import (
    Answer,
    candidates,
    generate_body,
    most_bytes,
    read_scores,
    score_body,
)
from rollmesh.engine.attached.server import RefusedError, Server, Stream
from rollmesh.engine.backend import (
    Adapter,
    GenerateInput,
    Load,
    ModelLimits,
    PauseMode,
    Transfer,
    aborted,
    numerics_of,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.control import to_the_end
from rollmesh.engine.requests import read_generate
from rollmesh.engine.scores import ScoreInput, Scores
from rollmesh.runtime import clock
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EngineStartError,
    InvalidConstraintError,
    InvalidFieldError,
    InvalidSamplingError,
    InvalidWeightsError,
    RollmeshError,
    WeightTransferError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, sampling_pb2

_log = logging.getLogger(__name__)
_GENERATE = "/inference/v1/generate"
_EXTENSION = "rollmesh.engine.vllm.worker_extension.WeightReceiver"
_PREFIX = "rollmesh-"
_NO_WEIGHTS = "none"
"""Takes the place of a version while the weights are incomplete or dropped."""
_LOOK_S = 0.5
_LAST_WORDS_S = 0.3
_WAIT_MS = 30 * 60_000
"""Longest wait for a server that is starting."""
_RETRY_MS = 5_000
_DROPS_WEIGHTS = 2
_ERROR = 500
_LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "sampled"}
_OTHERS = {
    "max_adapters": "adapters are not loaded into an attached server",
    "vllm": "the attached server was started with its own options",
}
"""Settings that do not apply, and why."""


class _Request:
    """A request in progress."""

    def __init__(self, loads: int) -> None:
        self.loads = loads
        """Number of loads of weights before it."""
        self.aborted = False
        self.inside = False
        """Whether it was sent to the server."""


class AttachedBackend:
    """A vLLM server that another process has started."""

    name = "vllm-http"

    def __init__(self, config: EngineConfig) -> None:
        """Takes the settings of the engine.

        Raises:
            ConfigError: A setting does not apply to an attached server, or a file cannot be read.
        """
        for name, why in _OTHERS.items():
            if getattr(config, name):
                raise ConfigError(f"{name}: {why}; leave it out")
        self._config = config
        self._server = Server(config.attach, _read_key(config), config.attach_timeout_ms)
        self._id = secrets.token_hex(4)
        self._policy_version = 0
        self._name = ""  # of the server's weights
        self._renames = 0
        self._loads = 0
        self._has_extension = False
        self._may_sleep = False
        self._ranks = 1
        self._slots = 1
        self._most_logprobs = 0
        self._fast_prefill = False
        self._requests: dict[str, _Request] = {}
        self._connections: WeakSet[Any] = WeakSet()  # to the attached server, checked
        self._open = asyncio.Event()  # cleared by a pause, so that new requests wait
        self._open.set()
        self._idle = asyncio.Event()  # whether the server has no request
        self._idle.set()
        self._look_now = asyncio.Event()
        self._held = False
        self._is_fenced = False
        self._busy = False
        self._asked_ms = 0  # when the call was made that is not answered yet
        self.weight_transfer = ""
        self.limits = ModelLimits(0, 0)
        self.numerics = sampling_pb2.Numerics()
        self.died = asyncio.Event()
        self.death = "the attached server is gone"

    async def start(self) -> None:
        """Attaches to the server once it answers, and samples two tokens to warm it up.

        Raises:
            EngineStartError: The server cannot be used. The message names the reason.
        """
        self._server.open()
        try:
            await self._attach(await self._described())
            generate = engine_pb2.GenerateRequest(request_id="warm-up", token_ids_u32le=bytes(4))
            generate.sampling.max_tokens = 2
            asked = engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=1)
            async for _ in self.generate(read_generate(asked, self.limits)):
                pass
        except EngineStartError:
            raise
        except RefusedError as error:
            raise EngineStartError(f"attach: {self._config.attach}{error}") from error
        except RollmeshError as error:
            raise EngineStartError(f"attach: {error.message}") from error

    async def stop(self) -> None:
        """Leaves the server, which goes on. Its requests from here end."""
        await self._server.close()

    async def watch(self) -> None:
        """Sets `died` when the server is gone or another one. Runs until then."""
        while not self._is_fenced:
            self._look_now.clear()
            try:
                await self._look()
            except (EngineDeadError, EngineFaultError, RefusedError) as error:
                self._fence(getattr(error, "message", str(error)))
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._look_now.wait()
        await self._server.close()  # ends the answers of a server that is silent
        await asyncio.sleep(_LAST_WORDS_S)  # their callers are told before the engine ends
        self.died.set()

    async def generate(self, request: GenerateInput) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
        """Yields messages, the last with the finish. Closing the iterator aborts the request."""
        self._refuse(request)
        generate = request.generate
        answer = Answer(request, self.limits.vocabulary_tokens, self._version_of)
        most = most_bytes(generate.sampling.max_tokens, candidates(generate.top_logprobs))
        sent_ms = 0
        async with self._counted(generate.request_id) as state:
            if not await self._let_in(state):
                yield aborted()
                return
            body = generate_body(request, self._id_of(generate.request_id))
            state.loads = self._loads
            async with (
                self._server.stream(_GENERATE, body, most) as stream,
                aclosing(_parts(stream, whole=not request.max_chunk_tokens)) as parts,
            ):
                await self._check_connection(stream)
                async for part in parts:
                    answer.add(part)
                    now_ms = clock.monotonic_ms()
                    collects = sent_ms and now_ms - sent_ms < request.collect_ms
                    if collects or answer.finish is not None:
                        continue  # the usage follows the finish
                    for one in answer.messages(self._version_for(state)):
                        yield one
                    sent_ms = now_ms
            if answer.finish is None:
                raise EngineFaultError("the server ended an answer without a finish reason")
            for one in answer.messages(None):
                yield one

    async def score(self, request: ScoreInput) -> Scores | None:
        """Returns the scores of a sequence. None if it was aborted."""
        if self._fast_prefill:
            raise InvalidFieldError(
                "token_ids_u32le",
                "the attached server has kv_sharing_fast_prefill, with which scores are wrong",
            )
        self._check_candidates("top_k", request.top_k)
        samples_last = len(request.token_ids) == self.limits.max_context_tokens
        if samples_last:
            self._check_candidates("top_k", candidates(request.top_k))
        async with self._counted(request.request_id) as state:
            if not await self._let_in(state):
                return None
            id_ = self._id_of(request.request_id)
            body = score_body(request, id_, samples_last=samples_last)
            most = most_bytes(len(request.token_ids), request.top_k)
            async with self._server.stream(_GENERATE, body, most) as stream:
                await self._check_connection(stream)
                found = await stream.whole()
            read = await asyncio.to_thread(read_scores, found, request, samples_last=samples_last)
            if read is None:
                return None
            name, scores = read
            return dataclasses.replace(scores, policy_version=self._version_of(name))

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests. Each finishes with the tokens sampled so far."""
        for id_ in request_ids:
            if id_ in self._requests:
                self._requests[id_].aborted = True
        self._wake_waiting()
        await self._abort_again()

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stops sampling. New requests wait here: vLLM 0.33 refuses them while it is paused."""
        self._open.clear()
        if mode == engine_pb2.PAUSE_MODE_WAIT:
            if self._held:  # so that the requests of a pause before can end
                await to_the_end(self._control("/resume"))
                self._held = False
            await self._idle.wait()
            mode = engine_pb2.PAUSE_MODE_KEEP
        if mode == engine_pb2.PAUSE_MODE_ABORT:
            self._mark_all_aborted()
        vllm_mode = name_of(engine_pb2.PauseMode.DESCRIPTOR, mode).lower()
        clears = str(clear_cache).lower()
        await to_the_end(self._control("/pause", mode=vllm_mode, clear_cache=clears))
        self._held = True
        if mode == engine_pb2.PAUSE_MODE_ABORT:
            await self._abort_again()

    async def resume(self) -> None:
        """Resumes sampling."""
        await self._control("/resume")
        self._held = False
        self._open.set()

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer. The server samples nothing while it waits."""
        self._check_takes_weights()
        with self._occupied():
            if problem := _first(await self._transfer_call("init_transfer", init_info)):
                raise WeightTransferError(problem)

    async def check_weights(self, source: Path | Transfer) -> None:
        """Asks the server's workers whether they can load the weights."""
        self._check_takes_weights()
        with self._occupied():
            if isinstance(source, Transfer):
                problems = await self._transfer_call("check_transfer", list(source.updates))
            else:
                problems = await self._on_workers("check_weights", _path(source))
        if problem := _first(problems):
            raise InvalidWeightsError("weights", problem)

    async def load_weights(self, source: Path | Transfer, policy_version: int) -> None:
        """Has the server's workers load weights that were checked."""
        started = clock.monotonic_ms()
        self._loads += 1
        with self._occupied():
            try:
                await self._load(source, policy_version)
            except WeightTransferError:
                raise
            except Exception as error:  # no name would be right for a part of the weights
                self._die("the weights were loaded in part; restart the attached server")
                raise EngineDeadError(self.death, retry_delay_ms=_RETRY_MS) from error
        took_ms = clock.monotonic_ms() - started
        _log.info("weights updated", extra=fields(policy_version=policy_version, load_ms=took_ms))

    async def check_adapter(self, adapter: Adapter) -> None:
        """Refuses an adapter."""
        raise _no_adapters()

    async def load_adapter(self, adapter: Adapter) -> None:
        """Refuses an adapter."""
        raise _no_adapters()

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Refuses an adapter."""
        raise _no_adapters()

    def check_sleep(self) -> None:
        """Checks that the server was started with vLLM's sleep mode."""
        if not self._may_sleep:
            raise InvalidFieldError(
                "level", "the attached server cannot sleep; start it with --enable-sleep-mode"
            )

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory. Running requests are aborted."""
        await self.pause(engine_pb2.PAUSE_MODE_ABORT)  # no token is sampled under the next name
        if level == _DROPS_WEIGHTS:
            await self._rename(_NO_WEIGHTS)
        await self._control("/sleep", level=str(level), mode="abort")

    async def wake_up(self) -> None:
        """Reallocates the accelerator memory. The server samples again."""
        await self._control("/wake_up")
        await self.resume()

    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes. Returns False if running requests hold them."""
        answer = await self._control("/reset_prefix_cache")
        return answer.get("success") is True

    def load(self) -> Load:
        """Returns the load. Requests that the server has not scheduled are waiting."""
        held = len(self._requests)
        running = min(held, self._slots)
        return Load(self._policy_version, running, held - running, self._silent_ms)

    @property
    def _silent_ms(self) -> int:
        needed = self._requests and not self._held and not self._busy
        return clock.monotonic_ms() - self._asked_ms if needed and self._asked_ms else 0

    # Attaching: reads the configuration of the server, and names its weights.

    async def _described(self) -> Any:
        """Returns the server's configuration, once it answers."""
        until_ms = clock.monotonic_ms() + _WAIT_MS
        told = False
        while True:
            try:
                answer = await self._server.get("/server_info?config_format=json")
                return answer | await self._server.get("/version")
            except EngineDeadError as error:
                if clock.monotonic_ms() > until_ms:
                    raise
                if not told:
                    _log.warning("the server does not answer yet: %s", error.message)
                told = True
                await asyncio.sleep(_LOOK_S)
            except RefusedError as error:
                raise EngineStartError(
                    f"attach: {self._config.attach}{error}; start the server with "
                    "VLLM_SERVER_DEV_MODE=1, which serves the routes for pauses and versions"
                ) from error

    async def _attach(self, info: Any) -> None:
        try:
            self._take_description(info)
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineStartError(
                f"attach: the server's /server_info lacks {error}; it is another release than 0.32"
            ) from error
        attention = await self._on_workers("attention_backends") if self._has_extension else []
        self.numerics = self._numerics_of(info, _first(attention))
        self._policy_version = await self._named_version()
        if (await self._server.get("/is_sleeping")).get("is_sleeping"):
            await self._server.post("/wake_up")
        await self._server.post("/resume")  # a pause of an engine that was attached before
        await self._rename(self._policy_version)

    def _take_description(self, info: Any) -> None:
        config = info["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        if model["multimodal_config"]:
            raise EngineStartError(
                "attach: the server's model takes images, which are not sent to an attached server"
            )
        mode = _LOGPROBS_MODES.get(model["logprobs_mode"], "")
        if mode != self._config.logprobs:
            raise EngineStartError(
                f"logprobs: is {self._config.logprobs!r}, and the attached server was started with "
                f"--logprobs-mode={model['logprobs_mode']}; make them the same"
            )
        wanted, most = self._config.max_context_tokens, model["max_model_len"]
        if wanted > most:
            raise EngineStartError(
                f"max_context_tokens: is {wanted}, and the attached server has {most}; give at "
                "most that"
            )
        self._has_extension = parallel["worker_extension_cls"] == _EXTENSION
        self._ranks = parallel["data_parallel_size"]
        transfer = config["weight_transfer_config"] or {}
        if self._has_extension:
            self.weight_transfer = transfer.get("backend", "")
        if self._config.weight_transfer not in {"", self.weight_transfer}:
            raise EngineStartError(
                f"weight_transfer: is {self._config.weight_transfer!r}, and the attached server "
                f"has {self.weight_transfer!r}; make them the same"
            )
        device = config["device_config"]["device"]
        self._may_sleep = model["enable_sleep_mode"] or device == "cpu"
        slots = config["scheduler_config"]["max_num_seqs"] * self._ranks
        self._slots = min(slots, self._config.lease_capacity)
        self._most_logprobs = model["max_logprobs"]
        self._fast_prefill = config["cache_config"]["kv_sharing_fast_prefill"]
        self.limits = ModelLimits(
            _vocabulary(self._config, Path(model["model"])),
            wanted or most,
            scores_whole_context=self._config.logprobs == "raw",
        )

    def _numerics_of(self, info: Any, attention: str) -> sampling_pb2.Numerics:
        config = info["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        speculative = config["speculative_config"] or {}
        return numerics_of(
            self.name,
            self._config.logprobs,
            release=info["version"],
            platform=config["device_config"]["device"],
            dtype=model["dtype"].removeprefix("torch."),
            kv_cache_dtype=config["cache_config"]["cache_dtype"],
            quantization=model["quantization"] or "",
            tensor_parallel=parallel["tensor_parallel_size"],
            pipeline_parallel=parallel["pipeline_parallel_size"],
            data_parallel=parallel["data_parallel_size"],
            expert_parallel=parallel["enable_expert_parallel"],
            attention=attention,
            batch_invariant=info["vllm_env"].get("VLLM_BATCH_INVARIANT") is True,
            speculation=speculative.get("method") or "",
        )

    async def _named_version(self) -> int:
        """Returns the policy version that the name of the server's weights says.

        Raises:
            EngineStartError: It says none.
        """
        name = await self._weight_name()
        if name == "default":  # vLLM's name for the weights that it has loaded at its start
            return 0
        version = name.rpartition("-")[2] if name.startswith(_PREFIX) else name
        if version.isdecimal() and version.isascii():
            return int(version)
        raise EngineStartError(
            f"attach: the server's weights are named {name!r:.80}, which tells no policy version; "
            "restart the server, or name them by a number with POST /update_weight_version"
        )

    # Watching: the server is still the same process, and its weights have the same name.

    async def _look(self) -> None:
        """Asks the server for its weights' name, which it answers between two steps of the model.

        Raises:
            EngineDeadError: It is gone, or has other weights.
        """
        if self._busy:
            return
        renames, self._asked_ms = self._renames, self._asked_ms or clock.monotonic_ms()
        try:
            name = await self._weight_name()
            paused = (await self._server.get("/is_paused")).get("is_paused")
        except EngineDeadError:
            if self._busy or renames != self._renames:  # a load has its own deadline
                return
            raise
        if renames == self._renames and not self._busy:
            self._check_name(name)
        if not paused or self._held or self._busy:  # a pause by another process is silence
            self._asked_ms = 0
        await self._abort_again()

    async def _check_connection(self, stream: Stream) -> None:
        """Checks that the server at the other end has the weights that it was attached with.

        It is asked once for each connection. The answer to the request has begun, so a server that
        still has the name now had it then.
        """
        connection, name, renames = stream.connection, "", -1
        if connection is not None and connection in self._connections:
            return
        while renames != self._renames:  # the name has changed meanwhile
            renames = self._renames
            name = await self._weight_name(self._config.weight_transfer_timeout_ms)
        self._check_name(name)
        if connection is not None:
            self._connections.add(connection)

    async def _weight_name(self, timeout_ms: int = 0) -> str:
        answer = await self._server.get("/weight_info", timeout_ms=timeout_ms)
        name = answer.get("weight_version")
        if not isinstance(name, str):
            raise EngineFaultError("the server does not say the name of its weights")
        return name

    def _check_name(self, name: str) -> None:
        """Fences the server if its weights have another name.

        Raises:
            EngineDeadError: They have.
        """
        if name != self._name:
            self._fence(
                f"the attached server's weights are named {name!r:.80}, not {self._name!r}: it was "
                "restarted, or another process changed them; restart the engine to attach again"
            )
            raise EngineDeadError(self.death, retry_delay_ms=_RETRY_MS)

    def _version_of(self, name: str) -> int:
        """Returns the version of the weights that sampled tokens.

        Raises:
            EngineFaultError: This engine did not load them.
        """
        own = f"{_PREFIX}{self._id}-"
        version = name.removeprefix(own)
        if not name.startswith(own) or not version.isdecimal():
            self._fence(
                f"the attached server sampled with weights named {name!r:.80}, not {own}..."
            )
            raise EngineFaultError(self.death)
        return int(version)

    def _version_for(self, state: _Request) -> int | None:
        """Returns the version of tokens in mid-answer.

        After new weights it is unknown until the end of the answer: the tokens may have been under
        way before them.
        """
        return self._policy_version if state.loads == self._loads else None

    def _fence(self, why: str) -> None:
        """Refuses further requests, and has `watch` end the running ones."""
        if not self._is_fenced:
            self._is_fenced, self.death = True, why
        self._look_now.set()

    def _die(self, why: str) -> None:
        """Ends the engine at once, because the server has no whole weights."""
        self._fence(why)
        self.died.set()

    # Requests: how they are counted, held and refused.

    @asynccontextmanager
    async def _counted(self, request_id: str) -> AsyncIterator[_Request]:
        """Counts a request while it runs, and types the errors of the server."""
        state = self._requests[request_id] = _Request(self._loads)
        try:
            yield state
        except RefusedError as error:
            raise await self._typed(error) from error
        except EngineDeadError as error:
            self._look_now.set()
            if self._is_fenced:
                raise EngineDeadError(self.death, retry_delay_ms=_RETRY_MS) from error
            raise
        finally:
            del self._requests[request_id]
            if not any(one.inside for one in self._requests.values()):
                self._idle.set()

    async def _let_in(self, state: _Request) -> bool:
        """Waits until no pause holds new requests. Returns False if it was aborted meanwhile.

        Raises:
            EngineDeadError: The server is fenced.
        """
        while not self._open.is_set() and not state.aborted:
            await self._open.wait()
        if self._is_fenced:
            raise EngineDeadError(self.death, retry_delay_ms=_RETRY_MS)
        if not state.aborted:
            state.inside = True
            self._idle.clear()
        return not state.aborted

    async def _typed(self, error: RefusedError) -> RollmeshError:
        """Returns the error for a call that the server refused."""
        if error.status < _ERROR:
            return RollmeshError(f"the attached server refused a request: {error}")
        try:
            await self._server.get("/health")
        except (RefusedError, RollmeshError):
            self._look_now.set()
            return EngineDeadError("the attached server's model died", retry_delay_ms=_RETRY_MS)
        return RollmeshError(f"the attached server failed: {error}; see its log")

    def _refuse(self, request: GenerateInput) -> None:
        """Refuses what the server has no field for.

        Raises:
            InvalidFieldError: Names the field.
        """
        generate = request.generate
        self._check_candidates("top_logprobs", candidates(generate.top_logprobs))
        if generate.HasField("constraint"):
            raise InvalidConstraintError("constraint", _NOT_SENT)
        if generate.banned_token_ids:
            raise InvalidFieldError("banned_token_ids", _NOT_SENT)
        if generate.sampling.bad_sequences:
            raise InvalidSamplingError("sampling.bad_sequences", _NOT_SENT)
        if generate.images:
            raise InvalidFieldError("images", _NOT_SENT)

    def _check_candidates(self, field: str, count: int) -> None:
        most = self._most_logprobs
        if 0 <= most < count:
            raise InvalidFieldError(
                field, f"needs a server with --max-logprobs={count}; the attached one has {most}"
            )

    def _wake_waiting(self) -> None:
        if not self._open.is_set():  # waiting requests check their state again
            self._open.set()
            self._open.clear()

    def _mark_all_aborted(self) -> None:
        for state in self._requests.values():
            state.aborted = True
        self._wake_waiting()

    async def _abort_again(self) -> None:
        """Aborts requests at the server. It may not have known one of them the last time."""
        ids = [id_ for id_, state in self._requests.items() if state.aborted and state.inside]
        if ids:
            names = [f"generate-tokens-{self._id_of(id_)}" for id_ in ids]
            await self._server.post("/abort_requests", {"request_ids": names})

    def _id_of(self, request_id: str) -> str:
        """Returns the id of a request at the server, which other clients may use, too."""
        return f"{self._id}-{request_id}"

    # Control calls and weights.

    async def _control(self, path: str, **query: str) -> dict[str, Any]:
        try:
            return await self._server.post(path, query=query)
        except RefusedError as error:
            raise await self._typed(error) from error

    @contextmanager
    def _occupied(self) -> Iterator[None]:
        """Marks a call for which the model may stand still."""
        self._busy = True
        try:
            yield
        finally:
            self._busy, self._asked_ms = False, 0

    async def _rename(self, version: int | str) -> None:
        """Names the server's weights."""
        self._renames += 1
        name = f"{_PREFIX}{self._id}-{version}"
        await self._server.post("/update_weight_version", {"new_version": name})
        self._name = name
        self._renames += 1

    def _check_takes_weights(self) -> None:
        """Checks that the server has what loads weights.

        Raises:
            InvalidFieldError: It has not.
        """
        if not self._has_extension:
            raise InvalidFieldError(
                "header",
                "the attached server takes no weights; install rollmesh beside its vLLM and start "
                f"it with --worker-extension-cls={_EXTENSION}",
            )
        if self._ranks > 1:
            raise InvalidFieldError(
                "header",
                f"the attached server has {self._ranks} data-parallel ranks and answers for one of "
                "them; load its weights with the backend vllm",
            )

    async def _load(self, source: Path | Transfer, policy_version: int) -> None:
        await self._rename(_NO_WEIGHTS)
        if isinstance(source, Path):
            await self._on_workers("load_checked_weights", _path(source))
        else:
            problems = await self._transfer_call("load_transfer", list(source.updates))
            if all(problems):  # nothing was loaded
                await self._rename(self._policy_version)
                raise WeightTransferError(_first(problems))
            if problem := _first(problems):
                raise RollmeshError(problem)
        await self._rename(policy_version)
        self._policy_version = policy_version

    async def _transfer_call(self, method: str, argument: object) -> list[str]:
        """Calls the workers, which wait for the trainer. The engine dies if the wait times out."""
        try:
            return await self._on_workers(method, argument)
        except EngineDeadError as error:
            self._die(f"a transfer failed: {error.message}; restart the attached server")
            raise

    async def _on_workers(self, method: str, *arguments: object) -> list[str]:
        """Returns the answers of the server's workers to a call of the extension."""
        body = {"method": method, "args": list(arguments)}
        timeout_ms = self._config.weight_transfer_timeout_ms
        try:
            answer = await self._server.post("/collective_rpc", body, timeout_ms=timeout_ms)
        except RefusedError as error:
            raise await self._typed(error) from error
        results = answer.get("results")
        if not isinstance(results, list):
            raise EngineFaultError(f"the server's workers do not answer {method}")
        return ["" if one is None else str(one) for one in results]


_NOT_SENT = "is not sent to an attached server; ask an engine with the backend vllm"


async def _parts(stream: Stream, *, whole: bool) -> AsyncGenerator[Any, None]:
    """Yields the parts of an answer, or all of it."""
    if whole:
        yield await stream.whole()
        return
    async with aclosing(stream.events()) as events:
        async for event in events:
            if isinstance(event, dict) and "error" in event:
                raise RefusedError(_GENERATE, _ERROR, f"{event['error']!r:.300}")
            yield event


def _path(source: Path) -> str:
    return str(source.absolute())


def _first(answers: list[str]) -> str:
    return next(filter(None, answers), "")


def _no_adapters() -> InvalidFieldError:
    return InvalidFieldError("header.adapter", _OTHERS["max_adapters"])


def _read_key(config: EngineConfig) -> str:
    if not config.attach_key_file:
        return ""
    try:
        return Path(config.attach_key_file).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"attach_key_file: {config.attach_key_file} cannot be read: {error}"
        ) from error


def _vocabulary(config: EngineConfig, served: Path) -> int:
    """Returns the size of the vocabulary, which the server does not say.

    Raises:
        EngineStartError: No setting and no file says it either.
    """
    if config.vocabulary_tokens:
        return config.vocabulary_tokens
    for folder in (served, config.model_path):
        try:
            found = json.loads((folder / "config.json").read_text())
            return int((found | found.get("text_config", {}))["vocab_size"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    raise EngineStartError(
        "vocabulary_tokens: a vLLM server does not say it; give it, or in model_path the folder of "
        "the server's model"
    )
