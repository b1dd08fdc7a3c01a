"""A session's conversation tree for tree training: each token once, packed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.client.sessions.tokens import read_images, read_tokens, reason_names
from rollmesh.runtime.codec.arrays import Logprobs, Mask, TokenIds
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2


@dataclass(frozen=True, slots=True)
class TrajectoryTree:
    """A conversation tree of M nodes and N tokens; a forest if the tools changed.

    The tokens of a node are contiguous and follow those of its parent. A token attends only to its
    own path: `position_ids` count along it, and `attention_mask` hides everything else.
    """

    token_ids: TokenIds
    """uint32 [N]: prompt and sampled ids, exactly as the engine had them."""
    logprobs: Logprobs
    """float32 [N]: under the sampling policy; 0.0 for tokens that were not sampled."""
    loss_mask: Mask
    """bool [N]: true if the token is trained."""
    policy_versions: NDArray[np.int64]
    """int64 [N]: version that sampled the token; -1 for tokens that were not sampled."""
    position_ids: NDArray[np.int64]
    """int64 [N]: number of tokens before it on its path."""
    node_index: NDArray[np.int64]
    """int64 [N]: node of the token, 0 to M - 1."""
    parents: NDArray[np.int64]
    """int64 [M]: index of each node's parent, below its own; -1 for a root."""
    turn_rewards: NDArray[np.float64]
    """float64 [M]: reward of each node's turn; NaN if it has none."""
    nodes: tuple[trajectory_pb2.TrajectoryNode, ...]
    """Message, lineage, reasons, engine and prompt CRC of each of the M nodes."""
    reasons: tuple[str, ...]
    """Fidelity reasons of the tree; ("EXACT",) if there are none."""
    images: tuple[trajectory_pb2.TrajectoryImage, ...] = ()
    """Its images by ascending start, and the tokens that stand for each; the files are in the
    session's `images`."""

    @classmethod
    def from_proto(cls, proto: trajectory_pb2.TrajectoryTree) -> "TrajectoryTree":
        """Reads a tree.

        Raises:
            InvalidFieldError: Arrays differ in length, nodes do not cover them, or a child
                precedes its parent.
        """
        arrays = read_tokens(proto)
        parents = np.array(
            [node.parent_index if node.HasField("parent_index") else -1 for node in proto.nodes],
            np.int64,
        )
        bounds = np.array([0, *(node.end for node in proto.nodes)], np.int64)
        sizes = np.diff(bounds)
        if bounds[-1] != len(arrays.token_ids) or (sizes < 0).any():
            raise InvalidFieldError(
                "tree.nodes", "do not cover all tokens; the collector's answer is damaged"
            )
        if (parents >= np.arange(len(parents))).any():
            raise InvalidFieldError(
                "tree.nodes", "lists a child before its parent; the collector's answer is damaged"
            )
        ends = np.zeros(len(parents) + 1, np.int64)  # of the paths; the last is that of no parent
        for at, parent in enumerate(parents):
            ends[at] = ends[parent] + sizes[at]
        offsets = ends[:-1] - bounds[1:]
        return cls(
            *arrays,
            position_ids=np.arange(bounds[-1]) + np.repeat(offsets, sizes),
            node_index=np.repeat(np.arange(len(parents)), sizes),
            parents=parents,
            turn_rewards=np.array(
                [node.reward if node.HasField("reward") else np.nan for node in proto.nodes],
                np.float64,
            ),
            nodes=tuple(proto.nodes),
            reasons=reason_names(proto.reasons),
            images=read_images(proto),
        )

    def leaves(self) -> NDArray[np.int64]:
        """Returns the nodes without children, int64 [L], oldest first."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    def path(self, node: int) -> NDArray[np.int64]:
        """Returns the tokens from the root to the end of a node.

        Returns:
            Indices into the token arrays, int64 [P], ascending: `token_ids[path]` is the sequence
            that the engine had, and `position_ids[path]` is 0 to P - 1.
        """
        runs: list[NDArray[np.int64]] = []
        while node >= 0:
            runs.append(np.arange(self.nodes[node].start, self.nodes[node].end))
            node = int(self.parents[node])
        return np.concatenate([np.empty(0, np.int64), *runs[::-1]])

    def paths(self) -> list[NDArray[np.int64]]:
        """Returns `path` of every leaf; these are the trajectories of `export="leaves"`."""
        return [self.path(int(leaf)) for leaf in self.leaves()]

    def attention_mask(self) -> NDArray[np.bool_]:
        """Returns which tokens each token attends to: itself and those before it on its path.

        Returns:
            bool [N, N], row: the attending token, column: the visible ones. Dense, N * N bytes;
            kernels with block masks need only `node_index` and `parents`.
        """
        return path_mask(self.parents, self.node_index)


def path_mask(parents: NDArray[np.int64], node_index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns which tokens each token attends to: itself and those before it on its path.

    Args:
        parents: int64 [M], each below its child's own index; -1 for a root.
        node_index: int64 [N], ascending: the node of each token.

    Returns:
        bool [N, N], row: the attending token, column: the visible ones.
    """
    count = len(parents)
    above = np.zeros((count, count), np.bool_)  # [M, M]: row, its ancestors and itself
    for at, parent in enumerate(parents):
        if parent >= 0:
            above[at] = above[parent]
        above[at, at] = True
    seen = above[node_index[:, None], node_index[None, :]]
    return np.tril(seen)  # parents precede their children, so this hides only later tokens
