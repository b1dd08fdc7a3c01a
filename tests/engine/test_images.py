"""Images at an engine: held by their hash, checked, and asked for again after a restart."""

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from rollmesh.mesh import EngineClients
from rollmesh.runtime.errors import (
    ImageUnknownError,
    InvalidFieldError,
    InvalidImageError,
    RollmeshError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.chat.images.pictures import picture
from tests.controls import abort
from tests.engine.engines import PROMPT, Engine
from tests.processes import ServiceProcess, reserved_port, running
from tests.waiting import until

FLAGS: dict[str, object] = {"backend": "scripted", "vocabulary_tokens": 365}
CAT, DOG = picture(8, 8), picture(12, 8, seed=1)


def placed(
    data: bytes, offset: int = 2, length: int = 4, *, send: bool = True
) -> engine_pb2.PromptImage:
    sha256 = hashlib.sha256(data).hexdigest()
    return engine_pb2.PromptImage(
        sha256=sha256, offset=offset, length=length, data=data if send else b""
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceProcess]:
    limits = {"max_images": 3, "max_image_bytes": 10_000, "max_image_pixels": 400}
    folder = tmp_path_factory.mktemp("images")
    async with running("engine", folder, **FLAGS, **limits) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(process: ServiceProcess) -> AsyncIterator[Engine]:
    async with open_channel(process.address) as channel:
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())


@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_asks_for_bytes_once(engine: Engine) -> None:
    by_hash = [placed(CAT, send=False), placed(DOG, 8, send=False)]
    with pytest.raises(ImageUnknownError) as caught:
        await engine.generate(engine.request(5, 0, images=by_hash))
    assert caught.value.sha256s == [one.sha256 for one in by_hash]
    with pytest.raises(ImageUnknownError) as caught:
        await engine.generate(engine.request(5, 1, images=[placed(CAT), by_hash[1]]))
    assert caught.value.sha256s == [by_hash[1].sha256]
    with_bytes = await engine.generate(engine.request(5, 0, images=[by_hash[0], placed(DOG, 8)]))
    again = await engine.generate(engine.request(5, 1, images=by_hash))
    assert again.ids == with_bytes.ids
    other = await engine.generate(engine.request(5, 1, images=by_hash[:1]))
    assert other.ids != with_bytes.ids


@pytest.mark.parametrize(
    ("images", "reason", "field"),
    [
        pytest.param(
            [placed(CAT, 2), placed(DOG, 5)], "INVALID_FIELD", "images[1].offset", id="overlap"
        ),
        pytest.param([placed(CAT, 13)], "INVALID_FIELD", "images[0].length", id="outside"),
        pytest.param([placed(CAT, 0, 1)] * 4, "INVALID_FIELD", "images", id="many"),
        pytest.param(
            [placed(CAT), placed(picture(20, 21, kind="GIF", mode="L"), 8)],
            "INVALID_IMAGE",
            "images[1].data",
            id="pixels",
        ),
        pytest.param([placed(b"x" * 10_001)], "INVALID_IMAGE", "images[0].data", id="bytes"),
        pytest.param([placed(b"no image")], "INVALID_IMAGE", "images[0].data", id="no-image"),
        pytest.param([placed(CAT[:-30])], "INVALID_IMAGE", "images[0].data", id="broken"),
    ],
)
@pytest.mark.asyncio(loop_scope="session")
async def test_an_image_that_cannot_be_is_named_and_the_engine_goes_on(
    images: list[engine_pb2.PromptImage], reason: str, field: str, engine: Engine
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await engine.generate(engine.request(5, 0, images=images))
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert len((await engine.generate(engine.request(2, 0))).ids) == 2


@pytest.mark.asyncio(loop_scope="session")
async def test_bytes_of_another_hash_are_refused_and_not_held(engine: Engine) -> None:
    lie = placed(picture(4, 4, seed=7), send=False)
    lie.data = CAT
    with pytest.raises(InvalidImageError, match="another SHA-256"):
        await engine.generate(engine.request(5, 0, images=[lie]))
    lie.ClearField("data")
    with pytest.raises(ImageUnknownError):
        await engine.generate(engine.request(5, 0, images=[lie]))


async def test_a_client_sends_images_once_and_again_to_an_engine_that_restarted(
    tmp_path: Path,
) -> None:
    data = {hashlib.sha256(one).hexdigest(): one for one in (CAT, DOG)}
    clients = EngineClients(60_000)

    async def generate(*images: engine_pb2.PromptImage) -> tuple[list[int], list[bool]]:
        """Returns what is sampled, and which images went with their bytes in the last request."""
        generate = engine_pb2.GenerateRequest(
            request_id="r", token_ids_u32le=PROMPT.tobytes(), images=images
        )
        generate.sampling.max_tokens = 4
        request = engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=4)
        engine = clients.of(address)
        while True:
            try:
                with engine.begin(request, 60_000, data) as answer:
                    ids = np.frombuffer((await answer.next()).token_ids_u32le, "<u4").tolist()
            except ImageUnknownError as error:
                engine.images.lost(error, data)
            else:
                return ids, [bool(image.data) for image in request.generate.images]

    cat, dog = placed(CAT, send=False), placed(DOG, 8, send=False)
    with reserved_port() as holder:
        port = holder.getsockname()[1]
        address = f"127.0.0.1:{port}"
        async with running("engine", tmp_path, port=port, **FLAGS):
            first, sent = await generate(cat, dog)
            assert sent == [True, True]
            assert await generate(cat, dog) == (first, [False, False])
        async with running("engine", tmp_path, port=port, **FLAGS):
            again, sent = await generate(cat, dog)
            assert (again, sent) == (first, [True, True])
            assert await generate(cat, dog) == (first, [False, False])
            with pytest.raises(ImageUnknownError):
                await generate(placed(picture(3, 3), send=False))
    await clients.close()


async def test_an_engine_that_holds_little_is_sent_images_each_time(tmp_path: Path) -> None:
    async with (
        running("engine", tmp_path, image_cache_bytes=len(CAT), **FLAGS) as process,
        open_channel(process.address) as channel,
    ):
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())
        await engine.generate(engine.request(2, 0, images=[placed(CAT), placed(DOG, 8)]))
        errors: list[RollmeshError] = []
        for image in (placed(CAT, send=False), placed(DOG, send=False)):
            try:
                await engine.generate(engine.request(2, 0, images=[image]))
            except ImageUnknownError as error:
                errors.append(error)
        assert errors


async def test_an_abort_while_images_are_read_ends_the_request(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(file, "PNG")
    async with (
        running("engine", tmp_path, tokens_per_second=2, **FLAGS) as process,
        open_channel(process.address) as channel,
    ):
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())
        asked = engine.request(32, 0, images=[placed(file.getvalue())])

        async def found() -> bool:
            wanted = abort(asked.generate.request_id)
            (found,) = (await engine.stub.ControlEngines(wanted)).results
            return bool(found.aborted_request_ids)

        generating = asyncio.ensure_future(engine.generate(asked))
        await until(found)
        result = await generating
    assert result.finish.reason == sampling_pb2.FINISH_REASON_ABORT
    assert result.finish.prompt_tokens == len(PROMPT)
