"""Images in vLLM: sampled from exactly what was sent, and what a trainer computes from the rows."""

import asyncio
import hashlib
import io
import json
import pickle
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from rollmesh.chat import load_rule
from rollmesh.client import SessionResult
from rollmesh.runtime.errors import ImageUnknownError, InvalidFieldError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.chat.images.pictures import image_part, picture
from tests.controls import abort
from tests.engine.engines import Engine, Result
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.processes import run_to_end
from tests.vision.environment import environment, torchvision
from tests.vision.models import KINDS, make_vision_model
from tests.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
CAT, DOG, OWL = (picture(140, 100), picture(64, 90, seed=1), picture(90, 64, seed=2))
_SCRIPT_S = 300.0


@dataclass
class Home:
    """A mesh around vLLM with a vision model."""

    mesh: Mesh
    engine: Engine

    def run(self, width: int, height: int) -> list[int]:
        rule = load_rule(self.mesh.model)
        assert rule is not None
        return [int(one) for one in rule.run(width, height)]

    async def ask(self, ids: list[int], images: list[engine_pb2.PromptImage]) -> Result:
        prompt = np.array(ids, "<u4").tobytes()
        asked = self.engine.request(
            4, 0, token_ids_u32le=prompt, images=images, sampling={"temperature": 0.0}
        )
        return await self.engine.generate(asked)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Home]:
    folder, kind = tmp_path_factory.mktemp("vision"), request.param
    model, other = (make_vision_model(kind, folder / f"model{seed}", seed) for seed in (0, 1))
    engine: dict[str, Any] = {"backend": "vllm", "dtype": "float32", "enforce_eager": True}
    engine |= {"max_context_tokens": 1024, "model_path": model}
    with torchvision():
        async with (
            scripted_mesh(folder, model, **engine) as mesh,
            open_channel(mesh.processes["engine"].address) as channel,
        ):
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            yield Home(mesh, Engine(mesh.processes["engine"], stub, other))


def placed(data: bytes, offset: int, length: int, *, send: bool) -> engine_pb2.PromptImage:
    return engine_pb2.PromptImage(
        sha256=hashlib.sha256(data).hexdigest(),
        offset=offset,
        length=length,
        data=data if send else b"",
    )


def said(role: str, *parts: str | bytes, **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in parts
    ]
    return {"role": role, "content": content, **fields}


async def trainer_logprobs(
    model: Path, session: SessionResult, folder: Path
) -> list[np.ndarray[Any, Any]]:
    """What a trainer's forward pass gives for each token after the first, by trajectory."""
    given = folder / "sessions"
    given.write_bytes(pickle.dumps([session]))
    command = (sys.executable, "-m", "tests.vision.trainer_pass", str(model), str(given))
    output, _ = await run_to_end(*command, cwd=folder, env=environment(), limit_s=_SCRIPT_S)
    return [np.array(one) for one in json.loads(output.splitlines()[-1])]


def differences(session: SessionResult, found: list[np.ndarray[Any, Any]]) -> list[float]:
    """The largest difference from what the engine gave, by trajectory."""
    most: list[float] = []
    for trajectory, logprobs in zip(session.trajectories, found, strict=True):
        mask = trajectory.policy_versions[1:] >= 0
        assert mask.any()
        most.append(float(np.abs(logprobs[mask] - trajectory.logprobs[1:][mask]).max()))
    return most


