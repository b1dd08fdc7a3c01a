"""A session as the viewer shows it: its tree, the paths through it, and the tokens of each node."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from rollmesh.client import message_of
from rollmesh.runtime import label_of, mask_words, run_of, version_of
from rollmesh.runtime.codec import (
    context_in,
    messages_in,
    name_of,
    plain,
    unpack_ids,
    unpack_logprobs,
    unpack_tokens,
)
from rollmesh.v1 import (
    chat_pb2,
    collector_pb2,
    gateway_pb2,
    sampling_pb2,
    session_pb2,
    trajectory_pb2,
)

_START = attrgetter("start")
Decode: TypeAlias = Callable[[list[int]], str]
"""Returns the text of token ids, special tokens included."""


def closed_session(
    found: collector_pb2.ReadSessionsResponse, decode: Decode | None
) -> dict[str, Any]:
    """Returns a closed session with its nodes, their tokens, and the paths to its leaves.

    A node has the numbers of trainers for its tokens, by name. None stands for no number.
    """
    record, annotations = found.session, _annotations(found.annotations)
    if record.HasField("tree"):
        nodes = list(_of_tree(record.tree, annotations.get("", {})))
        paths = _paths_of_tree(nodes)
    else:
        nodes, paths = _of_trajectories(record.trajectories, annotations)
    if record.capture in (session_pb2.CAPTURE_TEXT, session_pb2.CAPTURE_LOGPROBS):
        known: dict[int, dict[str, Any]] = {  # parents first
            one.node_id: _of_text(one) for one in record.messages
        }
        known |= {one["node_id"]: one for one in nodes if one["node_id"] not in known}
        nodes = list(known.values())
        for one in nodes:
            one["parent"] = one["parent"] if one["parent"] in known else None
        paths = _paths_of_tree(nodes)
    messages = {one.node_id: one for one in record.messages}
    for node in nodes:
        _complete(node, decode)
        if said := messages.get(node["node_id"]):
            node["messages"] = messages_in(said)
            node["context"] = said.context_index if said.HasField("context_index") else None
    return {
        **_head(record),
        "outcome": name_of(session_pb2.SessionOutcome.DESCRIPTOR, record.outcome),
        "purpose": name_of(
            session_pb2.SessionPurpose.DESCRIPTOR,
            record.purpose or session_pb2.SESSION_PURPOSE_TRAIN,
        ),
        "superseded": record.superseded,
        "reward": record.reward if record.HasField("reward") else None,
        "abandoned": record.abandoned,
        "closed": record.closed_unix_ms,
        "capture": name_of(session_pb2.Capture.DESCRIPTOR, record.capture),
        "numerics": [plain(one) for one in record.numerics],
        "contexts": [context_in(record, at) for at in range(len(record.contexts))],
        "messages_left_out": record.messages_left_out,
        "images": [
            {"sha256": one.sha256, "media_type": one.media_type, "bytes": one.data_bytes}
            for one in record.images
        ],
        "nodes": nodes,
        "paths": paths,
        "annotations": sorted({name for of in annotations.values() for name in of}),
        "live": False,
    }


def running_session(found: gateway_pb2.GetSessionResponse, decode: Decode | None) -> dict[str, Any]:
    """Returns an open session so far, in the form of a closed one.

    A turn that is being sampled is its node without an end. Only it has log-probabilities.
    """
    one = found.session
    nodes = []
    for node in found.nodes:
        ids = unpack_ids(node.token_ids_u32le, "token_ids").tolist()
        shown = _blank(node) | {
            "role": name_of(chat_pb2.Role.DESCRIPTOR, node.role),
            "sampled": node.sampled,
            "reasons": _names(node.reasons),
            "lineage": name_of(trajectory_pb2.Lineage.DESCRIPTOR, node.lineage),
            "label": label_of(node),
            "finish_reason": _finish(node),
            "sampling": plain(node.sampling) if node.HasField("sampling") else None,
            "scaffold": node.scaffold_tokens,
            "messages": [message_of(message) for message in node.messages],
            "ids": ids,
            "logprobs": None,
            "mask": None,
            "versions": _versions(
                node.version_spans, -node.scaffold_tokens, len(ids) - node.scaffold_tokens
            ),
        }
        _complete(shown, decode)
        nodes.append(shown)
    nodes += [_sampling(turn, decode) for turn in found.running]
    return {
        **_head(one),
        "outcome": "OPEN",
        "in_flight": one.in_flight,
        "idle_ms": one.idle_ms,
        "nodes": nodes,
        "paths": _paths_of_tree(nodes),
        "live": True,
    }


def _sampling(turn: gateway_pb2.RunningTurn, decode: Decode | None) -> dict[str, Any]:
    """Returns a turn that is being sampled as a node, with its last tokens."""
    node = _blank(turn) | {
        "role": "ASSISTANT",
        "sampled": True,
        "lineage": "MAIN",
        "finish_reason": f"SAMPLING, {turn.sampled_tokens} TOKENS SO FAR",
        "messages": [{"role": "assistant", "content": turn.text}],
        "ids": unpack_ids(turn.token_ids_u32le, "token_ids").tolist(),
        "logprobs": unpack_logprobs(turn.logprobs_f32le, "logprobs").tolist(),
        "mask": None,
        "versions": _versions(
            turn.version_spans,
            turn.sampled_tokens - len(turn.token_ids_u32le) // 4,
            turn.sampled_tokens,
        ),
    }
    _complete(node, decode)
    return node


def _head(one: session_pb2.SessionRecord | gateway_pb2.OpenSession) -> dict[str, Any]:
    """Returns the fields that closed and open sessions have."""
    names = ("session_id", "run_id", "group_id", "sample_index", "group_size", "model", "turns")
    return {
        **{name: getattr(one, name) for name in names},
        "metadata": dict(sorted(one.metadata.items())),
        "opened": one.opened_unix_ms,
        "origin": plain(one.origin) if one.HasField("origin") else None,
    }


def _blank(
    node: gateway_pb2.SessionNode | gateway_pb2.RunningTurn | session_pb2.NodeMessages,
) -> dict[str, Any]:
    """Returns a node of which nothing but its place is known."""
    return {
        "node_id": node.node_id,
        "parent": node.parent_node_id or None,
        **dict.fromkeys(("lineage", "label", "finish_reason"), ""),
        "sampled": False,
        "trained": None,
        "scaffold": 0,
        **{name: [] for name in ("reasons", "ids", "logprobs", "mask", "versions", "images")},
    }


def listed(one: gateway_pb2.OpenSession) -> dict[str, Any]:
    """Returns the row of an open session."""
    names = ("session_id", "run_id", "group_id", "sample_index", "model", "turns", "in_flight")
    return {name: getattr(one, name) for name in (*names, "idle_ms", "opened_unix_ms")}


_Annotations: TypeAlias = Mapping[str, list[float | None]]
"""Numbers for the tokens of a trajectory or a tree, by name."""


def _annotations(found: Iterable[collector_pb2.Annotation]) -> dict[str, _Annotations]:
    """Returns annotations by the id of their trajectory."""
    by_trajectory: dict[str, dict[str, list[float | None]]] = {}
    for one in found:
        values = np.frombuffer(one.values_f32le, "<f4")
        shown = [float(value) if np.isfinite(value) else None for value in values]
        by_trajectory.setdefault(one.trajectory_id, {})[one.name] = shown
    return dict(by_trajectory)


def _cut(annotations: _Annotations, at: slice) -> dict[str, list[float | None]]:
    return {name: values[at] for name, values in annotations.items()}


def _of_trajectories(
    trajectories: Iterable[trajectory_pb2.Trajectory], annotations: Mapping[str, _Annotations]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    nodes: dict[int, dict[str, Any]] = {}
    paths = []
    for one in trajectories:
        ids, logprobs, mask = unpack_tokens(one.tokens, "tokens")
        lineage = name_of(trajectory_pb2.Lineage.DESCRIPTOR, one.lineage)
        label = label_of(one)
        path: list[int] = []
        for node_id, parts in groupby(one.segments, lambda segment: segment.node_id):
            segments = list(parts)  # the template's tokens, then those that were sampled
            node = segments[-1]
            start, trained = segments[0].start, any(part.trained for part in segments)
            if node_id not in nodes or trained:  # elsewhere it was a shared prefix
                at = slice(start, node.end)
                nodes[node_id] = {
                    "node_id": node_id,
                    "parent": path[-1] if path else None,
                    "lineage": lineage,
                    "label": label,
                    "scaffold": node.start - start if node.sampled else node.end - start,
                    "ids": ids[at].tolist(),
                    "logprobs": logprobs[at].tolist(),
                    "mask": mask[at].tolist(),
                    "trained": trained,
                    "reasons": _names(node.reasons),
                    "annotations": _cut(annotations.get(one.trajectory_id, {}), at),
                    **_node(node, start, one),
                }
            path.append(node_id)
        paths.append(
            {
                "trajectory_id": one.trajectory_id,
                "lineage": lineage,
                "label": label,
                "reasons": _names(one.reasons),
                "reward": one.reward if one.HasField("reward") else None,
                "nodes": path,
            }
        )
    return list(nodes.values()), paths


def _of_text(node: session_pb2.NodeMessages) -> dict[str, Any]:
    """Returns a node of a session without token ids."""
    role = next((str(one.get("role", "")).upper() for one in messages_in(node)), "")
    return _blank(node) | {"role": role, "sampled": role == "ASSISTANT"}


def _of_tree(
    tree: trajectory_pb2.TrajectoryTree, annotations: _Annotations
) -> Iterable[dict[str, Any]]:
    ids, logprobs, mask = (array.tolist() for array in unpack_tokens(tree.tokens, "tokens"))
    for node in tree.nodes:
        at = slice(node.start, node.end)
        yield {
            "node_id": node.node_id,
            "parent": tree.nodes[node.parent_index].node_id
            if node.HasField("parent_index")
            else None,
            "lineage": name_of(trajectory_pb2.Lineage.DESCRIPTOR, node.lineage),
            "label": label_of(node),
            "scaffold": node.scaffold_tokens,
            "ids": ids[at],
            "logprobs": logprobs[at],
            "mask": mask[at],
            "trained": node.trained,
            "reasons": _names(node.reasons),
            "annotations": _cut(annotations, at),
            **_node(node, node.start, tree),
        }


def _node(
    node: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode,
    start: int,
    of: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree,
) -> dict[str, Any]:
    first, last = (bisect_left(of.images, at, key=_START) for at in (start, node.end))
    return {
        "role": name_of(chat_pb2.Role.DESCRIPTOR, node.role),
        "sampled": node.sampled,
        "finish_reason": _finish(node),
        "engine_id": node.engine_id,
        "reward": node.reward if node.HasField("reward") else None,
        "sampling": plain(node.sampling) if node.HasField("sampling") else None,
        "request_ids": list(node.model_request_ids),
        "versions": _versions(of.version_spans, start, node.end),
        "images": [
            {"sha256": one.sha256, "start": one.start - start, "tokens": one.tokens}
            for one in of.images[first:last]
        ],
    }


def _versions(
    spans: Sequence[sampling_pb2.VersionSpan], start: int, end: int
) -> list[dict[str, Any]]:
    """Returns the versions of the tokens from `start` to `end`, by index from `start` on."""
    first = bisect_right(spans, start, key=attrgetter("end"))  # spans ascend
    return [
        {
            "start": max(span.start, start) - start,
            "end": min(span.end, end) - start,
            "run": run_of(span.policy_version),
            "version": version_of(span.policy_version),
            "adapter": span.adapter,
            "engine_id": span.engine_id,
        }
        for span in spans[first : bisect_left(spans, end, key=_START)]
    ]


def _paths_of_tree(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_id = {one["node_id"]: one for one in nodes}
    inner = {one["parent"] for one in nodes}
    paths = []
    for leaf in nodes:
        if leaf["node_id"] in inner:
            continue
        path, at = dict[int, None](), leaf["node_id"]
        while at is not None and at not in path:  # a damaged tree has an id twice
            path[at] = None
            at = by_id[at]["parent"]
        paths.append(
            {
                "trajectory_id": "",
                "lineage": leaf["lineage"],
                "label": leaf["label"],
                "reasons": leaf["reasons"],
                "reward": None,
                "nodes": list(path)[::-1],
            }
        )
    return paths


def _complete(node: dict[str, Any], decode: Decode | None) -> None:
    """Adds the texts of a node's tokens, and why tokens are not trained."""
    node["why"] = mask_words(node["reasons"], node["trained"])
    if decode is not None:
        node["text"] = decode(node["ids"])
        node["texts"] = [decode([one]) for one in node["ids"]]


def _names(reasons: Iterable[int]) -> list[str]:
    return [name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, one) for one in reasons]


def _finish(node: Any) -> str:
    if not node.HasField("finish_reason"):
        return ""
    return name_of(sampling_pb2.FinishReason.DESCRIPTOR, node.finish_reason)
