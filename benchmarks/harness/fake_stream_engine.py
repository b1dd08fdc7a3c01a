"""An OpenAI-compatible engine that answers token by token, to run behind other routers.

Arguments: its port, the reply, the number of its tokens, and tokens per second. It answers chat
completions, streamed and not, and the health checks that routers make.
"""

import asyncio
import contextlib
import json
import sys
import time

import uvloop

_GET = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "policy", "object": "model"}]},
    "/version": {"version": "0.32.0"},
}


class FakeStreamEngine:
    """One engine."""

    def __init__(self, reply: str, tokens: int, tokens_per_second: float) -> None:
        """Takes the reply to every request, and how fast it is sampled."""
        step = -(-len(reply) // tokens)
        self._pieces = [reply[at : at + step] for at in range(0, len(reply), step)]
        self._reply = reply
        self._step_s = 1 / tokens_per_second

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                _, found, rest = head.lower().partition("content-length:")
                body = await reader.readexactly(int(rest.split("\r\n", 1)[0]) if found else 0)
                path = head.split(" ", 2)[1].partition("?")[0]
                if path == "/v1/chat/completions":
                    await self._complete(json.loads(body), writer)
                else:
                    known = path in _GET
                    _write(writer, _GET.get(path, {"error": "not found"}), 200 if known else 404)
                await writer.drain()
        writer.close()

    async def _complete(self, request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        answer = {"id": "chatcmpl-0", "created": int(time.time()), "model": "policy"}
        if not request.get("stream"):
            await asyncio.sleep(self._step_s * len(self._pieces))
            message = {"role": "assistant", "content": self._reply}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": len(self._pieces), "total_tokens": 1}
            whole = {**answer, "object": "chat.completion", "choices": [choice], "usage": usage}
            _write(writer, whole, 200)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for at, piece in enumerate(self._pieces, start=1):
            await asyncio.sleep(self._step_s)
            choice = {
                "index": 0,
                "delta": {"role": "assistant", "content": piece},
                "finish_reason": "stop" if at == len(self._pieces) else None,
            }
            chunk = {**answer, "object": "chat.completion.chunk", "choices": [choice]}
            _chunk(writer, f"data: {json.dumps(chunk)}\n\n".encode())
            await writer.drain()
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _write(writer: asyncio.StreamWriter, value: object, status: int) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main(port: str, reply: str, tokens: str, tokens_per_second: str) -> None:
    """Serves until it is killed."""
    engine = FakeStreamEngine(reply, int(tokens), float(tokens_per_second))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", int(port))
    print("READY", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
