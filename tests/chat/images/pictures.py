"""Pictures made on the spot, and what agents make of them."""

import base64
import io
from functools import cache

from PIL import Image


@cache
def picture(
    width: int = 8, height: int = 8, *, seed: int = 0, kind: str = "PNG", mode: str = "RGB"
) -> bytes:
    """A file of noise. The same arguments give the same bytes."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    noise = bytes((at * 7 + seed * 31 + at // 5) % 256 for at in range(width * height * bands))
    file = io.BytesIO()
    Image.frombytes(mode, (width, height), noise).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, object]:
    """A part of an OpenAI message."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
