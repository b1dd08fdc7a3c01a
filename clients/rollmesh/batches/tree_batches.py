"""Batches of complete conversation trees: each token appears once, trees are concatenated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.images import ImageInputs, ImageProcessor, refuse_images
from rollmesh.batches.rows import (
    Handling,
    LeftOut,
    MissingRewardError,
    TreeColumns,
    sessions_of,
    tree_columns,
)
from rollmesh.client import Delivery, SessionResult, TrajectoryTree
from rollmesh.client.sessions import path_mask
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """B trees with M nodes and T tokens in total, concatenated.

    A token's context is its own path: `position_ids` count along it, and `attention_mask` hides
    everything else, so no token sees another branch or another tree.
    """

    token_ids: NDArray[np.int64]
    """int64 [T]."""
    position_ids: NDArray[np.int64]
    """int64 [T]: number of tokens before it on its path. int64 [3, T] if a processor was given
    whose model has multi-dimensional positions."""
    node_index: NDArray[np.int64]
    """int64 [T]: index of the token's node, 0 to M - 1."""
    loss_mask: NDArray[np.bool_]
    """bool [T]: whether the token is trained."""
    logprobs: NDArray[np.float32]
    """float32 [T]: under the policy that sampled the token. 0.0 if it was not sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [T]: version that sampled the token. -1 if it was not sampled."""
    rewards: NDArray[np.float32]
    """float32 [T]: the reward of each trained turn at the last token of its node. The session's
    reward belongs to no single token. It is in `trees.reward`."""
    advantages: NDArray[np.float32]
    """float32 [T]: zeros, for the trainer to fill. See `spread`."""
    parents: NDArray[np.int64]
    """int64 [M]: index of each node's parent, below its own. -1 for a root."""
    turn_rewards: NDArray[np.float32]
    """float32 [M]: reward of each node's turn alone. NaN if none was given."""
    node_offsets: NDArray[np.int64]
    """int64 [M + 1]: start of each node's tokens, then T."""
    tree_offsets: NDArray[np.int64]
    """int64 [B + 1]: start of each tree's tokens, then T."""
    trees: TreeColumns
    """One value per tree."""
    left_out: tuple[LeftOut, ...]
    """Sessions that are not in the batch, by id."""
    images: tuple[ImageInputs, ...] = ()
    """The model's inputs for the images of each of `trees`. None without a processor."""

    def paths(self) -> list[NDArray[np.int64]]:
        """Returns the tokens from a root to each leaf, tree by tree, oldest leaf first.

        Returns:
            Indices into the per-token arrays, int64 [P] each: `token_ids[path]` is a trajectory as
            `export="leaves"` returns it.
        """
        leaves = np.setdiff1d(np.arange(len(self.parents)), self.parents)
        return [self._path(int(leaf)) for leaf in leaves]

    def unpack(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Splits any [T, ...] array into one [N, ...] per tree, in the order of `trees`."""
        return np.split(values, self.tree_offsets[1:-1]) if len(self.trees) else []

    def spread(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Spreads one value per tree, such as `group_advantages(batch.trees)`, to trained tokens.

        Args:
            values: float [B], one per tree.

        Returns:
            float32 [T]. 0.0 at tokens that are not trained.
        """
        per_token = np.repeat(values, np.diff(self.tree_offsets))
        return np.where(self.loss_mask, per_token, 0).astype(np.float32)

    def attention_mask(self) -> NDArray[np.bool_]:
        """Returns which tokens each token attends to: itself and earlier tokens on its path.

        Returns:
            bool [T, T]. Rows are queries, columns are keys. The mask is dense (T times T bytes).
            Kernels with block masks need only `node_index` and `parents`.
        """
        return path_mask(self.parents, self.node_index)

    def _path(self, node: int) -> NDArray[np.int64]:
        runs: list[NDArray[np.int64]] = []
        while node >= 0:
            runs.append(np.arange(self.node_offsets[node], self.node_offsets[node + 1]))
            node = int(self.parents[node])
        return np.concatenate(runs[::-1])


def pack_trees(
    sources: Iterable[SessionResult | Delivery],
    *,
    missing_reward: Handling = "refuse",
    untrained: Literal["keep", "leave_out"] = "leave_out",
    processor: ImageProcessor | None = None,
) -> TreeBatch:
    """Concatenates the trees of sessions or deliveries in their order.

    Sessions that another attempt replaced are left out as SUPERSEDED. Sessions without a turn have
    no tree.

    Args:
        sources: Sessions opened with `export="tree"`, or deliveries of them.
        missing_reward: Handling of sessions without any reward.
        untrained: Handling of trees without trained tokens.
        processor: Of the model, if it takes images.

    Raises:
        MissingRewardError: With "refuse". Names the session.
        InvalidFieldError: A session was not exported as a tree, or has images and there is no
            processor, or as `ImageProcessor.inputs`.
    """
    kept: list[tuple[SessionResult, TrajectoryTree]] = []
    left_out: list[LeftOut] = []
    for session, tree in _trees(sources):
        name = session.session_id
        if session.superseded:
            left_out.append(_left(name, tree, "SUPERSEDED"))
        elif untrained == "leave_out" and not tree.loss_mask.any():
            left_out.append(_left(name, tree, "UNTRAINED"))
        elif session.reward is None and not _rewarded(tree).any():
            missing = MissingRewardError(name, name, kind="tree of session")
            left_out.append(_refuse_or_leave(name, tree, missing, missing_reward))
        else:
            kept.append((session, tree))
    for session, tree in kept:
        refuse_images(tree.images, processor, f"the tree of session {session.session_id}")
    inputs = () if processor is None else tuple(processor.inputs_of_tree(*one) for one in kept)
    return _lay_out(kept, inputs, tuple(left_out))


def _lay_out(
    kept: list[tuple[SessionResult, TrajectoryTree]],
    inputs: tuple[ImageInputs, ...],
    left_out: tuple[LeftOut, ...],
) -> TreeBatch:
    trees = [tree for _, tree in kept]
    rewards = [_token_rewards(tree) for tree in trees]
    first_node = _offsets([len(tree.parents) for tree in trees])
    tokens_of_nodes = [node.end - node.start for tree in trees for node in tree.nodes]
    token_ids = _joined([tree.token_ids for tree in trees], np.int64)
    positions = [one.position_ids for one in inputs or trees] or [np.empty(0, np.int64)]
    totals = [
        (session.reward or 0.0) + float(earned.sum(dtype=np.float64))
        for (session, _), earned in zip(kept, rewards, strict=True)
    ]
    return TreeBatch(
        token_ids=token_ids,
        position_ids=np.concatenate(positions, axis=-1),
        node_index=_joined(
            [tree.node_index + first for tree, first in zip(trees, first_node, strict=False)],
            np.int64,
        ),
        loss_mask=_joined([tree.loss_mask for tree in trees], np.bool_),
        logprobs=_joined([tree.logprobs for tree in trees], np.float32),
        policy_versions=_joined([tree.policy_versions for tree in trees], np.int64),
        rewards=_joined(rewards, np.float32),
        advantages=np.zeros(len(token_ids), np.float32),
        parents=_joined(
            [
                np.where(tree.parents < 0, -1, tree.parents + first)
                for tree, first in zip(trees, first_node, strict=False)
            ],
            np.int64,
        ),
        turn_rewards=_joined([tree.turn_rewards for tree in trees], np.float32),
        node_offsets=_offsets(tokens_of_nodes),
        tree_offsets=_offsets([len(tree.token_ids) for tree in trees]),
        trees=tree_columns(kept, totals),
        left_out=left_out,
        images=inputs,
    )


def _trees(
    sources: Iterable[SessionResult | Delivery],
) -> Iterator[tuple[SessionResult, TrajectoryTree]]:
    """Yields the sessions that have a turn, with their trees."""
    for session in sessions_of(sources):
        if not session.turns:
            continue
        if session.tree is None:
            raise InvalidFieldError(
                "tree",
                f"session {session.session_id} has turns and no tree; "
                'open sessions with export="tree", or take rows_of',
            )
        yield session, session.tree


def _left(session_id: str, tree: TrajectoryTree, reason: str) -> LeftOut:
    return LeftOut(session_id, reason, int(tree.loss_mask.sum()))


def _refuse_or_leave(
    session_id: str, tree: TrajectoryTree, error: RollmeshError, handling: Handling
) -> LeftOut:
    if handling == "refuse":
        raise error
    return _left(session_id, tree, error.reason)


def _rewarded(tree: TrajectoryTree) -> NDArray[np.bool_]:
    """Returns bool [M]: whether a node is a trained turn with its own reward."""
    trained = np.array([node.trained for node in tree.nodes], np.bool_)
    rewarded: NDArray[np.bool_] = trained & np.isfinite(tree.turn_rewards)
    return rewarded


def _token_rewards(tree: TrajectoryTree) -> NDArray[np.float32]:
    rewards = np.zeros(len(tree.token_ids), np.float32)
    for at in np.flatnonzero(_rewarded(tree)):
        rewards[tree.nodes[at].end - 1] = tree.turn_rewards[at]
    return rewards


def _offsets(sizes: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _joined(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    joined: NDArray[Any] = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
    return joined
