"""Compares what a template would print with the ids that a session holds.

A session keeps the tokens that were sampled. If the template would now print them differently (it
drops reasoning, strips whitespace, formats a call's arguments differently, or the text tokenizes
differently), the next turn reports it. This is not inferred from probing: the ids of the template's
render are compared with the session's ids.

A prefix of a render that was compared before is known by its digest and is not tokenized again.
At the first difference, tokenizing stops.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rollmesh.chat.templates.ends import Ends
from rollmesh.chat.templates.path import HeldGroup, Seen
from rollmesh.runtime.codec.arrays import TokenIds

_ID_BYTES = 4
_DIGEST_BYTES = 16


class Comparison(NamedTuple):
    """What the template would print, against what a turn's prompt holds."""

    at: int | None
    """Index of the first node of the path that is printed otherwise, its length where only what the
    request adds is; None if all ids are equal."""
    seen: Seen | None = None
    """The text of the prompt up to the model's turn, where it was compared and is equal."""


def compare(
    render: str,
    generation_prompt: str,
    path: Sequence[HeldGroup],
    added: Sequence[TokenIds],
    encoder_after: Callable[[int], Callable[[str], TokenIds]],
    ends: Ends,
) -> Comparison:
    """Compares a render of a conversation with its ids.

    Args:
        render: The whole conversation as the template prints it, the model's turn opened.
        generation_prompt: What opens the model's turn.
        path: The nodes that hold the beginning of the conversation.
        added: The ids that a request adds to them; uint32 [N] each.
        encoder_after: Returns what makes ids of the render after so many nodes of the path, piece
            by piece.
        ends: How the template ends answers: text on both sides tokenizes apart.
    """
    begun, chars, digest = _known(render, path)
    held = np.concatenate([*(node.token_ids for node in path[begun:]), *added])
    at, encode = 0, encoder_after(begun)
    for chunk in _chunks(render, chars, ends):
        ids = encode(chunk)
        differs = _first_difference(ids, held[at : at + len(ids)])
        if differs is not None:
            return Comparison(_node_at(path, begun, at + differs))
        at += len(ids)
    if at < len(held):
        return Comparison(_node_at(path, begun, at))
    if not render.endswith(generation_prompt):
        return Comparison(None)
    size = len(render) - len(generation_prompt)
    digest.update(_bytes(render[chars:size]))
    return Comparison(None, Seen(size, digest.digest()))


def divide(
    ids: TokenIds, known: Sequence[TokenIds | None], generation_prompt: TokenIds
) -> list[TokenIds] | None:
    """Divides the ids of a render among the groups that it prints.

    Args:
        ids: The ids of all groups, and of what opens the model's turn; uint32 [N].
        known: The ids of each group; None for an answer, which takes what is left between others.
        generation_prompt: What opens the model's turn; uint32 [N].

    Returns:
        The ids of each group, which joined with `generation_prompt` are `ids`; None if they are
        not found.
    """
    if not _ends_with(ids, generation_prompt):
        return None
    parts: list[TokenIds] = []
    end = len(ids) - len(generation_prompt)
    for at in range(len(known) - 1, -1, -1):
        own, before = known[at], known[at - 1]
        if at == 0:
            begin = 0
        elif own is not None:
            begin = end - len(own)
        elif before is not None:
            begin = _last_index(ids[:end], before) + len(before)
        else:
            return None
        if begin < 0 or (own is not None and not _ends_with(ids[begin:end], own)):
            return None
        parts.append(ids[begin:end].copy())
        end = begin
    return parts[::-1]


def _known(render: str, path: Sequence[HeldGroup]) -> tuple[int, int, "hashlib.blake2b"]:
    """Returns how many nodes, and characters of them, were compared before, and their digest."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    begun = chars = 0
    for at, node in enumerate(path):
        if node.seen is None:
            continue
        longer = digest.copy()
        longer.update(_bytes(render[chars : node.seen.chars]))
        if longer.digest() != node.seen.digest:
            break
        begun, chars, digest = at + 1, node.seen.chars, longer
    return begun, chars, digest


def _chunks(render: str, begin: int, ends: Ends) -> Iterator[str]:
    """Yields the rest of a render, cut where answers end."""
    texts = ends.headers.values() if ends.headers else (ends.text, ends.call)
    pattern = re.compile("|".join(map(re.escape, sorted(set(texts)))))
    for found in pattern.finditer(render, begin):
        seam = found.start() if ends.headers else found.end()
        if seam > begin:
            yield render[begin:seam]
            begin = seam
    yield render[begin:]


def _first_difference(ids: TokenIds, held: TokenIds) -> int | None:
    size = min(len(ids), len(held))
    differing = np.flatnonzero(ids[:size] != held[:size])
    if len(differing):
        return int(differing[0])
    return None if len(ids) == len(held) else size


def _node_at(path: Sequence[HeldGroup], begun: int, offset: int) -> int:
    """Returns the index of the node that holds an id, counted from the first of `path[begun:]`."""
    offset += path[begun - 1].end if begun else 0
    return next((at for at in range(begun, len(path)) if path[at].end > offset), len(path))


def _ends_with(ids: TokenIds, end: TokenIds) -> bool:
    return len(end) <= len(ids) and np.array_equal(ids[len(ids) - len(end) :], end)


def _last_index(ids: TokenIds, part: TokenIds) -> int:
    """Returns the last index of `part` in `ids`; less than minus its length if absent."""
    data, wanted = ids.tobytes(), part.tobytes()
    at = data.rfind(wanted)
    while at >= 0 and at % _ID_BYTES:
        at = data.rfind(wanted, 0, at + len(wanted) - 1)
    return at // _ID_BYTES if at >= 0 else -len(part) - 1


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
