"""Images from outside: what is taken, what is refused and how it is named, what is seen."""

import io
import struct
import zlib
from time import thread_time

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from rollmesh.runtime.codec import ImageLimits, check_image, decode_image, read_data_url
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
def test_bytes_that_are_no_image_are_refused_by_name(
    data: bytes, media_type: str, problem: str
) -> None:
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


def test_exif_orientation_does_not_turn_pixels() -> None:
    file, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (3, 2)).save(file, "JPEG", exif=tags)
    assert check_image(file.getvalue(), FIELD).width == 3
    assert decode_image(file.getvalue()).size == (3, 2)


def progressive() -> tuple[bytes, bytes]:
    """A progressive JPEG of six scans without its end, and its last scan."""
    file = io.BytesIO()
    Image.new("L", (16, 16), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    return data[:-2], data[data.rindex(b"\xff\xc4") : -2]


def chunk(name: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(name + data)
    return len(data).to_bytes(4, "big") + name + data + crc.to_bytes(4, "big")


PARTS = 20_000


def hostile() -> dict[str, bytes]:
    """Small files that cost time for each of many parts."""
    begin, scan = progressive()
    png, webp, gif = (picture(kind=kind) for kind in ("PNG", "WEBP", "GIF"))
    jpeg = picture(kind="JPEG")
    table = 13 + (3 << (gif[10] & 7) + 1 if gif[10] & 0x80 else 0)
    body = webp[12:] + b"EXIF\0\0\0\0" * PARTS
    return {
        "scans": begin + scan * 100 + b"\xff\xd9",
        "segments": jpeg[:2] + b"\xff\xfe\0\2" * PARTS + jpeg[2:],
        "PNG chunks": png[:33] + chunk(b"teXt", b"a\0b") * PARTS + png[33:],
        "WebP chunks": b"RIFF" + (len(body) + 4).to_bytes(4, "little") + b"WEBP" + body,
        "GIF comments": gif[:table] + b"!\xfe\1a\0" * PARTS + gif[table:],
        "GIF blocks": gif[:table] + b"!\xfe" + b"\1a" * PARTS + b"\0" + gif[table:],
    }


@pytest.mark.parametrize("name", hostile())
def test_parts_that_cost_time_whatever_the_pixels_are_bounded(name: str) -> None:
    problem = "more than 32 scans" if name == "scans" else "more than 16384 segments"
    with pytest.raises(InvalidImageError, match=problem):
        check_image(hostile()[name], FIELD)


def test_a_progressive_image_is_taken() -> None:
    begin, scan = progressive()
    assert check_image(begin + scan * 10 + b"\xff\xd9", FIELD).width == 16


def test_a_scan_within_metadata_does_not_count() -> None:
    jpeg = picture(kind="JPEG")
    thumbnail = b"\xff\xe1" + (2 + 400).to_bytes(2, "big") + b"\xff\xda\0\2" * 100
    assert check_image(jpeg[:2] + thumbnail + jpeg[2:], FIELD).media_type == "image/jpeg"


def test_a_long_text_that_is_no_data_url_is_refused_quickly() -> None:
    begun = thread_time()
    with pytest.raises(InvalidImageError, match="not a data URL"):
        read_data_url("data:" + "a" * 200_000, FIELD)
    assert thread_time() - begun < 2  # a quarter of a minute if each part were tried with each
