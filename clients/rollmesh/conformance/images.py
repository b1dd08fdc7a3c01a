"""Images in requests of any protocol: seen where they stand, and refused where they are broken."""

import base64
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.server import Answer, Server, need, need_refused

Send = Callable[[Server, Sequence[bytes]], Awaitable[Answer]]
"""Sends a request that shows images."""
Count = Callable[[dict[str, Any]], int]
"""Returns the number of tokens of the prompt that an answer was sampled from."""
_WIDTH, _HEIGHT = 96, 64
_UNSEEN = {400, 404, 415, 422, 501}
_BROKEN = {"cut short": slice(0, -40), "a part of the file": slice(8, None)}


def picture(seed: int = 0) -> bytes:
    """Returns a PNG file of 96 x 64 pixels."""
    row = bytes((7 * at + seed) % 256 for at in range(3 * _WIDTH))
    size = _WIDTH.to_bytes(4, "big") + _HEIGHT.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress((b"\0" + row) * _HEIGHT)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )


def encoded(data: bytes) -> str:
    """Returns the base64 of an image."""
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    """Returns the data URL of a PNG file."""
    return f"data:image/png;base64,{encoded(data)}"


def seen(answer: Answer) -> dict[str, Any]:
    """Returns the body of an answer to a request with an image.

    Raises:
        NotSeenError: The server refuses the image. Its model may take none.
        FailedError: There is no answer.
    """
    if answer.status in _UNSEEN:
        raise NotSeenError(f"the image is refused: {answer}")
    return answer.body()


def add_images(family: Family, user: Send, result: Send, count: Count) -> None:
    """Adds the checks of one protocol.

    Args:
        family: Takes them.
        user: Shows images in a message of the user.
        result: Shows images in the result of a tool.
        count: Reads the size of a prompt.
    """
    for name, send, where in (
        ("user", user, "a message of the user"),
        ("result", result, "the result of a tool"),
    ):
        family.add(
            name,
            f"An image in {where} takes part in the prompt, each time that it is shown.",
            "Computer-use and document agents: the model answers without having seen anything.",
            partial(_seen, send, count),
        )
    family.add(
        "broken",
        "A broken image is a 400.",
        "Clients that retry: a 500 is asked again three to five times.",
        partial(_broken, user),
    )


async def _seen(send: Send, count: Count, server: Server) -> None:
    shown = [(), (picture(),), (picture(), picture(1)), (picture(), picture())]
    first, *others = [count(seen(await send(server, images))) for images in shown]
    one, two, twice = (size - first for size in others)
    need(one > 0, f"an image adds {one} tokens to the prompt of {first}")
    need(two == twice > one, f"one image adds {one} tokens, two add {two}, the same twice {twice}")


async def _broken(send: Send, server: Server) -> None:
    seen(await send(server, (picture(),)))
    whole = picture()
    files = {name: whole[part] for name, part in _BROKEN.items()} | {"no image": b"<html></html>"}
    need_refused({name: await send(server, (data,)) for name, data in files.items()})