async def test_a_trainer_computes_the_log_probs_of_the_engine(home: Home, tmp_path: Path) -> None:
    """Three turns, with an image in the prompt and one in a tool's result, and a branch."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    async with home.mesh.client() as client:
        async with client.session() as session:
            agent = home.mesh.openai(session, timeout=120)

            async def ask(*messages: Any) -> list[Any]:
                answer = await agent.chat.completions.create(
                    model="policy", messages=messages, max_tokens=12, temperature=1.0
                )
                return [*messages, answer.choices[0].message]

            begun = await ask(said("user", "What is ", CAT, "?"))
            seen = said("tool", "Seen: ", DOG, tool_call_id="c")
            second = await ask(*begun, said("user", "Look!"), calls, seen)
            await ask(*second, said("user", "And is ", OWL, CAT, " the same?"))
            await ask(*begun, said("user", "So? ", DOG))
        result = await delivered(client, session)
    assert sorted(one.data for one in result.images.values()) == sorted((CAT, DOG, OWL))
    assert [(one.turns, len(one.images)) for one in result.trajectories] == [(3, 4), (2, 2)]
    found = await trainer_logprobs(home.mesh.model, result, tmp_path)
    assert max(differences(result, found)) < 1e-4

    # With the pixels of another image of the same size nothing is equal.
    cat = hashlib.sha256(CAT).hexdigest()
    images = dict(result.images)
    images[cat] = type(images[cat])(sha256=cat, data=picture(140, 100, seed=5))
    other = replace(result, images=images)
    assert min(differences(other, await trainer_logprobs(home.mesh.model, other, tmp_path))) > 1e-3


async def test_new_weights_need_no_image_again(home: Home) -> None:
    run = home.run(140, 100)
    ids, image = [5, 6, *run, 7], placed(CAT, 2, len(run), send=False)
    old = await home.ask(ids, [placed(CAT, 2, len(run), send=True)])
    before = (await home.engine.info()).policy_version
    await home.engine.update(before + 1, home.engine.weights)
    new = await home.ask(ids, [image])
    await home.engine.update(before + 2, home.mesh.model)
    assert new.spans == [(before + 1, 0, 4)]
    assert new.logprobs != old.logprobs
    again = await home.ask(ids, [image])
    assert again.ids == old.ids
    assert np.abs(np.array(again.logprobs) - old.logprobs).max() < 1e-5


async def test_places_that_are_not_those_of_the_image_are_named_and_nobody_else_notices(
    home: Home,
) -> None:
    run = home.run(140, 100)
    ids, count = [5, 6, *run, 7], len(run)
    good = await home.ask(ids, [placed(CAT, 2, count, send=True)])
    for image, prompt, field in (
        (placed(CAT, 2, count - 1, send=False), ids, "images[0].length"),
        (placed(CAT, 1, count, send=False), ids, "images[0].offset"),
        (placed(CAT, 3, count, send=False), ids, "images[0].offset"),
        (placed(CAT, 2, count, send=False), [*ids, run[0]], "token_ids_u32le"),
        (placed(DOG, 2, count + 1, send=True), ids, "images[0].length"),
    ):
        with pytest.raises(InvalidFieldError) as caught:
            await home.ask(prompt, [image])
        assert caught.value.field == field
    unknown = placed(picture(5, 5, seed=9), 2, count, send=False)
    with pytest.raises(ImageUnknownError):
        await home.ask(ids, [unknown])
    again = await home.ask(ids, [placed(CAT, 2, count, send=False)])
    assert (again.ids, again.logprobs) == (good.ids, good.logprobs)
    assert (await home.ask([5, 6, *[8] * count, 7], [])).logprobs != good.logprobs


async def test_images_side_by_side_are_two(home: Home) -> None:
    cat, owl = home.run(140, 100), home.run(90, 64)
    ids = [5, *cat, *owl, 7]
    one = placed(CAT, 1, len(cat), send=True)
    both = await home.ask(ids, [one, placed(OWL, 1 + len(cat), len(owl), send=True)])
    assert len(both.ids) == 4
    with pytest.raises(InvalidFieldError):
        await home.ask(ids, [one])


async def test_an_abort_while_an_image_is_read_ends_the_request(home: Home) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(file, "PNG")
    run = home.run(4000, 4000)
    asked = home.engine.request(
        900,
        0,
        token_ids_u32le=np.array([5, *run, 7], "<u4").tobytes(),
        images=[placed(file.getvalue(), 1, len(run), send=True)],
    )

    async def found() -> bool:
        wanted = abort(asked.generate.request_id)
        (one,) = (await home.engine.stub.ControlEngines(wanted)).results
        return bool(one.aborted_request_ids)

    generating = asyncio.ensure_future(home.engine.generate(asked))
    await until(found)
    result = await generating
    assert result.finish.reason == sampling_pb2.FINISH_REASON_ABORT
    assert len(result.ids) < 900
