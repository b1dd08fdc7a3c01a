"""Limits on what one session may hold."""

from dataclasses import dataclass

from rollmesh.gateway.conversation.session import Session, Turn
from rollmesh.runtime.errors import SessionLimitError


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits on what one session may hold."""

    nodes: int
    tokens: int
    text_bytes: int
    record_bytes: int
    """Limit on the record, which must be small enough to hand over."""
    images: int = 4096
    image_bytes: int = 48 * 1024 * 1024

    def check(self, session: Session) -> None:
        """Checks that a session may take another turn.

        Raises:
            SessionLimitError: The session has reached a limit.
        """
        tree = session.tree
        for name, held, most in (
            ("nodes", len(tree.nodes), self.nodes),
            ("tokens", tree.tokens, self.tokens),
            ("bytes", tree.text_bytes, self.text_bytes),
        ):
            if held >= most:
                raise SessionLimitError(
                    f"the session holds {held} {name} and may hold {most}; close it, or raise "
                    f"max_session_{name} of the gateway",
                    session_id=session.spec.session_id,
                )

    def reserve(self, session: Session, turn: Turn, held: int, added: int) -> None:
        """Reserves room in the session's record for a turn while it is in flight.

        Args:
            session: The session.
            turn: The turn.
            held: Record size of the session's current content, bytes.
            added: Most that the turn may add without new images, bytes.

        Raises:
            SessionLimitError: With the turn, the record would be too large to hand over.
        """
        turn.record_bytes = 0
        held += sum(other.record_bytes for other in session.in_flight)
        held += self._check_images(session)
        if held + added > self.record_bytes:
            raise SessionLimitError(
                f"the session's record would have {held + added} bytes with this turn and may have "
                f"{self.record_bytes}; close it, or raise max_session_record_bytes of the gateway",
                session_id=session.spec.session_id,
            )
        turn.record_bytes = added

    def _check_images(self, session: Session) -> int:
        """Returns the size of the new images of all turns in flight, each counted once, bytes.

        Raises:
            SessionLimitError: With them, the session would have more images than it may.
        """
        new = {
            sha256: len(image.data)
            for turn in session.in_flight
            for sha256, image in turn.images.items()
            if sha256 not in session.images
        }
        size = sum(new.values())
        for name, held, most in (
            ("images", len(session.images) + len(new), self.images),
            ("image_bytes", session.images.size + size, self.image_bytes),
        ):
            if new and held > most:
                raise SessionLimitError(
                    f"the session would have {held} {name.replace('_', ' ')} with this turn and "
                    f"may have {most}; leave some out, or raise max_session_{name} of the gateway",
                    session_id=session.spec.session_id,
                )
        return size
