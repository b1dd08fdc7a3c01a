"""Images in Responses."""

from collections.abc import Sequence
from typing import Any

from rollmesh.conformance.asked import QUESTION
from rollmesh.conformance.checks import Family
from rollmesh.conformance.images import add_images, data_url
from rollmesh.conformance.responses.requests import PATH, TOOL, called, request, result, user
from rollmesh.conformance.server import Answer, Server, numbers

IMAGES = Family("responses.images")


def _parts(images: Sequence[bytes], text: str = QUESTION) -> list[dict[str, Any]]:
    shown = [{"type": "input_image", "image_url": data_url(one)} for one in images]
    return [*shown, {"type": "input_text", "text": text}]


async def _user(server: Server, images: Sequence[bytes]) -> Answer:
    asked = {**user(), "content": _parts(images)}
    return await server.post(PATH, request(server, asked))


async def _result(server: Server, images: Sequence[bytes]) -> Answer:
    items = (user(), called(), result(output=_parts(images, "Seen.")))
    return await server.post(PATH, request(server, *items, tools=[TOOL]))


def _count(body: dict[str, Any]) -> int:
    (prompt,) = numbers(body.get("usage"), "input_tokens")
    return prompt


add_images(IMAGES, _user, _result, _count)
