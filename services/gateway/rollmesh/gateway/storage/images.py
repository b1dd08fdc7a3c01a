"""Images of sessions in the journal: each once for a session, beside its turns."""

from collections.abc import Iterable

from rollmesh.gateway.conversation.images import ImageFacts, SessionImages
from rollmesh.gateway.storage.transaction import Transaction
from rollmesh.runtime.codec.images import CheckedImage
from rollmesh.v1 import session_pb2


def insert_images(tx: Transaction, session_id: str, images: Iterable[CheckedImage]) -> None:
    """Stores those images of a session that are not stored yet."""
    tx.db.run_many(
        "INSERT INTO images (session_id, sha256, media_type, width, height, data)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING",
        [
            (session_id, one.sha256, one.media_type, one.width, one.height, one.data)
            for one in images
        ],
    )


def read_images(tx: Transaction, session_id: str) -> SessionImages:
    """Returns the images of a session, without their bytes."""
    rows = tx.db.rows(
        "SELECT sha256, media_type, width, height, length(data) FROM images WHERE session_id = ?1",
        session_id,
    )
    return SessionImages({sha256: ImageFacts(*facts) for sha256, *facts in rows})


def read_image_bytes(tx: Transaction, session_id: str, wanted: Iterable[str]) -> dict[str, bytes]:
    """Returns the bytes of images of a session, by hash."""
    rows = tx.db.rows(
        f"SELECT sha256, data FROM images WHERE session_id = ?1 AND sha256 {tx.db.within(2)}",  # noqa: S608
        session_id,
        tx.db.listed(wanted),
    )
    return {sha256: bytes(data) for sha256, data in rows}


def read_next_image(
    tx: Transaction, session_id: str, after: int
) -> tuple[int, session_pb2.SessionImage] | None:
    """Returns the next image of a session and its position; None if there are no more.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        after: Position of the image before it; 0 starts from the beginning.
    """
    row = tx.db.row(
        "SELECT n, sha256, media_type, data FROM images WHERE session_id = ?1 AND n > ?2"
        " ORDER BY n LIMIT 1",
        session_id,
        after,
    )
    if row is None:
        return None
    n, sha256, media_type, data = row
    return n, session_pb2.SessionImage(
        sha256=sha256, media_type=media_type, data=data, data_bytes=len(data)
    )


def remove_images(tx: Transaction, session_id: str, size: int) -> int:
    """Removes images of a session, oldest first, until there are none or `size` bytes are gone.

    Returns:
        Bytes that are gone: less than `size` if no image is left.
    """
    rows = tx.db.rows(
        "DELETE FROM images WHERE n IN (SELECT n FROM (SELECT n,"
        " sum(length(data)) OVER (ORDER BY n) - length(data) AS older"
        " FROM images WHERE session_id = ?1) AS sized WHERE older < ?2) RETURNING length(data)",
        session_id,
        size,
    )
    return sum(length for (length,) in rows)
