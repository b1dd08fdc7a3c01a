"""A connection to Redis that gives typed errors, and its check for durability."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from redis import asyncio as redis, exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollmesh.collector.storage.store import RETRY_MS
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import StoreAwayError, StoreError, StoreFullError
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_CONNECTIONS = 32
_PREFIX = "rollmesh:"
Value: TypeAlias = "str | bytes | int | float"


class Script(NamedTuple):
    """A call of one of `redis_scripts`."""

    source: str
    now_ms: int
    arguments: Sequence[Value]


Command: TypeAlias = "Script | Sequence[Value]"


class RedisClient:
    """Commands and scripts of one Redis, under a prefix."""

    def __init__(self, connection: Any) -> None:
        """Takes a `redis.asyncio.Redis`."""
        self._redis = connection
        connection.response_callbacks.clear()  # replies as Redis gives them

    def key(self, *parts: str) -> str:
        """Returns a key."""
        return _PREFIX + ":".join(parts)

    async def run(self, command: str, *arguments: Value) -> Any:
        """Runs a command.

        Raises:
            StoreAwayError: Redis cannot be reached or is not ready.
            StoreFullError: It takes no more: its memory or its disk is full.
            StoreError: It refuses in another way.
        """
        with _typed():
            return await self._redis.execute_command(command, *arguments)

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands with one trip to Redis; others may come in between. Errors as in `run`."""
        return await self._pipe(commands, at_once=False)

    async def run_at_once(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands as one: no other comes in between, and Redis syncs what they write once.

        Errors as in `run`; where it refuses one of them, the others are done or not.
        """
        return await self._pipe(commands, at_once=True)

    async def _pipe(self, commands: Sequence[Command], *, at_once: bool) -> list[Any]:
        if not commands:
            return []
        sent: set[str] = set()
        with _typed():
            pipeline = self._redis.pipeline(transaction=at_once)
            for command in commands:
                if isinstance(command, Script):
                    pipeline.execute_command(*_spelled(command, sent))
                else:
                    pipeline.execute_command(*command)
            found: list[Any] = await pipeline.execute()
            return found


def _spelled(script: Script, sent: set[str]) -> tuple[Value, ...]:
    """Returns a script as a command: the first of a trip by its text, so that Redis knows it."""
    source, arguments = script.source, (0, _PREFIX, script.now_ms, *script.arguments)
    if source in sent:
        return ("EVALSHA", _sha_of(source), *arguments)
    sent.add(source)
    return ("EVAL", source, *arguments)


@cache
def _sha_of(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisClient]:
    """Connects, and checks that Redis keeps what it acknowledges.

    Raises:
        ConfigError: The address is none, or Redis may lose writes.
        StoreAwayError: Redis cannot be reached.
    """
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # the caller is told, and knows what may be repeated
        )
    except ValueError as error:
        raise ConfigError(f"store: {error}") from error
    client = RedisClient(redis.Redis(connection_pool=pool))
    try:
        await _check_durable(client, urlsplit(url).netloc.rpartition("@")[2])
        yield client
    finally:
        await pool.disconnect()


async def _check_durable(client: RedisClient, address: str) -> None:
    await client.run("PING")
    try:
        wanted = {"appendonly": "yes", "appendfsync": "always"}
        for name, value in wanted.items():
            found = pairs(await client.run("CONFIG GET", name)).get(name)
            if found != value:
                raise ConfigError(
                    f"store: redis at {address} has {name} {found}, which loses what it "
                    f"acknowledged; set {name} {value}"
                )
    except StoreError as error:  # a managed Redis hides its settings
        _log.warning("redis may lose writes: cannot ask", extra=fields(error=str(error)))


def pairs(found: Sequence[Any]) -> dict[str, str]:
    """Returns names and values that Redis gave one after the other."""
    return {text(name): text(value) for name, value in zip(found[::2], found[1::2], strict=True)}


def text(value: Any) -> str:
    """Returns what Redis gave as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def _typed() -> Iterator[None]:
    """Gives typed errors, and the cancellations that redis swallows.

    It sends under `asyncio.wait_for`, which loses one in Python 3.11 where it comes as the sending
    ends: who was cancelled would go on, and a collector that stops would wait for it for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        with _read_errors():
            yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


@contextmanager
def _read_errors() -> Iterator[None]:
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.BusyLoadingError) as e:
        raise StoreAwayError(f"redis is away: {e}", retry_delay_ms=RETRY_MS) from e
    except exceptions.RedisError as e:
        if isinstance(e, exceptions.OutOfMemoryError) or "OOM" in str(e) or "MISCONF" in str(e):
            raise StoreFullError(f"redis takes no more: {e}", retry_delay_ms=RETRY_MS) from e
        raise StoreError(f"redis failed: {e}") from e
