"""The images of requests: their bytes are checked when they come, and held for later requests."""

import asyncio

from rollmesh.engine.backend import PromptImage
from rollmesh.engine.config import EngineConfig
from rollmesh.mesh.generations.images import HeldBytes, Images, check_hashes, check_places
from rollmesh.runtime.codec.images import ImageLimits, check_image


class RequestImages:
    """Reads the images of requests."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts without images; takes the limits from the settings of the engine."""
        self._most = config.max_images
        self._limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)
        self._held = HeldBytes(config.image_cache_bytes)

    async def read(self, images: Images, prompt_tokens: int) -> tuple[PromptImage, ...]:
        """Returns the images of a request, with their bytes.

        Args:
            images: The images.
            prompt_tokens: Number of ids of the prompt.

        Raises:
            InvalidFieldError: There are too many, or one has no place in the prompt.
            InvalidImageError: Bytes have another hash, are no image, or are too large.
            ImageUnknownError: The bytes of some neither came nor are held.
        """
        check_places(images, prompt_tokens, self._most)
        if any(image.data for image in images):
            await asyncio.to_thread(self._check, images)
        data = self._held.take(images)
        return tuple(
            PromptImage(image.sha256, image.offset, image.length, data[image.sha256])
            for image in images
        )

    def _check(self, images: Images) -> None:
        """Checks bytes that came; images that are held are known to be good."""
        check_hashes(images)
        checked: set[str] = set()
        for at, image in enumerate(images):
            if image.data and image.sha256 not in self._held and image.sha256 not in checked:
                check_image(image.data, f"images[{at}].data", limits=self._limits)
                checked.add(image.sha256)
