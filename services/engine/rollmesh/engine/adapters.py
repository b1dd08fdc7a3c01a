"""The adapter revisions of an engine: received, loaded beside the others, and unloaded after use.

A revision that is unloaded takes no new generations. It keeps its room until the last generation
that uses it has ended, because the model may read its folder again until then.
"""

import asyncio
import itertools
import json
import logging
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from rollmesh.engine.backend import Adapter, Backend
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.control import Control, receive, to_the_end
from rollmesh.runtime.errors import (
    AdapterUnknownError,
    InvalidFieldError,
    OverloadedError,
    StaleVersionError,
)
from rollmesh.runtime.process import Scratch
from rollmesh.runtime.rpc import check_adapter
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import engine_pb2, sampling_pb2

_log = logging.getLogger(__name__)
_CONFIG = "header.config_json"
_RETRY_MS, _SHOWN = 1_000, 100
_UNSUPPORTED = ("modules_to_save", "use_dora", "lora_bias", "trainable_token_indices")
"""Fields of PEFT's config that train more than the matrices, and must be empty or false."""
_ATOM = r"(?:[\w.-]|\\[d.-]|\[\^?(?:\w-\w|[\w.])+\])"
_NAME = re.compile(rf"\^?(?:{_ATOM}[*+]?|\((?:\?:)?{_ATOM}+(?:\|{_ATOM}+)*\))+\$?", re.ASCII)
"""A name in a pattern of PEFT's config. It may repeat characters and choose from alternatives."""
_MOST_CHARS, _MOST_CHOICES = 128, 2
"""Of a name. Each choice multiplies the time of a match."""
_MOST_NAMES, _MOST_CHOICES_OF_ALL = 480, 64
"""Of an adapter. vLLM matches each module with each name, and keeps 500 of them compiled."""
Revision: TypeAlias = tuple[str, int]
"""Name and version."""


def _revision_of(adapter: sampling_pb2.AdapterRef) -> Revision:
    return adapter.name, adapter.version


