"""Reads the context that a session starts with: the path of a node that another session recorded.

Its nodes join the tree as those of a takeover do, and the journal has them with the session. A node
that a model sampled carries IMPORTED: requests match it as a sample, and it is no turn.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rollmesh.chat import (
    Image,
    InvalidInputError,
    MessageGroup,
    PlacementError,
    group_messages,
    make_context,
    read_json,
    read_messages,
    write_json,
)
from rollmesh.gateway.conversation import GivenImage, ImagePolicy
from rollmesh.gateway.deps import BaseDeps, Deps
from rollmesh.gateway.tree import Fidelity, Node, new_root
from rollmesh.runtime.codec import CheckedImage, TokenIds, check_media_type, unpack_ids
from rollmesh.runtime.errors import InvalidFieldError, InvalidImageError, ModelMismatchError
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2

_MAX_ID_CHARS, _MAX_NAME_CHARS = 128, 256
_MAX_ORIGINS = 64
_MAX_NODE_ID = 100_000_000
_MAX_UNIX_MS = 1 << 53
_HASH = "image_url", "sha256:"
"""Type of an image's part, and what precedes the hash in its URL."""


class Start(NamedTuple):
    """A context that a session starts with."""

    origin: session_pb2.SessionOrigin
    nodes: Sequence[Node] = ()
    """Its path, which no tree has yet. Empty if it is text."""
    images: Sequence[CheckedImage] = ()
    """The images that the nodes show, each once."""


async def read_start(deps: BaseDeps, policy: ImagePolicy, given: gateway_pb2.SessionStart) -> Start:
    """Returns the context that a request gives, once all of it has been checked.

    The caller recorded the ids. The facts of the record check them. The template's render does not,
    because recorded ids may differ from it.

    Raises:
        ModelMismatchError: The ids are of another tokenizer or template.
        InvalidFieldError: A field is invalid. The error names it.
    """
    origin = _read_origin(given.origin)
    if origin.kind == session_pb2.ORIGIN_KIND_TEXT:
        if given.nodes or given.images:
            raise InvalidFieldError("start.nodes", "are given, and TEXT has none; leave them out")
        return Start(origin)
    if not isinstance(deps, Deps):
        raise InvalidFieldError(
            "start.origin.kind", "is TOKENS, and the model is served elsewhere; start from TEXT"
        )
    for name, own in deps.model_files._asdict().items():
        if (theirs := getattr(given, name)) != own:
            raise ModelMismatchError(
                f"start.{name}",
                f"is {theirs[:16] or 'not recorded'}, and this gateway has {own[:16]}: the ids "
                "have another meaning; start from the messages as text, or serve that model",
            )
    images = await _checked_images(deps, policy, given.images) if given.images else {}
    nodes = await deps.long_work.run(
        origin.nodes[0].session_id, partial(_read_nodes, deps, given, origin, images)
    )
    return Start(origin, nodes, [*images.values()])


def _read_origin(given: session_pb2.SessionOrigin) -> session_pb2.SessionOrigin:
    kinds = {session_pb2.ORIGIN_KIND_TOKENS, session_pb2.ORIGIN_KIND_TEXT}
    if given.kind not in kinds:
        raise InvalidFieldError("start.origin.kind", f"is {given.kind}; give TOKENS or TEXT")
    if len(given.document_id) > _MAX_NAME_CHARS:
        raise InvalidFieldError(
            "start.origin.document_id", f"is longer than {_MAX_NAME_CHARS} characters"
        )
    if not 0 <= given.template_unix_ms <= _MAX_UNIX_MS:
        raise InvalidFieldError("start.origin.template_unix_ms", "give 0 to 2^53")
    if given.kind == session_pb2.ORIGIN_KIND_TOKENS and not given.nodes:
        raise InvalidFieldError("start.origin.nodes", "is empty; name the recorded node")
    if len(given.nodes) > _MAX_ORIGINS:
        raise InvalidFieldError("start.origin.nodes", f"give at most {_MAX_ORIGINS}")
    for at, one in enumerate(given.nodes):
        if not 0 < len(one.session_id) <= _MAX_ID_CHARS:
            raise InvalidFieldError(
                f"start.origin.nodes[{at}].session_id", f"give 1 to {_MAX_ID_CHARS} characters"
            )
        if at and one.tokens > given.nodes[at - 1].tokens:
            raise InvalidFieldError(
                f"start.origin.nodes[{at}].tokens", "exceeds that of the session before it"
            )
    origin = session_pb2.SessionOrigin()
    origin.CopyFrom(given)
    origin.ClearField("continued")
    return origin


async def _checked_images(
    deps: Deps, policy: ImagePolicy, images: Sequence[session_pb2.SessionImage]
) -> dict[str, CheckedImage]:
    """Returns the images by hash, once they have been decoded."""
    if policy.rule is None:
        raise InvalidFieldError("start.images", "are not served, as the model takes no images")
    names = [f"start.images[{at}].data" for at in range(len(images))]
    hashes = await deps.run(lambda: [hashlib.sha256(one.data).hexdigest() for one in images])
    for one, sha256, name in zip(images, hashes, names, strict=True):
        if sha256 != one.sha256:
            raise InvalidImageError(name, f"has the SHA-256 {sha256}, not the one that is given")
    given = [
        GivenImage(one.data, one.sha256, name) for one, name in zip(images, names, strict=True)
    ]
    found = await policy.decode(given, "start")
    for one, name in zip(images, names, strict=True):
        checked = found[one.sha256]
        check_media_type(one.media_type, checked.media_type, name)
        policy.check_length(checked.width, checked.height, name)
    return found


