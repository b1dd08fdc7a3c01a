"""Sessions in two parts, and the rows that are kept of them."""

import pytest

from rollmesh.collector import join, split, tokens_of, turns_of
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import session_pb2, trajectory_pb2
from tests.collector.records import (
    record,
    trajectory,
    tree,
    tree_record,
    with_images,
    with_messages,
)


@pytest.mark.parametrize(
    "session",
    [pytest.param(record("s"), id="trajectory"), pytest.param(tree_record("s"), id="tree")],
)
def test_a_head_has_the_lengths_of_the_arrays_and_not_the_arrays(
    session: session_pb2.SessionRecord,
) -> None:
    row = session.tree if session.HasField("tree") else session.trajectories[0]
    tokens = row.tokens
    ids, logprobs, mask = tokens.token_ids_u32le, tokens.logprobs_f32le, tokens.loss_mask_u8
    head, arrays = split(session)
    assert arrays == [ids, logprobs, mask]
    assert ids not in head
    assert tokens_of(row) == len(mask) == 6


def test_two_parts_are_one_session_again_with_its_images_in_order() -> None:
    session = with_images(record("s"), b"cat" * 5, b"dog")
    whole = with_images(record("s"), b"cat" * 5, b"dog")
    head, arrays = split(session)
    joined = b"".join(arrays)
    assert join(session_pb2.SessionRecord.FromString(head), joined) == whole
    with pytest.raises(SessionDamagedError, match="bytes, which do not fit 6 tokens and 2 images"):
        join(session_pb2.SessionRecord.FromString(head), joined[:-1])


def test_messages_are_with_the_arrays_and_not_in_the_head() -> None:
    session = with_messages(with_images(record("s"), b"cat"))
    whole = with_messages(with_images(record("s"), b"cat"))
    head, arrays = split(session)
    assert b"assistant" not in head
    assert join(session_pb2.SessionRecord.FromString(head), b"".join(arrays)) == whole


def test_turns_are_those_of_the_trajectory_or_the_sampled_nodes_of_the_tree() -> None:
    assert turns_of(trajectory("s")) == 1
    assert turns_of(tree()) == 2
    assert tokens_of(trajectory_pb2.Trajectory()) == 0


def test_the_trajectories_that_a_filter_keeps_stay_in_their_order() -> None:
    session = record("s")
    for at in range(3):
        session.trajectories.add(trajectory_id=f"{at}")
    arrays = split(session)[1]
    kept = join(session, b"".join(arrays), [0, 2])
    assert [one.trajectory_id for one in kept.trajectories] == ["s-1", "1"]


def test_a_tree_is_kept_or_removed_as_one_row() -> None:
    session = tree_record("s")
    arrays = b"".join(split(session)[1])
    assert join(session, arrays, [0]) == tree_record("s")
    split(session)
    join(session, arrays, [])
    assert (session.session_id, session.HasField("tree")) == ("s", False)
