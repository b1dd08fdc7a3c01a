"""Digests of the beginnings of a prompt, by which a router knows where its KV cache is."""

import zlib

_BYTES = 4  # of a packed id
_SHORTEST_TOKENS, _FACTOR = 256, 2


def prefix_crc32s(packed: bytes) -> tuple[list[int], int]:
    """Returns the digests of a prompt's prefixes, and that of all of it, in one pass.

    The prefixes have 256, 512, 1,024 ... ids, so that prompts of one task share the long ones, and
    those of one agent, with its system prompt and tools, the short ones.

    Args:
        packed: The ids as little-endian bytes.

    Returns:
        CRC-32 of each prefix, the shortest first, and of the prompt.
    """
    view, crc32, at = memoryview(packed), 0, 0
    found = []
    end = _SHORTEST_TOKENS * _BYTES
    while end <= len(view):
        crc32, at = zlib.crc32(view[at:end], crc32), end
        found.append(crc32)
        end *= _FACTOR
    return found, zlib.crc32(view[at:], crc32)