def _read_nodes(
    deps: Deps,
    given: gateway_pb2.SessionStart,
    origin: session_pb2.SessionOrigin,
    images: Mapping[str, CheckedImage],
) -> list[Node]:
    """Returns the nodes, each with its parent. Runs in a worker thread."""
    try:
        read = read_json(given.context.data.decode()) if given.context.data else {}
        tools, options = read.get("tools"), read.get("chat_template_kwargs")
        texts = [write_json(one).encode() if one else b"" for one in (tools, options)]
        context = make_context(*texts)
    except (ValueError, AttributeError) as error:
        raise InvalidFieldError("start.context.data", f"is no such JSON object: {error}") from error
    parent, nodes, known = new_root(context), list[Node](), set[int]()
    shown, crc32, tokens = set[str](), 0, 0
    for at, one in enumerate(given.nodes):
        field = f"start.nodes[{at}]"
        if not 0 < one.node_id <= _MAX_NODE_ID or one.node_id in known:
            raise InvalidFieldError(f"{field}.node_id", f"give 1 to {_MAX_NODE_ID}, each once")
        known.add(one.node_id)
        group = _read_group(one, field, images)
        shown.update(image.sha256 for message in group for image in message.images)
        ids = _read_ids(deps, one, f"{field}.token_ids_u32le", group)
        before = zlib.crc32(one.token_ids_u32le[: 4 * one.scaffold_tokens], crc32)
        if one.HasField("prompt_crc32") and one.prompt_crc32 != before:
            raise InvalidFieldError(
                f"{field}.prompt_crc32",
                "is not that of the ids before the sampled ones: the record is damaged",
            )
        crc32 = zlib.crc32(one.token_ids_u32le, crc32)
        tokens += len(ids)
        try:
            places = deps.continuation.places(group, ids)
        except PlacementError as error:
            raise InvalidFieldError(f"{field}.token_ids_u32le", str(error)) from error
        reasons = {trajectory_pb2.FIDELITY_REASON_IMPORTED} if one.sampled else set[Fidelity]()
        if one.special_text:
            reasons.add(trajectory_pb2.FIDELITY_REASON_SPECIAL_TEXT)
        parent = Node(
            one.node_id, parent, context, group, ids, len(ids), places, reasons=frozenset(reasons)
        )
        nodes.append(parent)
    messages = tuple(message for node in nodes for message in node.messages)
    if group_messages(messages) != [node.messages for node in nodes]:
        raise InvalidFieldError(
            "start.nodes", "divide the messages in another way than sessions do"
        )
    if images.keys() != shown:
        raise InvalidFieldError("start.images", "are not those that the messages show")
    last = origin.nodes[0]
    if not nodes or (nodes[-1].node_id, tokens) != (last.node_id, last.tokens):
        raise InvalidFieldError(
            "start.nodes", f"do not end with node {last.node_id} after {last.tokens} ids"
        )
    if tokens >= deps.max_context_tokens:
        raise InvalidFieldError(
            "start.nodes",
            f"hold {tokens} ids, and the context has {deps.max_context_tokens}; start from an "
            "earlier node",
        )
    return nodes


def _read_group(
    one: gateway_pb2.StartNode, field: str, images: Mapping[str, CheckedImage]
) -> MessageGroup:
    """Returns the messages of a node."""

    def read_image(name: str, part: Mapping[str, Any]) -> Image:
        url = part.get(_HASH[0])
        address = url.get("url") if isinstance(url, Mapping) else None
        sha256 = address.removeprefix(_HASH[1]) if isinstance(address, str) else ""
        if sha256 not in images:
            raise InvalidInputError(name, "names no image of start.images")
        return Image(0, sha256, images[sha256].width, images[sha256].height)

    try:
        read = read_json(one.data.decode())
        json.dumps(read, ensure_ascii=False).encode()  # no lone surrogates, which no message has
        group = read_messages(read, read_image)
    except InvalidInputError as error:
        raise InvalidFieldError(f"{field}.data", f"{error.field} {error.problem}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidFieldError(f"{field}.data", f"is no array of messages: {error}") from error
    if one.sampled and [message.role for message in group] != ["assistant"]:
        raise InvalidFieldError(f"{field}.sampled", "is set, and the node is no answer")
    return group


def _read_ids(deps: Deps, one: gateway_pb2.StartNode, field: str, group: MessageGroup) -> TokenIds:
    ids = unpack_ids(one.token_ids_u32le, field)
    if len(ids) and int(ids.max()) >= deps.vocabulary_tokens:
        raise InvalidFieldError(field, f"has id {ids.max()}, which is outside of the vocabulary")
    shows = any(message.images for message in group)
    if not shows and deps.banned_ids and np.isin(ids, deps.banned_ids).any():
        raise InvalidFieldError(field, "has ids that stand for images, and the node shows none")
    most = len(ids) if one.sampled else 0
    if one.scaffold_tokens > most:
        raise InvalidFieldError(
            field.replace("token_ids_u32le", "scaffold_tokens"),
            f"is {one.scaffold_tokens}; give at most {most}",
        )
    return ids.copy()  # the request is not kept for them
