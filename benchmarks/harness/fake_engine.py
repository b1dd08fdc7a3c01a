"""An OpenAI-compatible engine of negligible cost, to run behind the peer.

It answers as vLLM does with `return_token_ids`: prompt ids, sampled ids and log-probs of the right
length, and always the same text. Ids are sliced from one precomputed byte string, so prompts of any
length are cheap. The engine of the mesh does not tokenize either.
"""

import asyncio
import json
import sys
from typing import cast

import uvloop

_ID = b"1234,"  # every id has four digits: N ids are 5 N - 1 bytes
_MOST_IDS = 131_072


class FakeEngine(asyncio.Protocol):
    """One connection."""

    def __init__(self, tail: bytes, bytes_per_token: float) -> None:
        """Takes the precomputed end of every answer, and the bytes per prompt token."""
        self._tail = tail
        self._bytes_per_token = bytes_per_token
        self._data = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        """Answers every request that has arrived completely."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            size = int(rest.split(b"\r\n", 1)[0]) if found else 0
            if len(self._data) < end + 4 + size:
                return
            del self._data[: end + 4 + size]
            self._answer(size)

    def _answer(self, size: int) -> None:
        assert self._transport is not None
        ids = min(max(int(size / self._bytes_per_token), 1), _MOST_IDS)
        body = b'{"prompt_token_ids":[%b],%b' % (_IDS[: len(_ID) * ids - 1], self._tail)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )


_IDS = _ID * _MOST_IDS


def _tail(reply: str, reply_tokens: int) -> bytes:
    """Returns an answer without its opening brace and prompt ids."""
    logprobs: list[dict[str, object]] = [
        {"token": "word", "logprob": -0.25 * (at % 7), "bytes": None, "top_logprobs": []}
        for at in range(reply_tokens)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": reply},
        "token_ids": [1234] * reply_tokens,
        "logprobs": {"content": logprobs},
        "finish_reason": "stop",
    }
    answer = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": reply_tokens},
    }
    return json.dumps(answer)[1:].encode()


async def _serve(settings: dict[str, object]) -> None:
    reply, reply_tokens = str(settings["reply"]), int(str(settings["reply_tokens"]))
    tail, ratio = _tail(reply, reply_tokens), float(str(settings["bytes_per_token"]))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeEngine(tail, ratio), "127.0.0.1", 0)
    print("READY", json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(json.load(sys.stdin)))
