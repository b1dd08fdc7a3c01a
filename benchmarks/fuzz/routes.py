"""Bodies and broken HTTP to the sidecar, over connections that are kept, dropped or left."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress

import h11

from benchmarks.fuzz import values
from benchmarks.fuzz.bodies import SEEDS, Bodies
from benchmarks.fuzz.findings import Findings

_LIMIT_S = 60.0
_FATAL = {500, 501, 505}
_SMALL = 65_536


class RouteAttack:
    """Sends requests to a sidecar, one after the other."""

    def __init__(
        self,
        rng: random.Random,
        address: str,
        pool: Sequence[str],
        tokens: Sequence[str],
        findings: Findings,
    ) -> None:
        """Takes the sidecar.

        Args:
            rng: The source of choices.
            address: host:port.
            pool: Texts of this run.
            tokens: Of the mesh's roles. They open no session.
            findings: Where the outcome is noted.
        """
        self._rng = rng
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._bodies = Bodies(rng, pool)
        self._tokens = tokens
        self._findings = findings
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def once(self, key: str) -> None:
        """Sends one request in a session.

        Args:
            key: Key of the session.
        """
        rng = self._rng
        route = rng.choice(list(SEEDS))
        is_wrong = rng.random() < 0.1
        body = self._bodies.made(route)
        head = self._head(route, self._wrong(key) if is_wrong else key, body)
        data = head + body
        if is_wrong:  # a changed request may have been two, whose second answer is still to come
            await self.close()
        elif rng.random() < 0.05:
            data = values.changed_bytes(rng, data, data)
        self._findings.sent()
        try:
            async with asyncio.timeout(_LIMIT_S):
                status = await self._send(route, data, leaves=rng.random() < 0.08)
            if is_wrong and 0 < status < 400:
                what = f"a wrong key was answered {status}"
                self._findings.found("role_violations", route, what, data)
        except TimeoutError:
            if data == head + body:  # a request that was cut waits for its rest, and is timed out
                self._findings.found("hangs", route, "no answer", data)
            await self.close()
        except (OSError, h11.ProtocolError) as error:
            self._findings.answered(route, type(error).__name__)
            await self.close()

    async def valid(self, key: str) -> bool:
        """Sends a request that must be served. Returns whether it was."""
        route = self._rng.choice(list(SEEDS))
        body = json.dumps(self._bodies.valid(route)).encode()
        await self.close()
        status = await self._send(route, self._head(route, key, body), body, leaves=False)
        return status == 200

    async def close(self) -> None:
        """Closes the connection."""
        if self._open is not None:
            self._open[1].close()
            with suppress(OSError):
                await self._open[1].wait_closed()
            self._open = None

    def _wrong(self, key: str) -> str:
        """Returns what opens no session."""
        return self._rng.choice(
            (
                key[:-1],
                f"{key[:-1]}~",
                f"{key}x",
                key.swapcase(),
                key.split("-")[1],
                "",
                "x" * 5_000,
                *self._tokens,
            )
        )

    def _head(self, route: str, key: str, body: bytes) -> bytes:
        path = f"/sessions/{key}{route.replace('{model:path}', 'policy')}"
        if "stream" in route and self._rng.random() < 0.5:
            path += "?alt=sse"
        lines = [
            f"POST {path} HTTP/1.1",
            "host: sidecar",
            "content-type: application/json",
            f"authorization: Bearer {key}",
            f"content-length: {len(body)}",
        ]
        if self._rng.random() < 0.1:
            lines.append(f"x-stainless-retry-count: {self._rng.choice(('1', '0', '-1', 'x'))}")
        if self._rng.random() < 0.1:
            lines.append(f"idempotency-key: {self._rng.choice(('a', 'b', 'x' * 300))}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    async def _send(self, route: str, *parts: bytes, leaves: bool) -> int:
        """Sends a request. Returns the status of its answer, 0 if it was left."""
        if self._open is None:
            self._open = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._open
        writer.write(b"".join(parts))
        await writer.drain()
        if leaves:
            await asyncio.sleep(self._rng.random() * 0.05)
            await self.close()
            return 0
        status, body, is_kept = await _answer(reader)
        self._findings.answered(route, str(status))
        if not is_kept or parts[0][:5] != b"POST ":
            await self.close()
        problem = _problem(status, body)
        if problem:
            self._findings.found("untyped_errors", route, problem, *parts)
        return status


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Returns status and body of an answer, and whether the connection can be used again."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, bytearray()
    while True:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                data = await reader.read(_SMALL)
                if not data and not status:
                    raise ConnectionError("closed")
                connection.receive_data(data)
            case h11.Response():
                status = event.status_code
            case h11.Data():
                body += event.data
            case h11.EndOfMessage():
                kept = connection.their_state is h11.DONE and not connection.trailing_data[0]
                return status, bytes(body), kept
            case _:
                return status, bytes(body), False


def _problem(status: int, body: bytes) -> str:
    """Returns what is wrong with an answer. Empty if it is typed."""
    text = body.decode(errors="replace")
    if status in _FATAL:
        return f"{status} {text[:500]}"
    if status >= 400:
        with suppress(ValueError, KeyError, TypeError):
            error = json.loads(text)["error"]
            if error["message"] and (error.get("type") or error.get("status")):  # Google's
                return ""
        return f"{status} without an error: {text[:500]}"
    return "unexpected error in a stream" if "unexpected error; see the log" in text else ""
