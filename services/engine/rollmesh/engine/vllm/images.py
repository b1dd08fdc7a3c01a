"""Prompts with images as vLLM takes them: expanded ids, explicit ranges, and our own hashes.

vLLM's processor is asked about one image at a time, with one placeholder. It is never given a
prompt, because it would search the placeholders there: it expands runs a second time, and gives
images to placeholders that stand for nothing. Both happen without an error.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from rollmesh.engine.backend import GenerateInput
from rollmesh.mesh import Images
from rollmesh.runtime import ByteCache
from rollmesh.runtime.codec import ImageLimits, TokenIds
from rollmesh.runtime.decoding import ImageDecoders
from rollmesh.runtime.errors import InvalidFieldError, InvalidImageError

_ID_NAMES = ("image_token_id", "image_token_index")


def takes_images(model_path: Path) -> bool:
    """Returns whether a model's config names an id that stands for images."""
    try:
        config = json.loads((model_path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # vLLM names the fault
    return isinstance(config, dict) and any(name in config for name in _ID_NAMES)


class ProcessedImage(NamedTuple):
    """An image as the model's processor made it."""

    token_ids: TokenIds
    item: Any
    embeds: torch.Tensor | None
    """Which of its ids are filled with the image's embeddings. None: all."""


class ImagePrompts:
    """Makes prompts with images. Keeps each processed image.

    Weights do not change that, so it outlives every push, which empties vLLM's own caches: each
    request carries everything that vLLM needs.
    """

    def __init__(self, llm: Any, max_bytes: int, limits: ImageLimits) -> None:
        """Takes vLLM with the model's processor, a bound of the kept bytes, and the limits."""
        self._decoders = ImageDecoders(limits)
        config = llm.vllm_config.model_config.hf_config
        ids = (getattr(config, name, None) for name in _ID_NAMES)
        self._placeholder = next((one for one in ids if isinstance(one, int)), None)
        if not llm.vllm_config.model_config.supports_multimodal_inputs:
            self._placeholder = None
        self._renderer = llm.renderer
        self._processed: ByteCache[str, ProcessedImage] = ByteCache(max_bytes)

    async def close(self) -> None:
        """Ends the processes that decode images."""
        await self._decoders.close()

    async def prompt(self, request: GenerateInput) -> Any:
        """Returns vLLM's input for the prompt of a request.

        Raises:
            InvalidFieldError: The processor represents an image by other ids than the prompt does,
                there are placeholders without an image, or the model takes no images.
            InvalidImageError: The processor cannot take an image.
        """
        token_ids, images = request.token_ids, request.generate.images
        ids = token_ids.tolist()
        if not images:
            return {"prompt_token_ids": ids}
        if self._placeholder is None:
            raise InvalidFieldError("images", "this model takes no images; send text alone")
        made: list[ProcessedImage] = []
        for at, image in enumerate(images):
            processed = await self._process(
                image.sha256, request.images[image.sha256], f"images[{at}]"
            )
            wanted, ids_there = processed.token_ids, token_ids[image.offset :][: image.length]
            if len(wanted) != image.length:
                raise InvalidFieldError(
                    f"images[{at}].length",
                    f"is {image.length}; the model's processor makes {len(wanted)} ids of the "
                    "image; start the gateway and the engine from the same model_path",
                )
            if not np.array_equal(ids_there, wanted):
                raise InvalidFieldError(
                    f"images[{at}].offset", "the ids there are not those that stand for an image"
                )
            made.append(processed)
        self.check_rest(images, token_ids)
        return mm_input(
            prompt_token_ids=ids,
            mm_kwargs=MultiModalKwargsItems({"image": [one.item for one in made]}),
            mm_hashes={"image": [image.sha256 for image in images]},
            mm_placeholders={
                "image": [
                    PlaceholderRange(image.offset, image.length, one.embeds)
                    for image, one in zip(images, made, strict=True)
                ]
            },
        )

    async def _process(self, sha256: str, data: bytes, field: str) -> ProcessedImage:
        """Returns an image as the model's processor makes it."""
        if (found := self._processed.find(sha256)) is not None:
            return found
        decoded = await self._decoders.decode(data, field, "", pixels=True)
        prompt = {
            "prompt_token_ids": [self._placeholder],
            "multi_modal_data": {"image": [decoded.pixels]},
            "multi_modal_uuids": {"image": [sha256]},
        }
        try:
            (rendered,) = await self._renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise InvalidImageError(
                field, f"is not taken by the model's processor: {error.__cause__ or error}"
            ) from error
        (item,), (place,) = rendered["mm_kwargs"]["image"], rendered["mm_placeholders"]["image"]
        made = ProcessedImage(
            np.array(rendered["prompt_token_ids"], np.uint32), item, place.is_embed
        )
        tensors = (one for one in item.get_data().values() if isinstance(one, torch.Tensor))
        size = sum(one.nbytes for one in tensors) + made.token_ids.nbytes
        self._processed.add(sha256, made, size)
        return made

    def check_rest(self, images: Images, token_ids: TokenIds) -> None:
        """Checks that no id stands for an image that is not in `images`.

        Raises:
            InvalidFieldError: One does. Trainers cannot tell such an id from ids of images.
        """
        is_placeholder = token_ids == self._placeholder
        for image in images:
            is_placeholder[image.offset : image.offset + image.length] = False
        if is_placeholder.any():
            raise InvalidFieldError(
                "token_ids_u32le",
                f"has the id of an image, {self._placeholder}, at index "
                f"{int(is_placeholder.argmax())}, where no image is; name all images",
            )
