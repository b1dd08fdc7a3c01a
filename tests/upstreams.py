"""A small server with OpenAI's chat completions API, and gateways whose model it serves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "sk-upstream-secret"


@dataclass
class Server:
    """Answers each request by the text of its last message."""

    url: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of all requests."""
    failures: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Status and body of the next answers, before it answers well again."""
    retry_after: str = "0"
    """What those with an error say."""
    cuts: int = 0
    """Number of the next streams that it cuts after their first text."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request has arrived."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers to "wait" are held until it is set."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller left while an answer was held."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            quoted = f"Incorrect API key provided: {request.headers.get('authorization')}"
            return web.json_response({"error": {"message": quoted}}, status=401)
        body = await request.json()
        self.seen.append(body)
        self.started.set()
        if self.failures:
            status, told = self.failures.pop(0)
            return web.json_response(told, status=status, headers={"retry-after": self.retry_after})
        message, finish = answer_to(body)
        if body["messages"][-1]["content"] == "wait":
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.gone.set()
                raise
        usage = {
            "prompt_tokens": 7 * len(body["messages"]),
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        logprobs = None
        if body.get("logprobs"):
            words = (message["content"] or "").split()
            logprobs = {"content": [{"token": word, "logprob": -0.5} for word in words]}
        head = {"id": "x", "object": "chat.completion", "model": "big-2026"}
        if not body["stream"]:
            choice = {"index": 0, "message": message, "finish_reason": finish}
            choice["logprobs"] = logprobs
            return web.json_response({**head, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for delta in deltas_of(message):
            await send(response, {**head, "choices": [{"index": 0, "delta": delta}]})
            if self.cuts and delta.get("content"):
                self.cuts -= 1
                assert request.transport is not None
                request.transport.close()
                return response
        last = {"index": 0, "delta": {}, "finish_reason": finish, "logprobs": logprobs}
        await send(response, {**head, "choices": [last]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await send(response, {**head, "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def answer_to(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    last = body["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": f"You said {last['content']}."}
    if body.get("tools") and last["role"] != "tool":
        name = body["tools"][0]["function"]["name"]
        calls = [
            {
                "id": f"call_{at}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps({"at": at})},
            }
            for at in range(2)
        ]
        return message | {"tool_calls": calls, "reasoning_content": "I call."}, "tool_calls"
    if last["content"] == "long":
        return message, "length"
    return message, "stop"


def deltas_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if "reasoning_content" in message:
        deltas.append({"reasoning_content": message["reasoning_content"]})
    text = message["content"]
    deltas += [{"content": text[:4]}, {"content": text[4:]}]
    for at, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        begin = {**call, "index": at, "function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [begin]})
        for part in (function["arguments"][:3], function["arguments"][3:]):
            deltas.append({"tool_calls": [{"index": at, "function": {"arguments": part}}]})
    return deltas


@asynccontextmanager
async def upstream() -> AsyncIterator[Server]:
    """Serves until the block ends."""
    server, app = Server(), web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
