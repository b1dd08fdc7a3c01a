"""Images from outside: what is taken, what is refused and how it is named, what is seen."""

import io
import struct
import zlib

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from rollmesh.runtime.codec.images import ImageLimits, check_image, decode_image
from rollmesh.runtime.errors import InvalidImageError
from tests.chat.images.pictures import picture

FIELD = "messages[1].content[2].image"


def png_of(width: int, height: int, data: bytes) -> bytes:
    """A PNG file that claims a size, whatever it holds."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    )


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("L", (4, 4), shade) for shade in (0, 255)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_the_hash_of_its_bytes_with_its_size(kind: str) -> None:
    data = picture(12, 5, kind=kind, mode="L" if kind == "GIF" else "RGB")
    found = check_image(data, FIELD, f"image/{kind.lower()}")
    assert (found.width, found.height, found.media_type) == (12, 5, f"image/{kind.lower()}")
    assert (found.data, len(found.sha256)) == (data, 64)
    assert check_image(data, FIELD).sha256 == found.sha256
    assert check_image(picture(12, 5, seed=1), FIELD).sha256 != found.sha256
    assert decode_image(data).size == (12, 5)


def test_a_jpeg_may_be_called_jpg() -> None:
    assert check_image(picture(kind="JPEG"), FIELD, "image/JPG").media_type == "image/jpeg"


@pytest.mark.parametrize(
    ("data", "media_type", "problem"),
    [
        pytest.param(b"", "", "is not a PNG", id="empty"),
        pytest.param(b"<svg></svg>", "", "is not a PNG", id="svg"),
        pytest.param(picture(64, 64)[:-40], "", "is broken", id="cut-png"),
        pytest.param(picture(64, 64, kind="JPEG")[:-200], "", "is broken", id="cut-jpeg"),
        pytest.param(
            picture(3, 2, kind="GIF", mode="L")[:-1] + b",;", "", "is broken", id="cut-second-frame"
        ),
        pytest.param(picture(64, 64)[:20], "", "broken|not a PNG", id="only-a-head"),
        pytest.param(png_of(40, 40, b"abc"), "", "is broken", id="too-few-pixels"),
        pytest.param(png_of(4000, 4001, b""), "", "4000 x 4001 pixels", id="claims-much"),
        pytest.param(png_of(2**30, 2**30, b""), "", "pixels|too large", id="claims-everything"),
        pytest.param(png_of(0, 8, b""), "", "is broken|not a PNG", id="no-width"),
        pytest.param(picture(), "image/jpeg", "said to be image/jpeg and is image/png", id="lies"),
        pytest.param(animation(), "", "several frames", id="animation"),
        pytest.param(picture(kind="BMP"), "", "is not a PNG", id="bmp"),
        pytest.param(bytes(2_000_000), "", "has 2000000 bytes; give at most 1000000", id="large"),
    ],
)
def test_what_is_no_image_is_refused_and_named(data: bytes, media_type: str, problem: str) -> None:
    limits = ImageLimits(max_bytes=1_000_000, max_pixels=16_000_000)
    with pytest.raises(InvalidImageError, match=problem) as caught:
        check_image(data, FIELD, media_type, limits)
    assert caught.value.field == FIELD


@given(at=st.integers(0, 200), byte=st.integers(0, 255), end=st.integers(1, 400))
def test_damaged_bytes_are_an_image_or_refused(at: int, byte: int, end: int) -> None:
    data = bytearray(picture(9, 9)[:end])
    if at < len(data):
        data[at] = byte
    try:
        found = check_image(bytes(data), FIELD)
    except InvalidImageError:
        return
    assert decode_image(found.data).size == (found.width, found.height)


def test_transparency_is_seen_over_white() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (1, 1), (10, 20, 30, 0)).save(file, "PNG")
    assert decode_image(file.getvalue()).getpixel((0, 0)) == (255, 255, 255)


def test_pixels_are_seen_as_they_are_stored_whatever_their_orientation() -> None:
    file, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (3, 2)).save(file, "JPEG", exif=tags)
    assert check_image(file.getvalue(), FIELD).width == 3
    assert decode_image(file.getvalue()).size == (3, 2)
