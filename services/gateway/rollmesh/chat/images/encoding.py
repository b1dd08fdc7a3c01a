"""Encodes what a template prints, with the runs of images in it."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rollmesh.chat.images.placing import Placeholder, expand, locate
from rollmesh.chat.images.rules import ImageRule
from rollmesh.chat.messages import Image, MessageGroup, images_of
from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.runtime.codec.arrays import TokenIds


class ImageEncoder:
    """The tokenizer and the image rule of one model."""

    def __init__(self, tokenizer: ModelTokenizer, rule: ImageRule | None) -> None:
        """Takes both; without a rule the model takes no images."""
        self._tokenizer = tokenizer
        self._rule = rule
        self.printed = ""
        """The text that the template prints for an image; empty without a rule."""
        if rule is not None:
            texts = tokenizer.added_texts
            self.printed = next(
                (text for text in texts if tokenizer.special_id(text) == rule.printed_id), ""
            )

    def encode(self, text: str, images: Sequence[Image]) -> TokenIds:
        """Returns the ids of printed text that shows images; uint32 [N].

        Raises:
            PlacementError: The text does not show exactly these images.
            ImageRefusedError: The model cannot take an image of that size.
        """
        ids = self._tokenizer.encode(text)
        return ids if self._rule is None else expand(ids, images, self._rule)

    def places(self, group: MessageGroup, ids: TokenIds) -> tuple[Placeholder, ...]:
        """Returns where the images of a group are in its ids, uint32 [N].

        Raises:
            PlacementError: The ids do not hold exactly the runs of these images.
        """
        rule, images = self._rule, images_of([group])
        return () if rule is None or not images else tuple(locate(ids, images, rule))

    def over(self, images: Iterable[Image]) -> Callable[[str], TokenIds]:
        """Returns a function that encodes the pieces of a printed conversation in order.

        It takes as many of the images as each piece shows. A piece that shows more images than are
        left keeps its placeholders.
        """
        rule, left = self._rule, list(images)[::-1]
        if rule is None or not left:
            return self._tokenizer.encode

        def encode(text: str) -> TokenIds:
            ids = self._tokenizer.encode(text)
            shown = int(np.isin(ids, rule.reserved_ids).sum())
            if not 0 < shown <= len(left):
                return ids
            return expand(ids, [left.pop() for _ in range(shown)], rule)

        return encode
