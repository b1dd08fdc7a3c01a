"""Fetches images that are given by URL, from hosts that the operator names, and from no others.

A URL comes from an agent, so nothing of it is trusted: its host is looked up once, every address
that is found must be a public one, and the connection goes to an address that was checked.
"""

import asyncio
import ipaddress
import ssl
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import h11

from rollmesh.runtime.caches import ByteCache
from rollmesh.runtime.errors import InvalidImageError, UnsupportedPartError
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.v1 import chat_pb2, gateway_pb2

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3
_MAX_URLS = 64
_AT_A_TIME = 16
"""Number of images that are fetched at a time; their bytes are held meanwhile."""
_OF_ONE_REQUEST = 4
"""Number of them that one request may have."""
_SENT_AS_IT_IS = "%/:;=@!$&'()*+,?~"
"""Characters of a path and a query that need no escape."""
_READ_BYTES = 65_536
_CACHE_BYTES = 64 * 1024 * 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Returns whether an IP address is one of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64:
            return False  # they hold an address of IPv4
    return ip.is_global and not ip.is_multicast


class _FetchError(Exception):
    """An image cannot be fetched; the message says why."""


class _BudgetError(Exception):
    """The images of a request have more bytes than they may have together."""


class _Budget:
    """Bytes that the images of one request may still have."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _BudgetError


class _Answer(NamedTuple):
    status: int
    location: str
    body: bytes


class ImageFetcher:
    """Fetches the images of requests; a URL is fetched once for a session, while it is cached."""

    def __init__(self, config: SidecarConfig, allowed: Callable[[str], bool] = is_public) -> None:
        """Takes the settings, and what decides whether an IP address may be connected to."""
        names = (name.strip().lower() for name in config.image_hosts.split(","))
        self._hosts = frozenset(name for name in names if name)
        self._max_bytes = config.max_image_bytes
        self._max_total = config.max_body_bytes
        self._timeout_s = config.image_timeout_ms / 1000
        self._request_timeout_s = config.request_images_timeout_ms / 1000
        self._allowed = allowed
        self._cache: ByteCache[tuple[str, str], bytes] = ByteCache(_CACHE_BYTES)
        self._turn = asyncio.Semaphore(_AT_A_TIME)
        self._tls = ssl.create_default_context()

    async def fill(self, chat: gateway_pb2.ChatRequest) -> None:
        """Puts the bytes of images in place of their URLs, a few at a time.

        Raises:
            UnsupportedPartError: The host of a URL is not one that images are fetched from.
            InvalidImageError: An image cannot be fetched, comes too late, or is too large, alone or
                together with the others.
        """
        images = _given_by_url(chat)
        if len(images) > _MAX_URLS:
            raise InvalidImageError(
                images[_MAX_URLS].field,
                f"is one of {len(images)} URLs; give at most {_MAX_URLS}, and send the bytes of "
                "other images",
            )
        by_url: dict[str, list[chat_pb2.Media]] = {}
        for image in images:
            self._check_host(urlsplit_of(image), image.field)
            by_url.setdefault(image.uri, []).append(image)
        try:
            async with asyncio.timeout(self._request_timeout_s), asyncio.TaskGroup() as group:
                left, budget = iter(by_url.values()), _Budget(self._max_total)
                for _ in range(min(len(by_url), _OF_ONE_REQUEST)):
                    group.create_task(self._fill_in_turn(chat.session_id, left, budget))
        except TimeoutError as error:
            late = next(image for image in images if image.HasField("uri"))
            raise InvalidImageError(
                late.field,
                f"did not come within the {self._request_timeout_s:g} s that the images of a "
                "request may take together; send its bytes",
            ) from error
        except ExceptionGroup as errors:
            raise errors.exceptions[0]  # noqa: B904 - it has its own cause

    async def _fill_in_turn(
        self, session_id: str, left: Iterator[list[chat_pb2.Media]], budget: _Budget
    ) -> None:
        """Fills images until none is left; those of one list have the same URL."""
        for same in left:
            try:
                data = await self._fetched(session_id, same[0], budget)
                budget.take(len(data) * (len(same) - 1))
            except _BudgetError as error:
                raise InvalidImageError(
                    same[0].field,
                    "is too large together with the other images that are given by URLs, which may "
                    f"have {self._max_total} bytes; send fewer or smaller images",
                ) from error
            for image in same:
                image.data = data

    async def _fetched(self, session_id: str, image: chat_pb2.Media, budget: _Budget) -> bytes:
        key = session_id, image.uri
        data = self._cache.find(key)
        if data is not None:
            budget.take(len(data))
            return data
        try:
            async with self._turn, asyncio.timeout(self._timeout_s):
                data = await self._fetch(image, budget)
        except TimeoutError as error:
            raise InvalidImageError(
                image.field, f"did not come within {self._timeout_s:g} s; send its bytes"
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise InvalidImageError(
                image.field,
                "cannot be fetched: the certificate of its host is refused, "
                f"{error.verify_message}; send its bytes",
            ) from error
        except (_FetchError, OSError, UnicodeError, h11.ProtocolError) as error:
            raise InvalidImageError(
                image.field, f"cannot be fetched: {error}; send its bytes"
            ) from error
        self._cache.add(key, data, len(data))
        return data

    async def _fetch(self, image: chat_pb2.Media, budget: _Budget) -> bytes:
        """Returns the bytes behind a URL, after redirects within its host."""
        url = first = urlsplit_of(image)
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._ask(url, budget)
            if answer.status not in _REDIRECTS or not answer.location:
                if answer.status != 200:
                    raise _FetchError(f"its host answers {answer.status}")
                return answer.body
            url = urlsplit(urljoin(url.geturl(), answer.location))
            if url.hostname != first.hostname or _place(url) is None:
                raise _FetchError("its host redirects to another")
            self._check_host(url, image.field)
        raise _FetchError("its host redirects again and again")

    async def _ask(self, url: SplitResult, budget: _Budget) -> _Answer:
        place = _place(url)
        assert place is not None
        host, port = place
        address = await self._address(host, port)
        is_secure = url.scheme == "https"
        reader, writer = await asyncio.open_connection(
            address,
            port,
            ssl=self._tls if is_secure else None,
            server_hostname=host if is_secure else None,
        )
        try:
            connection = h11.Connection(h11.CLIENT)
            asked = h11.Request(
                method="GET",
                target=_target(url),
                headers=[
                    ("host", url.netloc),
                    ("accept", "image/*"),
                    ("accept-encoding", "identity"),
                    ("user-agent", "rollmesh"),
                    ("connection", "close"),
                ],
            )
            for event in (asked, h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
            await writer.drain()
            return await self._answer(connection, reader, budget)
        finally:
            writer.transport.abort()  # nothing more is wanted, and closing could wait

    async def _answer(
        self, connection: h11.Connection, reader: asyncio.StreamReader, budget: _Budget
    ) -> _Answer:
        """Reads an answer; the body only if it is an image."""
        size = 0
        parts: list[bytes] = []
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                named = dict(event.headers)
                if event.status_code != 200:
                    location = named.get(b"location", b"").decode("latin-1")
                    return _Answer(event.status_code, location, b"")
                self._check_size(int(named.get(b"content-length", b"0")))
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                self._check_size(size)
                budget.take(len(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return _Answer(200, "", b"".join(parts))
            elif not isinstance(event, h11.InformationalResponse):
                raise _FetchError("its host ended the connection")

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise _FetchError(f"it has more than {self._max_bytes} bytes")

    async def _address(self, host: str, port: int) -> str:
        """Returns an address of a host, all of whose addresses may be connected to."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=1)  # SOCK_STREAM
        addresses = [str(one[4][0]) for one in found]
        if not addresses or not all(map(self._allowed, addresses)):
            raise _FetchError("its host is not on the public internet")
        return addresses[0]

    def _check_host(self, url: SplitResult, field: str) -> None:
        place = _place(url)
        if place is None or url.username is not None or url.password is not None:
            raise InvalidImageError(
                field, "is not a URL of http or https with a host; send the bytes as a data URL"
            )
        host, port = place
        named = {f"{host}:{port}"} | ({host} if port == _PORTS[url.scheme] else set())
        if not named & self._hosts:
            raise UnsupportedPartError(
                field,
                f"is a URL of {host}:{port}, from which no images are fetched; send the bytes as a "
                "data URL, or name the host in image_hosts of the sidecar",
            )


def urlsplit_of(image: chat_pb2.Media) -> SplitResult:
    """Returns the parts of an image's URL.

    Raises:
        InvalidImageError: It is malformed.
    """
    try:
        return urlsplit(image.uri)
    except ValueError as error:
        raise InvalidImageError(image.field, f"is not a URL: {error}") from error


def _given_by_url(chat: gateway_pb2.ChatRequest) -> list[chat_pb2.Media]:
    return [
        part.image
        for message in chat.messages
        for part in message.content
        if part.HasField("image") and part.image.HasField("uri")
    ]


def _target(url: SplitResult) -> str:
    """Returns the path and the query of a URL as HTTP sends them."""
    path = quote(url.path or "/", safe=_SENT_AS_IT_IS)
    return f"{path}?{quote(url.query, safe=_SENT_AS_IT_IS)}" if url.query else path


def _place(url: SplitResult) -> tuple[str, int] | None:
    """Returns the host and the port of a URL; None if it has none."""
    try:
        host, port = url.hostname, url.port
    except ValueError:
        return None
    if not host or url.scheme not in _PORTS:
        return None
    return host, _PORTS[url.scheme] if port is None else port
