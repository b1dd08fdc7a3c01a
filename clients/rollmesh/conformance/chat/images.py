"""Images in chat completions."""

from collections.abc import Sequence
from typing import Any

from rollmesh.conformance.asked import QUESTION
from rollmesh.conformance.chat.requests import TOOL, called, post, result, user
from rollmesh.conformance.checks import Family
from rollmesh.conformance.images import add_images, data_url
from rollmesh.conformance.server import Answer, Server, numbers

IMAGES = Family("chat.images")


def parts(images: Sequence[bytes], text: str = QUESTION) -> list[dict[str, Any]]:
    """Returns a content with images before a text."""
    shown = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    return [*shown, {"type": "text", "text": text}]


async def _user(server: Server, images: Sequence[bytes]) -> Answer:
    return await post(server, user(parts(images)))


async def _result(server: Server, images: Sequence[bytes]) -> Answer:
    answered = result("call_00Ab", parts(images, "Seen."))
    return await post(server, user(), called("call_00Ab"), answered, tools=[TOOL])


def _count(body: dict[str, Any]) -> int:
    (prompt,) = numbers(body.get("usage"), "prompt_tokens")
    return prompt


add_images(IMAGES, _user, _result, _count)
