"""The door of `rollmesh.runtime.decoding`: its names for other rooms and tests."""

from rollmesh.runtime.decoding.pool import (
    DecodedImage as DecodedImage,
    ImageDecoders as ImageDecoders,
)
