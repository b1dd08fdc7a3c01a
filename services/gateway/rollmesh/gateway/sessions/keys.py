"""Session keys: what opens a session and nothing else.

A key is derived from the session's id with the journal's secret, so no key is stored, a repeated
CreateSession returns the same one, and a gateway that takes over the journal accepts it.
"""

import base64
import hashlib
import hmac

from rollmesh.runtime.errors import SessionKeyWrongError

SECRET_BYTES = 32


class SessionKeys:
    """The keys of one journal's sessions."""

    def __init__(self, secret: bytes) -> None:
        """Takes the journal's secret, `SECRET_BYTES` long."""
        self._secret = secret

    def key(self, session_id: str) -> str:
        """Returns the key of a session: `rmk-<session id>-<43 characters>`."""
        digest = hmac.digest(self._secret, session_id.encode(), hashlib.sha256)
        return f"rmk-{session_id}-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"

    def check(self, session_id: str, key: str) -> None:
        """Checks a key, in a time that does not tell how much of it is right.

        Raises:
            SessionKeyWrongError: There is none, or it is not the key of this session.
        """
        if not hmac.compare_digest(key.encode(), self.key(session_id).encode()):
            problem = "does not open this session" if key else "is empty"
            raise SessionKeyWrongError(
                f"session_key: {problem}; give the key that CreateSession returned with the id"
            )
