"""Images in Messages."""

from collections.abc import Sequence
from typing import Any

from rollmesh.conformance.asked import QUESTION
from rollmesh.conformance.checks import Family
from rollmesh.conformance.images import add_images, encoded
from rollmesh.conformance.messages.requests import (
    TOOL,
    post,
    request,
    result,
    said,
    text,
    use,
    user,
)
from rollmesh.conformance.server import Answer, Server, numbers

IMAGES = Family("messages.images")


def _blocks(images: Sequence[bytes], words: str = QUESTION) -> list[dict[str, Any]]:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": encoded(one)} for one in images
    ]
    return [*({"type": "image", "source": source} for source in sources), text(words)]


async def _user(server: Server, images: Sequence[bytes]) -> Answer:
    return await post(server, request(server, user(_blocks(images))))


async def _result(server: Server, images: Sequence[bytes]) -> Answer:
    answered = user([result(content=_blocks(images, "Seen."))])
    return await post(server, request(server, user(), said(use()), answered, tools=[TOOL]))


def _count(body: dict[str, Any]) -> int:
    usage = body.get("usage")
    (fresh,) = numbers(usage, "input_tokens")
    return fresh + ((usage or {}).get("cache_read_input_tokens") or 0)


add_images(IMAGES, _user, _result, _count)
