"""Images in journals of both kinds: each once for a session, and gone with it."""

from hashlib import sha256

import pytest

from rollmesh.chat import Image, Message, Placeholder
from rollmesh.gateway import (
    AnswerReceipt,
    Session,
    SessionSpec,
    Transaction,
    insert_session,
    insert_turn,
    outbox,
    read_image_bytes,
    read_images,
    read_next_image,
    read_session,
)
from rollmesh.runtime.codec import CheckedImage
from tests.gateway.closing import COMPLETED, mark_delivered, new_tree
from tests.gateway.journals import Opened
from tests.gateway.worlds import World, said

CAT, DOG = (
    CheckedImage(data, sha256(data).hexdigest(), "image/png", width, 20)
    for data, width in ((b"cat" * 1000, 10), (b"dog", 30))
)


def seeing(*shown: CheckedImage) -> Message:
    found = tuple(Image(0, one.sha256, one.width, one.height) for one in shown)
    return Message("user", "x", images=found)


def write(tx: Transaction, name: str) -> World:
    """Writes a session of two turns that show three images, two of them the same."""
    world, spec = World(), SessionSpec(name, 0)
    insert_session(tx, spec)
    first = seeing(CAT)
    for message, shown in (((first,), [CAT]), ((first, said("A"), seeing(DOG, CAT)), [DOG, CAT])):
        node = world.turn(message, said("A"))
        assert node.parent is not None
        node.parent.images = tuple(Placeholder(one.sha256, 1, 1) for one in shown)
        answer = AnswerReceipt(f"a{node.node_id}", "f", "", 0)
        insert_turn(tx, name, [node.parent, node], answer, shown)
    return world


def close(tx: Transaction, name: str, world: World) -> None:
    session = Session(SessionSpec(name, 0), world.tree)
    outbox.close_session(tx, session, COMPLETED.SerializeToString(), b"", 1, [], [])


async def test_a_session_has_its_images_back_after_a_restart(opened: Opened) -> None:
    async with opened() as journal_:
        world = await journal_.run(lambda tx: write(tx, "s"))
        stored = await journal_.read(lambda tx: read_session(tx, "s", new_tree))
        found = await journal_.read(lambda tx: read_image_bytes(tx, "s", [CAT.sha256, "f" * 64]))
    assert found == {CAT.sha256: CAT.data}
    assert (len(stored.images), stored.image_bytes) == (2, 3003)
    facts = stored.images.get(DOG.sha256)
    assert facts is not None
    assert (facts.media_type, facts.width, facts.height, facts.size) == ("image/png", 30, 20, 3)
    for node_id, node in world.tree.nodes.items():
        assert stored.tree.nodes[node_id].messages == node.messages
        assert stored.tree.nodes[node_id].images == node.images


async def test_images_are_read_one_by_one_and_go_with_their_session(opened: Opened) -> None:
    async with opened() as journal_:
        for name in ("s", "t"):
            world = await journal_.run(lambda tx: write(tx, name))  # noqa: B023
        at, found = 0, []
        while (
            one := await journal_.run(
                lambda tx: read_next_image(tx, "s", at)  # noqa: B023
            )
        ) is not None:
            at, image = one
            found.append((image.sha256, image.data, image.data_bytes))
        assert found == [(one.sha256, one.data, len(one.data)) for one in (CAT, DOG)]
        await journal_.run(lambda tx: close(tx, "s", world))
        letter = await journal_.run(lambda tx: outbox.read_letter(tx, "s"))
        assert [row[-1] is not None for row in letter.rows] == [True, False, True, False]
        await journal_.run(lambda tx: mark_delivered(tx, ["s"]))
        while await journal_.run(outbox.sweep):
            continue
        left = await journal_.read(lambda tx: [read_images(tx, name) for name in "st"])
        assert [len(one) for one in left] == [0, 2]


async def test_images_of_delivered_sessions_go_a_few_bytes_at_a_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "PIECE_IMAGE_BYTES", 3000)
    left: list[int] = []

    def sweep(tx: Transaction) -> bool:
        more = outbox.sweep(tx)
        left.append(tx.db.value("SELECT count(*) FROM images"))
        return more

    names = "abc"
    async with opened() as journal_:
        for name in names:
            await journal_.run(lambda tx: close(tx, name, write(tx, name)))  # noqa: B023
        await journal_.run(lambda tx: mark_delivered(tx, names))
        while await journal_.run(sweep):
            continue
        sessions = await journal_.read(lambda tx: tx.db.value("SELECT count(*) FROM sessions"))
    assert left == [5, 3, 1, 0]  # a cat has the bytes of a piece. A dog goes with the next cat
    assert sessions == 0
