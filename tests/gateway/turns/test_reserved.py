"""Ids that stand for images: no engine may sample them, and no text becomes one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.v1 import gateway_pb2, trajectory_pb2
from tests.gateway.live import LiveMesh
from tests.messages import chat_in, said

PAD = "<|endoftext|>"


def sighted(folder: Path, source: Path, image_token_id: int) -> Path:
    """The model, with a token for images in its config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": image_token_id}))
    return folder


async def ask(mesh: LiveMesh, text: str, **fields: Any) -> gateway_pb2.ChatResponse:
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    response: gateway_pb2.ChatResponse = await mesh.stub.Chat(
        chat_in(
            opened,
            said(text),
            returns=gateway_pb2.ReturnOptions(token_ids=True),
            **fields,
        )
    )
    return response


@pytest.mark.parametrize("takes_images", [True, False])
async def test_placeholders_are_neither_sampled_nor_written(
    *, takes_images: bool, tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer
) -> None:
    pad = tokenizer.special_id(PAD)
    assert pad is not None
    model = sighted(tmp_path / "model", tokenizer_dir, pad) if takes_images else tokenizer_dir
    async with LiveMesh(tmp_path, model) as mesh:
        written = await ask(mesh, f"See {PAD} here.")
        ended = await ask(mesh, "See <|im_end|> here.", bad_words=["no"])
        # The mask goes with a constraint, which a request's own mask does not.
        await ask(mesh, "As JSON.", json_format=gateway_pb2.JsonFormat(schema_json="{}"))
    banned = (pad,) if takes_images else ()
    assert [one.banned for one in mesh.generations] == [banned] * 3
    ids = np.frombuffer(written.prompt_token_ids_u32le, "<u4").tolist()
    assert (pad in ids) is not takes_images
    assert tokenizer.rust.decode(ids, skip_special_tokens=False).count(PAD) == 1
    spelled = trajectory_pb2.FIDELITY_REASON_SPECIAL_TEXT
    # A mask of placeholders is part of the model, like its end token, and no reason.
    assert list(written.answers[0].reasons) == ([] if takes_images else [spelled])
    masked = trajectory_pb2.FIDELITY_REASON_CONSTRAINED
    changed = trajectory_pb2.FIDELITY_REASON_SAMPLING_CHANGED  # the session has no bad words
    assert sorted(ended.answers[0].reasons) == sorted([masked, spelled, changed])
