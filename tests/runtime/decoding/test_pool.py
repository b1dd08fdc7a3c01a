"""Images of strangers are decoded in processes that may die."""

import asyncio
import io
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from PIL import Image

from rollmesh.runtime.codec import ImageLimits, decode_image
from rollmesh.runtime.decoding import ImageDecoders
from rollmesh.runtime.errors import InvalidImageError, OverloadedError
from tests.chat.images.pictures import picture

FIELD = "messages[0].content[0]"


@asynccontextmanager
async def decoders(
    cpu_s: float = 60, wall_s: float = 60, **limits: int
) -> AsyncIterator[ImageDecoders]:
    pool = ImageDecoders(ImageLimits(**limits), cpu_s, wall_s)
    try:
        yield pool
    finally:
        await pool.close()


def large() -> bytes:
    """A file whose decoding takes longer than a millisecond on any machine."""
    file = io.BytesIO()
    Image.effect_noise((4000, 4000), 50).save(file, "JPEG", progressive=True)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_an_image_has_the_size_and_the_pixels_that_it_has_in_any_process(kind: str) -> None:
    data = picture(12, 5, kind=kind)
    async with decoders() as pool:
        found = await pool.decode(data, FIELD, "s", pixels=True)
        assert (found.media_type, found.width, found.height) == (f"image/{kind.lower()}", 12, 5)
        assert found.pixels is not None
        assert found.pixels.tobytes() == decode_image(data).tobytes()
        assert (await pool.decode(data, FIELD, "s")).pixels is None


async def test_an_image_that_takes_too_much_cpu_is_refused_and_the_next_one_is_decoded() -> None:
    async with decoders(0.001) as pool:
        for _ in range(3):
            with pytest.raises(InvalidImageError, match=r"more than 0\.001 s of CPU") as caught:
                await pool.decode(large(), FIELD, "s")
            assert caught.value.field == FIELD
    async with decoders() as pool:
        assert (await pool.decode(large(), FIELD, "s")).width == 4000


async def test_a_machine_that_is_too_slow_says_nothing_about_the_image() -> None:
    async with decoders(wall_s=0.001) as pool:
        for _ in range(2):
            with pytest.raises(OverloadedError, match=r"within 0\.001 s") as caught:
                await pool.decode(large(), FIELD, "s")
            assert caught.value.retry_delay_ms


@pytest.mark.parametrize(
    ("number", "error"),
    [
        pytest.param(signal.SIGKILL, OverloadedError, id="out of memory"),
        pytest.param(signal.SIGSEGV, InvalidImageError, id="crash"),
    ],
)
async def test_the_end_of_a_decoder_decides_the_error(
    number: signal.Signals, error: type[OverloadedError | InvalidImageError]
) -> None:
    async with decoders() as pool:
        before = set(psutil.Process().children())
        await pool.decode(picture(12, 5), FIELD, "s")
        (worker,) = set(psutil.Process().children()) - before

        def while_it_decodes() -> None:
            worker.suspend()
            asyncio.get_running_loop().call_soon(end)

        def end() -> None:
            worker.send_signal(number)
            worker.resume()

        with pytest.raises(error, match=r"^messages\[0\]\.content\[0\]: "):
            await pool.decode(large(), FIELD, "s", known=while_it_decodes)
        assert (await pool.decode(picture(12, 5), FIELD, "s")).width == 12


async def test_a_caller_that_leaves_frees_its_process() -> None:
    async with decoders() as pool:
        data = large()
        leaving = [asyncio.ensure_future(pool.decode(data, FIELD, "slow")) for _ in range(20)]
        await asyncio.sleep(0)
        for one in leaving:
            one.cancel()
        assert (await pool.decode(picture(12, 5), FIELD, "other")).width == 12
        assert all(one.cancelled() for one in leaving)


@pytest.mark.parametrize(
    ("data", "limits", "problem"),
    [
        pytest.param(b"no image", {}, "is not a PNG", id="no image"),
        pytest.param(picture(12, 5)[:-30], {}, "is broken", id="cut"),
        pytest.param(picture(12, 5), {"max_pixels": 10}, "12 x 5 pixels", id="pixels"),
        pytest.param(picture(12, 5), {"max_bytes": 10}, "give at most 10", id="bytes"),
    ],
)
async def test_a_file_that_is_refused_keeps_its_process(
    data: bytes, limits: dict[str, int], problem: str
) -> None:
    async with decoders(**limits) as pool:
        for _ in range(2):
            with pytest.raises(InvalidImageError, match=problem) as caught:
                await pool.decode(data, FIELD, "s")
            assert caught.value.message.startswith(f"{FIELD}: ")
