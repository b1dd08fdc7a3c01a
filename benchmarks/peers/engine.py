"""An engine that follows a script, for servers that forward to an OpenAI-compatible engine.

It answers chat completions as `vllm serve --return-tokens-as-token-ids` does: the prompt is the
chat template over the messages, the answer is a fixed text. `/v1/completions` and
`/inference/v1/generate` take prompts of token ids. `calls` has the prompts and samples. It
misbehaves only where a check of the kit asks for it.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web
from tokenizers import AddedToken, Tokenizer

from benchmarks.peers.door import listening
from examples.demo.chatml import END, START, make_tokenizer
from rollmesh.conformance import NO_IDS, NO_TEXT, OTHER_IDS

CONTEXT = 8192
REPLY = "Sample {}. The answer is 42, as 6 times 7 is 42. I am sure of it."
_GLUE = "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
_THOUGHT = "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}\n"
_LOGPROB = -0.5


def make_model(folder: Path) -> Path:
    """Writes a tokenizer, and a template that glues."""
    replies = [REPLY.format(one) for one in range(500)]
    tokenizer = make_tokenizer(replies, 600, folder, CONTEXT)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    glue(folder)
    return folder


def glue(folder: Path) -> None:
    """Has a model's template print an empty thought where thinking is off."""
    template = folder / "chat_template.jinja"
    template.write_text(f"{template.read_text().rstrip()}\n{_GLUE}{_THOUGHT}")


@dataclass
class Engine:
    """The engine."""

    model: Path
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Prompt, and sampled ids of each choice: null where they were left out of the answer."""
    numbers: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        """Reads the model's files."""
        self.tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        text = (self.model / "chat_template.jinja").read_text()
        self.template = jinja2.Environment(autoescape=False).from_string(text)  # noqa: S701 - text

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return list(self.tokenizer.encode(text).ids)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a chat completion, and logs it."""
        options = body.get("chat_template_kwargs") or {}
        text = self.template.render(
            messages=body["messages"], tools=None, add_generation_prompt=True, **options
        )
        prompt = self.encode(text)
        asked = str(body["messages"][-1]["content"])
        samples, kept = self._samples(body, prompt, asked)
        shown = bool(body.get("return_token_ids")) and kept[0] is not None
        choices = [
            {
                "index": at,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "length" if reason == "length" else "stop",
                "stop_reason": None if reason == "length" else reason or None,
                "logprobs": _logprobs(ids) if body.get("logprobs") and kept[at] else None,
                **({"token_ids": ids} if shown else {}),
            }
            for at, (ids, text, reason) in enumerate(samples)
        ]
        sampled = sum(len(ids) for ids, _, _ in samples)
        return {
            "id": f"chatcmpl-{next(self.numbers)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
            **({"prompt_token_ids": prompt} if shown else {}),
        }

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer of `/v1/completions` to a prompt of token ids, and logs it."""
        samples, kept = self._samples(body, body["prompt"], self._asked(body["prompt"]))
        choices = [
            {
                "index": at,
                "text": text,
                "finish_reason": "length" if reason == "length" else "stop",
                "logprobs": None if kept[at] is None else _completion_logprobs(ids),
            }
            for at, (ids, text, reason) in enumerate(samples)
        ]
        return {"id": f"cmpl-{next(self.numbers)}", "object": "text_completion", "choices": choices}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a prompt of token ids, and logs it."""
        prompt = body["token_ids"]
        samples, kept = self._samples(body["sampling_params"], prompt, self._asked(prompt))
        choices = [
            {
                "index": at,
                "token_ids": kept[at],
                "finish_reason": "length" if reason == "length" else "stop",
                "logprobs": None if kept[at] is None else _logprobs(ids),
            }
            for at, (ids, _, reason) in enumerate(samples)
        ]
        return {"request_id": f"generate-{next(self.numbers)}", "choices": choices}

    def _asked(self, prompt: list[int]) -> str:
        """Returns the last message of the user."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        return str(text).rpartition(f"{START}user\n")[2].partition(END)[0]

    def _samples(
        self, body: dict[str, Any], prompt: list[int], asked: str
    ) -> tuple[list[tuple[list[int], str, str]], list[list[int] | None]]:
        """Returns each choice, and the ids that are shown of it. Logs the call."""
        samples = [self._sample(body, asked) for _ in range(body.get("n") or 1)]
        kept = [ids if not asked.endswith(NO_IDS) else None for ids, _, _ in samples]
        self.calls.append({"prompt": prompt, "sampled": kept})
        return samples, kept

    def _sample(self, body: dict[str, Any], asked: str) -> tuple[list[int], str, str]:
        """Returns ids, text, and why it ended: empty, `length`, or the stop string."""
        number = 0 if body.get("temperature") == 0 else next(self.numbers)
        text = "" if asked.endswith(NO_TEXT) else REPLY.format(number)
        ids = (
            spelled(self.tokenizer, text) if asked.endswith(OTHER_IDS) else self.encode(text + END)
        )
        most = body.get("max_completion_tokens") or body.get("max_tokens") or CONTEXT
        stops = body.get("stop") or []
        for at in range(1, min(len(ids), most) + 1):
            text = self.tokenizer.decode(ids[:at])
            for stop in [stops] if isinstance(stops, str) else stops:
                if stop in text:
                    return ids[:at], text.partition(stop)[0], stop
        return ids[:most], text, "length" if most < len(ids) else ""


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of each letter of a text's first sentence, and the end of the turn."""
    letters = [*text.partition(".")[0], END]
    return [one for letter in letters for one in tokenizer.encode(letter).ids]


def _completion_logprobs(ids: list[int]) -> dict[str, Any]:
    tokens = [f"token_id:{one}" for one in ids]
    return {"tokens": tokens, "token_logprobs": [_LOGPROB] * len(ids)}


def _logprobs(ids: list[int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"logprob": _LOGPROB, "bytes": None, "top_logprobs": []}
    return {"content": [{"token": f"token_id:{one}", **entry} for one in ids]}


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    """Serves the engine. Yields its base URL without `/v1`."""

    async def chat(request: web.Request) -> web.Response:
        return web.json_response(engine.answer(await request.json()))

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(engine.generate(await request.json()))

    async def complete(request: web.Request) -> web.Response:
        return web.json_response(engine.complete(await request.json()))

    async def models(_request: web.Request) -> web.Response:
        entry = {"id": "policy", "object": "model", "owned_by": "", "max_model_len": CONTEXT}
        return web.json_response({"object": "list", "data": [entry]})

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({})

    routes = {
        ("POST", "/v1/chat/completions"): chat,
        ("POST", "/v1/completions"): complete,
        ("POST", "/inference/v1/generate"): generate,
        ("GET", "/v1/models"): models,
        ("GET", "/health"): health,
    }
    async with listening(routes) as url:
        yield url