def read_config(text: str, max_rank: int) -> dict[str, Any]:
    """Returns the fields of PEFT's adapter_config.json.

    Raises:
        InvalidFieldError: It is no config of a plain LoRA adapter, or its rank is too high.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(_CONFIG, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidFieldError(_CONFIG, "is not an object; give PEFT's adapter_config.json")
    rank, targets = config.get("r"), config.get("target_modules")
    alpha: Any = config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        raise InvalidFieldError(_CONFIG, f"peft_type: is {config.get('peft_type')!r}; give 'LORA'")
    ranks, alphas = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
    keys = ranks.keys() | alphas.keys()
    choices = sum(map(_choices, keys))
    if len(keys) > _MOST_NAMES or choices > _MOST_CHOICES_OF_ALL:
        raise InvalidFieldError(
            _CONFIG,
            f"rank_pattern, alpha_pattern: have {len(keys)} names with {choices} choices; give at "
            f"most {_MOST_NAMES} with {_MOST_CHOICES_OF_ALL}",
        )
    own = {f"rank_pattern[{at!r}]": ranks[at] for at in ranks}
    for name, one in {"r": rank, **own}.items():
        if type(one) is not int or not 0 < one <= max_rank:
            above = type(one) is int and one > 0
            more = f", or start the engine with max_adapter_rank={one!r:.80}" if above else ""
            raise InvalidFieldError(
                _CONFIG, f"{name:.{_SHOWN}}: is {one!r:.80}; give 1 to {max_rank}{more}"
            )
    own = {f"alpha_pattern[{at!r}]": alphas[at] for at in alphas}
    for name, one in {"lora_alpha": alpha, **own}.items():
        if type(one) not in {int, float} or not abs(one) <= sys.float_info.max:
            raise InvalidFieldError(_CONFIG, f"{name:.{_SHOWN}}: is {one!r:.80}; give a number")
    if config.get("bias", "none") != "none":
        raise InvalidFieldError(_CONFIG, f"bias: is {config['bias']!r}; give 'none'")
    names = isinstance(targets, list) and all(isinstance(one, str) and one for one in targets)
    if not targets or not (names or isinstance(targets, str)):
        raise InvalidFieldError(_CONFIG, f"target_modules: is {targets!r:.80}; give module names")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise InvalidFieldError(_CONFIG, f"{name}: is not supported; train without it")
    return config


def _pattern(config: dict[str, Any], field: str) -> dict[str, Any]:
    """Returns the values that modules have of their own, by names whose match is bounded.

    PEFT and vLLM match a name as a regular expression, so a wrong one could take for ever.
    """
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict):
        raise InvalidFieldError(_CONFIG, f"{field}: is no object; give values by module")
    for name in pattern:
        is_bounded = len(name) <= _MOST_CHARS and _NAME.fullmatch(name)
        try:
            re.compile(name if is_bounded else "")
        except re.error:  # a range such as [3-0]
            is_bounded = None
        if not is_bounded or _choices(name) > _MOST_CHOICES:
            raise InvalidFieldError(
                _CONFIG,
                f"{field}[{name!r:.{_SHOWN}}]: is not taken; give the name of a module, at most "
                f"{_MOST_CHARS} characters with {_MOST_CHOICES} of .*, \\d+ or (a|b)",
            )
    return pattern


def _choices(name: str) -> int:
    """Returns the number of repeated parts and groups of a name."""
    return sum(map(name.count, "*+("))


@dataclass(slots=True, eq=False)
class _Held:
    """A revision that the model holds."""

    adapter: Adapter
    users: int = 0
    """Number of generations that use it."""
    leaves: bool = False
    """Whether it takes no new generations."""


class Adapters:
    """The adapter revisions of one backend. They are loaded one at a time."""

    def __init__(
        self, backend: Backend, control: Control, config: EngineConfig, changed: asyncio.Event
    ) -> None:
        """Takes the backend, its control, the settings, and an event that is set by changes."""
        self._backend = backend
        self._control = control
        self.most = config.max_adapters
        """Number of revisions for which there is room."""
        self._max_rank = config.max_adapter_rank
        self._changed = changed
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[Revision, _Held] = {}
        self._scratch: Scratch | None = None

    def loaded(self) -> list[engine_pb2.LoadedAdapter]:
        """Returns the revisions that generations may use, by name and version."""
        return [
            engine_pb2.LoadedAdapter(adapter=one.adapter.ref, push_id=one.adapter.push_id)
            for _, one in sorted(self._held.items(), key=lambda pair: pair[0])
            if not one.leaves
        ]

    @contextmanager
    def use(self, ref: sampling_pb2.AdapterRef) -> Iterator[Adapter]:
        """Keeps an adapter in the block, for one generation.

        Raises:
            InvalidFieldError: Its name or version is malformed.
            AdapterUnknownError: It is not loaded.
        """
        check_adapter(ref, "adapter")
        held = self._held.get(_revision_of(ref))
        if held is None or held.leaves:
            raise AdapterUnknownError(
                f"adapter: {ref.name!r} version {ref.version} is not loaded; ask another engine, "
                "or push it"
            )
        held.users += 1
        try:
            yield held.adapter
        finally:
            held.users -= 1

    async def load(self, header: engine_pb2.AdapterHeader, chunks: AsyncIterator[bytes]) -> None:
        """Loads a revision, and unloads what it replaces. All is checked before.

        Raises:
            InvalidFieldError: The config or a tensor does not fit the model, or there is no room.
            StaleVersionError: The engine holds the revision from another push.
            OverloadedError: Generations use the room that it needs.
            EngineAsleepError: There is no memory.
            StoreFullError: The disk has no room for the upload.
        """
        async with self._lock:
            key, replaced = _revision_of(header.adapter), set(map(_revision_of, header.replaces))
            config = read_config(header.config_json, self._max_rank) if self.most else {}
            await self._leave(())
            if (held := self._held.get(key)) is not None:
                if held.adapter.push_id != header.push_id:
                    raise StaleVersionError(
                        f"header.adapter: version {header.adapter.version} of "
                        f"{header.adapter.name!r} was loaded by another push; count up",
                        policy_version=header.adapter.version,
                    )
                held.leaves = False
                self._changed.set()
                return
            held_ones = self._held.items()
            staying = sum(not one.leaves for key, one in held_ones if key not in replaced)
            used = sum(bool(one.users) for key, one in held_ones if one.leaves or key in replaced)
            if staying + 1 > self.most:
                raise InvalidFieldError(
                    "header.adapter",
                    f"{staying + 1} revisions are needed, and the engine has room for {self.most}; "
                    f"start it with max_adapters={staying + 1}, or unload others",
                    needed=staying + 1,
                )
            if staying + used + 1 > self.most:
                raise OverloadedError(
                    f"header.adapter: generations use {used} revisions that are unloaded, so "
                    f"{staying + used + 1} are needed, and the engine has room for {self.most}; "
                    "wait, or start it with more max_adapters",
                    retry_delay_ms=_RETRY_MS,
                )
            if header.safetensors_bytes > (most := self._backend.limits.max_adapter_bytes):
                raise InvalidFieldError(
                    "header.safetensors_bytes",
                    f"is {header.safetensors_bytes}; adapters of the model have at most {most} at "
                    f"max_adapter_rank={self._max_rank}",
                )
            self._control.check_awake()  # an upload would be for nothing
            if self._scratch is None:
                self._scratch = await asyncio.to_thread(Scratch, "adapters")
            number = next(self._numbers)
            folder = self._scratch.path / str(number)
            adapter = Adapter(header.adapter, header.push_id, number, folder, config)
            try:
                folder.mkdir()
                (folder / "adapter_config.json").write_text(header.config_json)
                await receive(adapter.file, header.safetensors_bytes, chunks)
                await self._backend.check_adapter(adapter)
                await to_the_end(self._add(adapter, replaced - {key}))
            finally:
                if key not in self._held:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def unload(self, adapter: sampling_pb2.AdapterRef) -> None:
        """Unloads a revision, or with version 0 all of its name. Running generations keep it."""
        async with self._lock:
            of_name = [one for one in self._held if one[0] == adapter.name]
            await self._leave(one for one in of_name if adapter.version in {0, one[1]})

    async def sweep(self) -> None:
        """Frees the room of unloaded revisions whose last generation has ended."""
        async with self._lock:
            await self._leave(())

    async def close(self) -> None:
        """Removes the files."""
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)

    async def _add(self, adapter: Adapter, replaced: set[Revision]) -> None:
        """Loads a revision that was checked, unless the engine fell asleep during the upload."""
        self._control.state.adapters += 1  # a sleep that is asked from now on keeps the weights
        try:
            await self._control.alone(partial(self._backend.load_adapter, adapter), awake=True)
            self._held[_revision_of(adapter.ref)] = _Held(adapter)
        finally:
            self._control.state.adapters = len(self._held)
        _log.info(
            "adapter loaded", extra=fields(adapter=adapter.ref.name, version=adapter.ref.version)
        )
        await self._leave(replaced)

    async def _leave(self, revisions: Iterable[Revision]) -> None:
        """Unloads revisions, and those that left before, unless generations use them."""
        for key in self._held.keys() & set(revisions):
            self._held[key].leaves = True

        async def drop_unused() -> None:
            for key, one in tuple(self._held.items()):
                if one.leaves and not one.users:
                    await self._control.alone(partial(self._backend.unload_adapter, one.adapter))
                    del self._held[key]
                    await asyncio.to_thread(shutil.rmtree, one.adapter.folder)
                    name, version = key
                    _log.info("adapter unloaded", extra=fields(adapter=name, version=version))
            self._control.state.adapters = len(self._held)
            self._changed.set()

        await to_the_end(drop_unused())
