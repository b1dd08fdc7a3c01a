"""A Redis connection that raises typed errors, and the durability check at connect."""

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
_FORMAT = 1  # incremented with every change of the keys, their values or `records.split`
Value: TypeAlias = "str | bytes | int | float"


class Script(NamedTuple):
    """A call of one of the scripts in `scripts`."""

    source: str
    now_ms: int
    arguments: Sequence[Value]


Command: TypeAlias = "Script | Sequence[Value]"


class RedisClient:
    """Commands and scripts on one Redis, with a common key prefix."""

    def __init__(self, connection: Any) -> None:
        """Takes a `redis.asyncio.Redis`."""
        self._redis = connection
        connection.response_callbacks.clear()  # keep raw replies

    def key(self, *parts: str) -> str:
        """Returns a key with the prefix."""
        return _PREFIX + ":".join(parts)

    async def run(self, command: str, *arguments: Value) -> Any:
        """Runs a command.

        Raises:
            StoreAwayError: Redis cannot be reached or is not ready.
            StoreFullError: Redis is out of memory or disk space.
            StoreError: Redis rejects the command for another reason.
        """
        with _typed():
            return await self._redis.execute_command(command, *arguments)

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands in one round trip, not atomically. Raises the same errors as `run`."""
        return await self._pipe(commands, at_once=False)

    async def run_at_once(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands atomically and in one round trip; Redis syncs their writes once.

        Raises the same errors as `run`; if one is rejected, the others may or may not have run.
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
    """Returns a script as a command; its first call in a round trip carries the script text."""
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
    """Connects; checks that Redis keeps the writes it acknowledges and that its data is readable.

    Raises:
        ConfigError: The URL is invalid, Redis may lose writes, or another release wrote its data.
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
            retry=Retry(NoBackoff(), 0),  # only the caller knows what is safe to retry
        )
    except ValueError as error:
        raise ConfigError(f"store: {error}") from error
    client = RedisClient(redis.Redis(connection_pool=pool))
    try:
        address = urlsplit(url).netloc.rpartition("@")[2]
        await _check_durable(client, address)
        await _check_format(client, address)
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
                    f"store: the Redis at {address} has {name} {found} and can lose "
                    f"acknowledged writes; set {name} {value}"
                )
    except StoreError as error:  # a managed Redis hides its settings
        _log.warning(
            "cannot check whether Redis keeps acknowledged writes", extra=fields(error=str(error))
        )


async def _check_format(client: RedisClient, address: str) -> None:
    """Checks the format of the stored data; an empty Redis takes this release's format."""
    key = client.key("format")
    if not await client.run("EXISTS", client.key("n")):
        await client.run("SET", key, _FORMAT)
    found = await client.run("GET", key)
    if found != str(_FORMAT).encode():
        raise ConfigError(
            f"store: redis at {address} has format {text(found or 0)}, this release needs "
            f"{_FORMAT}; drain it with the release that wrote it, or give another Redis"
        )


def pairs(found: Sequence[Any]) -> dict[str, str]:
    """Returns a dict from a flat reply of alternating names and values."""
    return {text(name): text(value) for name, value in zip(found[::2], found[1::2], strict=True)}


def text(value: Any) -> str:
    """Returns a Redis value as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def _typed() -> Iterator[None]:
    """Converts errors to typed ones, and restores cancellations that redis swallows.

    redis sends under `asyncio.wait_for`, which in Python 3.11 loses a cancellation that arrives as
    the send completes. The cancelled task would go on, and a stopping collector would wait for it
    forever.
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
        raise StoreAwayError(
            f"the Redis server cannot be reached: {e}", retry_delay_ms=RETRY_MS
        ) from e
    except exceptions.RedisError as e:
        if isinstance(e, exceptions.OutOfMemoryError) or "OOM" in str(e) or "MISCONF" in str(e):
            raise StoreFullError(
                f"the Redis server refuses writes: {e}", retry_delay_ms=RETRY_MS
            ) from e
        raise StoreError(f"the Redis server failed: {e}") from e
