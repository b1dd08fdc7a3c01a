"""Pause, resume, sleep, wake and weight updates as one state machine.

Calls of different kinds may overlap: each states a goal, and one of them at a time acts
on the model until it does. A call in the middle of an update therefore changes the state after
the update, never which weights sample under which version.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

from rollmesh.engine import metrics
from rollmesh.engine.backend import Backend, PauseMode, Transfer
from rollmesh.engine.checkpoints import KeptFile
from rollmesh.engine.requests import read_transfer
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    EngineAsleepError,
    InvalidFieldError,
    InvalidWeightsError,
    StaleVersionError,
    StoreFullError,
    SupersededError,
)
from rollmesh.runtime.process import Scratch
from rollmesh.runtime.rpc import check_room, write_chunks
from rollmesh.v1 import engine_pb2

_T = TypeVar("_T")
_ASLEEP = "the engine sleeps; wake it up and push again"
_DROPS_WEIGHTS = 2
"""The level of a sleep after which the weights are gone."""


class Held(Enum):
    """Whether the model is kept from sampling."""

    NO = auto()
    PARTLY = auto()
    """It still samples for requests that were there, or it may."""
    YES = auto()


class Action(Enum):
    """One call to the backend."""

    HOLD = auto()
    RELEASE = auto()
    SLEEP = auto()
    WAKE = auto()


@dataclass(slots=True)
class ControlState:
    """The requested and the actual state of an engine."""

    paused: bool = False
    """Asked by `pause` and `resume`."""
    sleep_level: int = 0
    """Asked by `sleep` and `wake_up`. 0 is awake."""
    updating: bool = False
    """Whether an update has the model. It begins and ends by itself."""
    held: Held = Held.NO
    asleep: bool = False
    has_weights: bool = True
    """A sleep of level 2 drops them. Only an update brings them back."""
    push_id: str = ""
    """Id of the push that delivered the current weights. Empty for the initial weights."""
    adapters: int = 0
    """Number of adapter revisions that the model holds, and of the one that is being loaded. They
    belong to the weights in use."""

    def next(self) -> Action | None:
        """Returns the next action toward the requested state. None if there is none."""
        if self.updating:
            return None
        if self.asleep:
            return None if self.sleep_level else Action.WAKE
        if self.sleep_level:
            return Action.SLEEP
        if self.paused:
            return None if self.held is Held.YES else Action.HOLD
        return None if self.held is Held.NO else Action.RELEASE

    def did(self, action: Action) -> None:
        """Notes an action. The model samples again once it wakes."""
        self.asleep = action is Action.SLEEP
        self.held = Held.YES if action in {Action.HOLD, Action.SLEEP} else Held.NO


@dataclass(slots=True, eq=False)
class _Asked:
    """A call that is not finished, and the state that it requests."""

    value: Any


class Control:
    """Carries out control calls on one backend."""

    def __init__(self, backend: Backend) -> None:
        """Takes the backend, which samples."""
        self._backend = backend
        self._turn = asyncio.Lock()
        self._wait: asyncio.Timeout | None = None  # a hold that waits for requests to finish
        self._kept: dict[str, Any] = {"paused": False, "sleep_level": 0}  # by calls that succeeded
        self._asking: dict[str, list[_Asked]] = {name: [] for name in self._kept}
        self.state = ControlState()
        self.loads = 0
        """Number of times that new weights began to be loaded."""

    @property
    def paused(self) -> bool:
        """Whether a pause holds the engine."""
        return self.state.paused and self.state.held is Held.YES

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling. If the caller leaves before, nothing changes.

        Raises:
            SupersededError: A resume came first.
        """
        async with self._asked("paused", value=True), self._turn:
            if not self.state.asleep and self.state.paused:
                try:  # a resume ends the wait for requests to finish
                    async with asyncio.timeout(None) as self._wait:
                        await self._pause(mode)
                except TimeoutError:
                    await to_the_end(self._act())
                finally:
                    self._wait = None
            if not self.state.paused:
                raise SupersededError("the engine was resumed before it had paused")

    async def resume(self) -> None:
        """Resumes sampling. An update or a sleep still has its time."""
        async with self._asked("paused", value=False):
            if self._wait is not None and self._wait.when() is None:
                self._wait.reschedule(asyncio.get_running_loop().time())
            await self._settle()

    async def sleep(self, level: int) -> None:
        """Frees accelerator memory. Running requests are aborted.

        Raises:
            InvalidFieldError: The engine cannot sleep.
            SupersededError: A wake-up came first.
        """
        self._backend.check_sleep()  # else an update in progress would fail of it
        if level == _DROPS_WEIGHTS:
            self._check_no_adapters("sleep.level")
        async with self._asked("sleep_level", level):
            await self._settle()
            if not self.state.asleep:
                raise SupersededError("the engine was woken before it slept")

    async def wake_up(self) -> None:
        """Allocates the memory again. A pause still holds, and dropped weights stay dropped."""
        async with self._asked("sleep_level", 0):
            await self._settle()

    async def alone(
        self, work: Callable[[], Coroutine[Any, Any, None]], *, awake: bool = False
    ) -> None:
        """Runs a call to the backend while no other action has the model. Other calls wait.

        Raises:
            EngineAsleepError: It is to be awake, and it sleeps or a sleep waits.
        """
        async with self._turn:
            if awake:
                if self.state.sleep_level:
                    raise EngineAsleepError(_ASLEEP)
                await to_the_end(self._act())  # a wake-up may wait
            await to_the_end(work())

    async def update(self, source: Path | Transfer, header: engine_pb2.UpdateWeightsHeader) -> int:
        """Loads new weights, and samples again unless something else was asked meanwhile.

        It is completed even if its caller leaves, once the model is held. The model stays held if
        its process died.

        Returns:
            Duration of the sampling pause, milliseconds.

        Raises:
            EngineAsleepError: The engine sleeps, and no wake-up was asked before.
            InvalidFieldError: The engine holds adapters, which belong to the weights in use.
        """
        async with self._turn:
            self.check_awake()
            self._check_no_adapters("header")
            if self.state.asleep:
                await to_the_end(self._act())
            await to_the_end(self._backend.check_weights(source, prepares=header.keep_file))
            started, mode = clock.monotonic_ms(), header.pause_mode
            if self.state.held is Held.YES and mode == engine_pb2.PAUSE_MODE_WAIT:
                mode = engine_pb2.PAUSE_MODE_KEEP  # requests that are held cannot finish

            async def load() -> None:
                await self._backend.load_weights(source, header.policy_version)
                self.state.has_weights, self.state.push_id = True, header.push_id

            self.state.updating = True
            try:
                await self._pause(mode, clear_cache=True)
                self.loads += 1
                await to_the_end(load())
            finally:
                self.state.updating = False
                if not self._backend.died.is_set():
                    await to_the_end(self._act())
            return clock.monotonic_ms() - started

    def check_awake(self) -> None:
        """Checks that there is memory for weights.

        Raises:
            EngineAsleepError: The engine sleeps, and no wake-up was asked.
        """
        if self.state.asleep and self.state.sleep_level:
            raise EngineAsleepError(_ASLEEP)

    def _check_no_adapters(self, field: str) -> None:
        if held := self.state.adapters:
            raise InvalidFieldError(
                field, f"{held} adapters belong to the weights in use; unload them first"
            )

    @asynccontextmanager
    async def _asked(self, name: str, value: Any) -> AsyncIterator[None]:
        """Requests a state. A failed call withdraws it, unless a later one succeeded."""
        calls, mine = self._asking[name], _Asked(value)
        calls.append(mine)
        setattr(self.state, name, value)
        try:
            yield
        except BaseException:
            if mine in calls:
                calls.remove(mine)
                setattr(self.state, name, calls[-1].value if calls else self._kept[name])
                await to_the_end(self._settle())
            raise
        if mine in calls:  # otherwise a later call has succeeded
            self._kept[name] = value
            del calls[: calls.index(mine) + 1]

    async def _settle(self) -> None:
        async with self._turn:
            await to_the_end(self._act())

    async def _act(self) -> None:
        """Acts until the engine is as asked. The caller has the turn."""
        while (action := self.state.next()) is not None:
            match action:
                case Action.HOLD:
                    await self._pause(engine_pb2.PAUSE_MODE_KEEP)
                case Action.RELEASE:
                    await self._backend.resume()
                case Action.SLEEP:
                    self.state.held = Held.PARTLY  # a sleep that fails may have stopped it
                    if self.state.sleep_level == _DROPS_WEIGHTS:
                        self.state.has_weights = False
                    await self._backend.sleep(self.state.sleep_level)
                case Action.WAKE:
                    await self._backend.wake_up()
            self.state.did(action)

    async def _pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        self.state.held = Held.PARTLY
        await self._backend.pause(mode, clear_cache=clear_cache)
        self.state.held = Held.YES


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs work to completion even if the caller is cancelled. Then raises the cancellation.

    An interrupted update would leave the model paused, or new weights under the old version.
    """
    running = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


# Weight updates of an engine: received, loaded once and always completed.

_SILENCE_MS = 60_000  # longest wait for a chunk. Other updates wait meanwhile
_MOST_SHOWN = 300


class WeightUpdates:
    """The weight updates of one backend. They run one at a time."""

    def __init__(self, backend: Backend, control: Control) -> None:
        """Takes the backend with its initial weights."""
        self._backend = backend
        self._control = control
        self._lock = asyncio.Lock()
        self._kept = KeptFile()
        self.changed = asyncio.Event()
        """Set when the report to the router may have changed."""

    async def update(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> int:
        """Loads new weights. A push that the engine already holds changes nothing.

        Returns:
            Duration of the sampling pause, milliseconds.

        Raises:
            InvalidFieldError: A field is invalid.
            StaleVersionError: The version is not above the current one.
            EngineAsleepError: There is no memory for weights.
            InvalidWeightsError: The weights do not fit the model. The old ones stay in use.
            WeightsBaseError: The weights are a difference, and its base is not kept.
            StoreFullError: The disk has no room for the upload.
        """
        async with self._lock:
            if header.file_only:
                await self._keep(header, chunks)
                return 0
            current = self._backend.load().policy_version
            dropped = not self._control.state.has_weights  # then the engine holds no push
            wanted = header.policy_version, header.push_id
            if header.push_id and not dropped and wanted == (current, self._control.state.push_id):
                return 0
            # Without a push id, the version must be above the current one, or be the dropped one.
            if not header.push_id and header.policy_version < current + (not dropped):
                raise StaleVersionError(
                    f"policy_version {header.policy_version} is not above {current}; count up",
                    policy_version=current,
                )
            self._control.check_awake()  # before the bytes are received, and again after
            try:
                paused_ms = await self._receive(header, chunks)
                metrics.PAUSED_SECONDS.observe(paused_ms / 1000)
            finally:  # the version may have changed even if the caller left
                self.changed.set()
        return paused_ms

    async def _receive(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> int:
        match header.WhichOneof("source"):
            case "checkpoint_dir":
                source = _folder(header.checkpoint_dir)
                return await self._load(source, header)
            case "safetensors_bytes" if header.keep_file:
                return await self._load(await self._keep(header, chunks), header)
            case "safetensors_bytes":
                with await asyncio.to_thread(Scratch, "weights") as folder:
                    path = folder / "weights.safetensors"
                    await receive(path, header.safetensors_bytes, chunks)
                    return await self._load(path, header)
            case "transfer":
                transfer = read_transfer(header.transfer, self._backend.weight_transfer)
                return await self._load(transfer, header)
            case _:
                raise AssertionError("the servicer has checked the header")

    async def _keep(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> Path:
        """Brings the kept file to a push, while the model samples. Returns the file.

        Raises:
            InvalidWeightsError: The file is shorter or longer than announced, or malformed.
            WeightsBaseError: The file is a difference of another one than is kept.
            StoreFullError: The disk has no room for the upload.
        """
        kept, size = self._kept, header.safetensors_bytes
        if not header.base_push_id:
            path = await asyncio.to_thread(kept.renew)
            await receive(path, size, chunks)
            kept.push_id = header.push_id
            return path
        with await asyncio.to_thread(Scratch, "weights") as folder:
            path = folder / "difference.safetensors"
            await receive(path, size, chunks)
            if not header.push_id or kept.push_id != header.push_id:  # else only the load failed
                base = header.base_push_id
                await to_the_end(asyncio.to_thread(kept.change, path, base, header.push_id))
        return kept.path

    async def close(self) -> None:
        """Removes the kept file. An update that stands still is not waited for."""
        await asyncio.to_thread(self._kept.drop)

    async def _load(self, source: Path | Transfer, header: engine_pb2.UpdateWeightsHeader) -> int:
        try:
            paused_ms = await self._control.update(source, header)
        except InvalidWeightsError:
            if header.keep_file:  # no difference follows weights that no engine takes
                await asyncio.to_thread(self._kept.drop)
            raise
        if not header.keep_file:
            await asyncio.to_thread(self._kept.drop)
        return paused_ms


def _folder(path: str) -> Path:
    """Returns a folder that a request names. Asks the disk once.

    Raises:
        InvalidWeightsError: It cannot be read.
    """
    with suppress(OSError, ValueError):  # a name may be too long
        if Path(path).is_dir():
            return Path(path)
    raise InvalidWeightsError(
        "header.checkpoint_dir", f"{path[:_MOST_SHOWN]!r} is no folder the engine can read"
    )


async def receive(path: Path, size: int, chunks: AsyncIterator[bytes]) -> None:
    """Writes an upload to a file.

    Raises:
        StoreFullError: The disk has too little free space, or became full.
    """
    try:
        await asyncio.to_thread(check_room, path.parent, size)
        with path.open("xb") as file:
            await write_chunks(file, size, chunks, _SILENCE_MS, "the engine's limit")
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise StoreFullError(f"the disk of {path.parent} is full; make room on it") from error
