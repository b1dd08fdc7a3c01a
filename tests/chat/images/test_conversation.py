"""Images through the library: messages in, ids and ranges out."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from rollmesh.chat import ChatModel, Conversation, InvalidInputError
from tests.chat import families
from tests.chat.images.pictures import data_url, image_part, picture

PAD, VIDEO = (
    families.load("qwen3_vl").tokenizer.special_id(text) or 0
    for text in ("<|image_pad|>", "<|video_pad|>")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    folder = tmp_path_factory.mktemp("model")
    families.write("qwen3_vl", folder)
    config = {"model_type": "qwen3_vl", "image_token_id": PAD, "video_token_id": VIDEO}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return ChatModel.load(folder)


def test_images_of_three_turns_keep_their_ids_and_ranges(model: ChatModel) -> None:
    conversation = Conversation(model)
    first, second = picture(64, 32), picture(96, 64, seed=1)
    asked = {"role": "user", "content": [{"type": "text", "text": "What?"}, image_part(first)]}
    prompt = conversation.prompt([asked]).tolist()
    assert [one[1:] for one in conversation.placeholders] == [(prompt.index(PAD), 2)]
    said = [*model.tokenizer.encode("A cat.").tolist(), *model.stop_token_ids[:1]]
    conversation.feed(said)
    conversation.finish()
    again = {"role": "user", "content": [image_part(second), image_part(first)]}
    longer = conversation.prompt([again]).tolist()
    assert longer[: len(prompt) + len(said)] == prompt + said
    found = conversation.placeholders
    assert [one.length for one in found] == [2, 6, 2]
    assert found[0].sha256 == found[2].sha256 != found[1].sha256
    for one in found:
        run = longer[one.offset : one.offset + one.length]
        assert set(run) == {PAD}
    assert conversation.images[found[1].sha256] == second


def test_ids_of_images_and_videos_are_named_for_the_engine_to_ban(model: ChatModel) -> None:
    assert Conversation(model).banned_token_ids == tuple(sorted((PAD, VIDEO)))


@pytest.mark.parametrize(
    ("part", "field", "problem"),
    [
        pytest.param({"type": "image_url"}, "[1].image_url", "has no url", id="no-url"),
        pytest.param(
            {"type": "image_url", "image_url": "https://example.com/a.png"},
            "[1].image_url",
            "not a data URL",
            id="http",
        ),
        pytest.param(
            {"type": "image_url", "image_url": "data:" + "a" * 500_000},  # minutes, if squared
            "[1].image_url",
            "not a data URL",
            id="no-comma",
        ),
        pytest.param(
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}},
            "[1].image_url",
            "not base64",
            id="not-base64",
        ),
        pytest.param(
            {"type": "image_url", "image_url": data_url(picture(64, 64)[:-40])},
            "[1].image_url",
            "broken",
            id="broken",
        ),
        pytest.param(
            {"type": "image_url", "image_url": data_url(bytes(21 * 2**20))},
            "[1].image_url",
            "more than 20971520 bytes",
            id="huge",
        ),
        pytest.param({"type": "input_audio"}, "[1]", "text and image_url", id="other"),
    ],
)
def test_a_part_that_is_no_image_is_named(
    part: dict[str, object], field: str, problem: str, model: ChatModel
) -> None:
    conversation = Conversation(model)
    text = {"type": "text", "text": "See"}
    with pytest.raises(InvalidInputError, match=problem) as caught:
        conversation.prompt([{"role": "user", "content": [text, part]}])
    assert caught.value.field == f"messages[0].content{field}"


def test_a_picture_that_is_too_long_for_the_model_is_refused(model: ChatModel) -> None:
    message = {"role": "user", "content": [image_part(picture(2010, 2))]}
    with pytest.raises(InvalidInputError, match="2010 x 2 pixels"):
        Conversation(model).prompt([message])


def test_a_model_without_images_refuses_them(tokenizer_dir: Path) -> None:
    conversation = Conversation(ChatModel.load(tokenizer_dir))
    with pytest.raises(InvalidInputError, match="no images in user messages"):
        conversation.prompt([{"role": "user", "content": [image_part(picture())]}])
    assert conversation.banned_token_ids == ()


def test_a_lying_media_type_is_refused(model: ChatModel) -> None:
    part = {"type": "image_url", "image_url": data_url(picture(), "image/webp")}
    with pytest.raises(InvalidInputError, match="said to be image/webp and is image/png"):
        Conversation(model).prompt([{"role": "user", "content": [part]}])


def progressive(scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    file = io.BytesIO()
    Image.new("L", (64, 64), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xc4") : -2]
    begin = data[: -2 - len(last)]
    return begin + last * (scans - begin.count(b"\xff\xda")) + data[-2:]


def test_a_small_file_of_many_scans_is_refused(model: ChatModel) -> None:
    def ask(data: bytes) -> Conversation:
        part = {"type": "image_url", "image_url": data_url(data, "image/jpeg")}
        conversation = Conversation(model)
        conversation.prompt([{"role": "user", "content": [part]}])
        return conversation

    with pytest.raises(InvalidInputError, match="progressive JPEG of more than 32 scans"):
        ask(progressive(33))
    assert len(ask(progressive(32)).placeholders) == 1
    thumbnail = b"\xff\xe1" + (2 + 400).to_bytes(2, "big") + b"\xff\xda\0\2" * 100
    data = progressive(6)
    assert len(ask(data[:2] + thumbnail + data[2:]).placeholders) == 1
