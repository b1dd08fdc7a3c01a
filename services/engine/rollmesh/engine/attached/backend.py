"""The backends vllm-http and sglang: adapt a server that runs already.

The engine gives the server's weights a name that no other process gives, `rollmesh-ID-VERSION`.
Every answer names the weights that sampled it, and each connection is checked before its first
token. So a server that was restarted, or whose weights another process has renamed, is noticed
before its tokens leave the engine under a wrong version.
"""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from rollmesh.engine.attached import most_bytes
from rollmesh.engine.attached.server import DUE, RefusedError, Server, Stream
from rollmesh.engine.attached.sglang import Sglang
from rollmesh.engine.attached.vllm_http import VllmHttp
from rollmesh.engine.backend import (
    Adapter,
    GenerateInput,
    Load,
    ModelLimits,
    PauseMode,
    ScoreInput,
    Scores,
    Transfer,
    aborted,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.control import to_the_end
from rollmesh.engine.requests import read_generate
from rollmesh.runtime import clock
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EngineStartError,
    InvalidFieldError,
    RollmeshError,
    WeightTransferError,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import engine_pb2, sampling_pb2

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_SIGNS: dict[str, type[VllmHttp | Sglang]] = {
    "vllm_config": VllmHttp,
    "internal_states": Sglang,
}
"""What /server_info of a kind of server has."""
_PREFIX = "rollmesh-"
_NO_WEIGHTS = "none"
"""Takes the place of a version while the weights are incomplete or dropped."""
_LOOK_S = 0.5
_LAST_WORDS_S = 0.3
_RESUME_S = 5.0
"""Longest wait for a server that is left."""
_LOADED_S = 30.0
"""Longest wait for weights that a server loads when it is left, seconds."""
_WAIT_MS = 30 * 60_000
"""Longest wait for a server that is starting."""
_RETRY_MS = 5_000
_DROPS_WEIGHTS = 2
_ERROR = 500
_OTHERS = {
    "max_adapters": "adapters are not loaded into an attached server",
    "vllm": "the attached server was started with its own options",
}
"""Settings that do not apply, and why."""


@dataclass(eq=False, slots=True)
class _Request:
    """A request in progress."""

    id: str
    """Its id at the server, which other clients may use, too. None begins with another."""
    loads: int
    """Number of loads of weights before it."""
    aborted: bool = False
    inside: bool = False
    """Whether the server has it."""


class AttachedBackend:
    """A server that another process has started."""

    def __init__(self, config: EngineConfig) -> None:
        """Takes the settings of the engine.

        Raises:
            ConfigError: A setting does not apply to an attached server, or a file cannot be read.
        """
        for name, why in _OTHERS.items():
            if getattr(config, name):
                raise ConfigError(f"{name}: {why}; leave it out")
        self._config = config
        key = ""
        if config.attach_key_file:
            try:
                key = Path(config.attach_key_file).read_text().strip()
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"attach_key_file: {config.attach_key_file} cannot be read: {error}"
                ) from error
        self._server = Server(config.attach, key, config.attach_timeout_ms)
        # Until the server is known.
        self._dialect: VllmHttp | Sglang = VllmHttp(self._server, config)
        self._id = secrets.token_hex(4)
        self._policy_version = 0
        self._name = ""  # of the server's weights
        self._renames = 0
        self._count = 0
        self._sleep_level = 0
        self._loads = 0
        self._requests: dict[str, _Request] = {}
        self._connections: WeakSet[Any] = WeakSet()  # to the attached server, checked
        self._open = asyncio.Event()  # cleared by a pause, so that new requests wait
        self._open.set()
        self._idle = asyncio.Event()  # whether the server has no request
        self._idle.set()
        self._look_now = asyncio.Event()
        self._held = False
        self._is_fenced = False
        self._free = asyncio.Event()  # cleared while the model may stand still for a call
        self._free.set()
        self._asked_ms = 0  # when the call was made that is not answered yet
        self.name = ""
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
        """Leaves the server, which goes on. Its requests from here end.

        Weights that it loads are waited for. A pause ends, unless the server sleeps, or nobody
        knows its weights.
        """
        if not self._open.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOADED_S):
                    await self._free.wait()
        if not (self._open.is_set() or self._is_fenced or self._busy or self._sleep_level):
            with suppress(RollmeshError, RefusedError, TimeoutError):
                async with asyncio.timeout(_RESUME_S):
                    await self._dialect.resume()
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
        self._dialect.refuse(request)
        generate = request.generate
        vocabulary = self.limits.vocabulary_tokens
        answer = self._dialect.answers(request, vocabulary, self._version_of)
        top = self._dialect.candidates(generate.top_logprobs)
        most = most_bytes(generate.sampling.max_tokens, top)
        sent_ms = 0
        async with self._counted(generate.request_id) as state:
            if not await self._let_in(state):
                yield aborted()
                return
            body = self._dialect.generate_body(request, state.id)
            state.loads = self._loads
            async with (
                self._server.stream(self._dialect.generate_path, body, most) as stream,
                aclosing(_parts(stream, whole=not request.max_chunk_tokens)) as parts,
            ):
                await self._check_connection(stream)
                async for part in parts:
                    if part is not DUE:
                        answer.add(part)
                    now_ms, stream.due_s = clock.monotonic_ms(), None
                    if answer.finish is not None:
                        continue  # the usage follows
                    if sent_ms and (left_ms := sent_ms + request.collect_ms - now_ms) > 0:
                        stream.due_s = asyncio.get_running_loop().time() + left_ms / 1000
                        continue
                    # After new weights it is known at the end of the answer: the tokens may have
                    # been under way before them.
                    version = self._policy_version if state.loads == self._loads else None
                    for one in answer.messages(version):
                        yield one
                    sent_ms = now_ms
            if answer.finish is None:
                raise EngineFaultError("the server ended an answer without a finish reason")
            state.inside = False
            for one in answer.messages(None):
                yield one

    async def score(self, request: ScoreInput) -> Scores | None:
        """Returns the scores of a sequence. None if it was aborted."""
        self._dialect.refuse_score(request)
        async with self._counted(request.request_id) as state:
            while await self._let_in(state):
                state.loads = self._loads
                body = self._dialect.score_body(request, state.id)
                most = most_bytes(len(request.token_ids), request.top_k)
                path = self._dialect.generate_path
                async with self._server.stream(path, body, most) as stream:
                    await self._check_connection(stream)
                    found = await stream.whole()
                read = await asyncio.to_thread(self._dialect.read_scores, found, request)
                state.inside = False
                if read is None:
                    return None
                name, scores = read
                version = self._version_of(name)
                if state.loads == self._loads:  # else new weights came in the middle
                    return dataclasses.replace(scores, policy_version=version)
            return None

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests. Each finishes with the tokens sampled so far."""
        self._mark_aborted(request_ids)
        await self._abort_again()

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stops sampling. New requests wait here: vLLM 0.33 refuses them while it is paused."""
        self._open.clear()
        if mode == engine_pb2.PAUSE_MODE_WAIT:
            if self._held:  # so that the requests of a pause before can end
                await to_the_end(self._control(self._dialect.resume()))
                self._held = False
            await self._idle.wait()
            mode = engine_pb2.PAUSE_MODE_KEEP
        if mode == engine_pb2.PAUSE_MODE_ABORT:
            self._mark_aborted(self._requests)
        pausing = self._dialect.pause(mode, clear_cache=clear_cache)
        await to_the_end(self._control(pausing))
        self._held = True
        if mode == engine_pb2.PAUSE_MODE_ABORT:
            await self._abort_again()

    async def resume(self) -> None:
        """Resumes sampling."""
        await self._control(self._dialect.resume())
        self._held = False
        self._open.set()

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer. The server samples nothing while it waits."""
        async with self._occupied(by_trainer=True):
            await self._dialect.init_weight_transfer(init_info)

    async def check_weights(self, source: Path | Transfer, *, prepares: bool = False) -> None:
        """Checks weights, and whether the server can load them."""
        async with self._occupied(by_trainer=isinstance(source, Transfer)):
            await self._dialect.check_weights(source)

    async def load_weights(self, source: Path | Transfer, policy_version: int) -> None:
        """Has the server load weights that were checked."""
        started = clock.monotonic_ms()
        self._loads += 1
        async with self._occupied():
            try:
                await self._rename(_NO_WEIGHTS)
                await self._dialect.load_weights(source)
                await self._rename(policy_version)
                self._policy_version = policy_version
            except WeightTransferError:  # nothing was loaded
                await self._rename(self._policy_version)
                raise
            except Exception as error:  # no name would be right for a part of the weights
                self._die("the weights were loaded in part; restart the attached server")
                raise EngineDeadError(self.death, retry_delay_ms=_RETRY_MS) from error
        took_ms = clock.monotonic_ms() - started
        _log.info("weights updated", extra=fields(policy_version=policy_version, load_ms=took_ms))

    async def check_adapter(self, adapter: Adapter) -> None:
        """Refuses an adapter."""
        raise InvalidFieldError("header.adapter", _OTHERS["max_adapters"])

    load_adapter = unload_adapter = check_adapter

    def check_sleep(self) -> None:
        """Checks that the server was started with a sleep mode."""
        self._dialect.check_sleep()

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory. Running requests are aborted."""
        await self.pause(engine_pb2.PAUSE_MODE_ABORT)  # no token is sampled under the next name
        if level == _DROPS_WEIGHTS or not self._dialect.tells_sleep:  # the next engine must know
            await self._rename(_NO_WEIGHTS)
        self._sleep_level = level
        await self._control(self._dialect.sleep(level))

    async def wake_up(self) -> None:
        """Reallocates the accelerator memory. The server samples again."""
        await self._control(self._dialect.wake_up())
        if self._sleep_level != _DROPS_WEIGHTS and not self._dialect.tells_sleep:
            await self._rename(self._policy_version)
        await self.resume()
        self._sleep_level = 0

    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes. Returns False if running requests hold them."""
        return await self._control(self._dialect.reset_prefix_cache())

    def load(self) -> Load:
        """Returns the load. Requests that the server has not scheduled are waiting."""
        held = len(self._requests)
        running = min(held, self._dialect.slots, self._config.lease_capacity)
        return Load(self._policy_version, running, held - running, self._silent_ms)

    @property
    def _busy(self) -> bool:
        return not self._free.is_set()

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
                return await self._server.get("/server_info?config_format=json")
            except EngineDeadError as error:
                if clock.monotonic_ms() > until_ms:
                    raise
                if not told:
                    _log.warning("the server does not answer yet: %s", error.message)
                told = True
                await asyncio.sleep(_LOOK_S)
            except RefusedError as error:
                raise EngineStartError(
                    f"attach: {self._config.attach}{error}; start a vLLM server with "
                    "VLLM_SERVER_DEV_MODE=1, which serves the routes for pauses and versions"
                ) from error

    async def _attach(self, info: Any) -> None:
        found = next((one for sign, one in _SIGNS.items() if sign in info), None)
        if found is None:
            raise EngineStartError("attach: the server is neither a vLLM nor an SGLang server")
        dialect: VllmHttp | Sglang = found(self._server, self._config)
        self._dialect = dialect
        try:
            await dialect.describe(info)
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineStartError(
                f"attach: the server's /server_info lacks {error}; it is another release than "
                f"{dialect.tested}"
            ) from error
        self.name, self.weight_transfer = dialect.name, dialect.weight_transfer
        self.limits, self.numerics = dialect.limits, dialect.numerics
        if self._config.weight_transfer not in {"", self.weight_transfer}:
            raise EngineStartError(
                f"weight_transfer: is {self._config.weight_transfer!r}, and the attached server "
                f"has {self.weight_transfer!r}; make them the same"
            )
        name = await self._weight_name()
        version = name.rpartition("-")[2] if name.startswith(_PREFIX) else name
        if name == "default":  # the name of weights that a server has loaded at its start
            version = "0"
        if not (version.isdecimal() and version.isascii()):
            raise EngineStartError(
                f"attach: the server's weights are named {name!r:.80}, which tells no policy "
                "version; restart the server, or name them by a number with POST "
                "/update_weight_version"
            )
        self._policy_version = int(version)
        await dialect.wake_if_asleep()
        await dialect.resume()  # a pause of an engine that was attached before
        await self._rename(self._policy_version)
        await dialect.probe()

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
            paused = await self._dialect.is_paused()
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
        name = await self._dialect.weight_name(timeout_ms)
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
        self._count += 1
        id_ = f"{self._id}-{self._count}-{request_id}"
        state = self._requests[request_id] = _Request(id_, self._loads)
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
            if state.inside and self._dialect.aborts_late and not self._is_fenced:
                with suppress(RollmeshError, RefusedError):
                    await to_the_end(self._dialect.abort([state.id]))

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
            await self._server.get(self._dialect.alive_path)
        except (RefusedError, RollmeshError):
            self._look_now.set()
            return EngineDeadError("the attached server's model died", retry_delay_ms=_RETRY_MS)
        return RollmeshError(f"the attached server failed: {error}; see its log")

    def _mark_aborted(self, request_ids: Iterable[str]) -> None:
        for id_ in request_ids:
            if id_ in self._requests:
                self._requests[id_].aborted = True
        if not self._open.is_set():  # waiting requests check their state again
            self._open.set()
            self._open.clear()

    async def _abort_again(self) -> None:
        """Aborts requests at the server. It may not have known one of them the last time."""
        ids = [one.id for one in self._requests.values() if one.aborted and one.inside]
        if ids:
            await self._dialect.abort(ids)

    # Control calls and weights.

    async def _control(self, call: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await call
        except RefusedError as error:
            raise await self._typed(error) from error

    @asynccontextmanager
    async def _occupied(self, *, by_trainer: bool = False) -> AsyncIterator[None]:
        """Marks calls for which the model may stand still.

        Args:
            by_trainer: Whether they wait for the trainer. The engine dies if the wait times out.
        """
        self._free.clear()
        try:
            yield
        except RefusedError as error:
            raise await self._typed(error) from error
        except EngineDeadError as error:
            if by_trainer:
                self._die(f"a transfer failed: {error.message}; restart the attached server")
            raise
        finally:
            self._asked_ms = 0
            self._free.set()

    async def _rename(self, version: int | str) -> None:
        """Names the server's weights."""
        self._renames += 1
        name = f"{_PREFIX}{self._id}-{version}"
        await self._dialect.rename(name)
        self._name = name
        self._renames += 1


async def _parts(stream: Stream, *, whole: bool) -> AsyncGenerator[Any, None]:
    """Yields the parts of an answer, or all of it."""
    if whole:
        yield await stream.whole()
        return
    async with aclosing(stream.events()) as events:
        async for event in events:
            if isinstance(event, dict) and "error" in event:
                raise RefusedError("the stream", _ERROR, f"{event['error']!r:.300}")
            yield event
