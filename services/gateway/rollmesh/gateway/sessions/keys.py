"""Session keys, each of which grants access to one session only.

A key is derived from the session's id and the journal's secret. So keys need not be stored, a
repeated CreateSession returns the same key, and a gateway that takes over the journal accepts it.
"""

import base64
import hashlib
import hmac

from rollmesh.runtime.errors import SessionKeyWrongError


class SessionKeys:
    """The keys of one journal's sessions."""

    def __init__(self, secret: bytes) -> None:
        """Takes the journal's secret."""
        self._secret = secret

    def key(self, session_id: str) -> str:
        """Returns the key of a session: `rmk-<session id>-<43 characters>`."""
        digest = hmac.digest(self._secret, session_id.encode(), hashlib.sha256)
        return f"rmk-{session_id}-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"

    def check(self, session_id: str, key: str) -> None:
        """Checks a key in constant time.

        Raises:
            SessionKeyWrongError: The key is empty, or it is not the key of this session.
        """
        if not hmac.compare_digest(key.encode(), self.key(session_id).encode()):
            problem = "does not open this session" if key else "is empty"
            raise SessionKeyWrongError(
                f"session_key: {problem}; give the key that CreateSession returned with the id"
            )
