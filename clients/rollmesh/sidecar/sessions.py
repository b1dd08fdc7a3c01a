"""Which session a request is for, and the key that opens it."""

from collections.abc import Mapping

from rollmesh.runtime.errors import SessionKeyWrongError

_KEY_PREFIX = "rmk-"


def named_session(path: str, headers: Mapping[bytes, str]) -> tuple[str, str]:
    """Returns the id and the key of the session that a request names.

    Args:
        path: What stands for the session in the path: its key, which opens it whatever the agent
            sends as bearer token; its id, which needs the key as bearer token; or nothing, where
            the bearer token alone names it.
        headers: By names in lower case. `x-api-key` is read where there is no bearer token.

    Raises:
        SessionKeyWrongError: No key is given, or keys of two sessions are.
    """
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    bearer = bearer or headers.get(b"x-api-key", "")
    if not bearer.startswith(_KEY_PREFIX):
        bearer = ""  # agents must often be given some key; it says nothing
    if path.startswith(_KEY_PREFIX):
        if bearer and bearer != path:
            raise SessionKeyWrongError(
                "the bearer token is not the key in the path; send one of them"
            )
        bearer, path = path, ""
    if not bearer:
        raise SessionKeyWrongError(
            "give the session's key as bearer token, or call the session's base URL, which holds it"
        )
    return path or bearer.split("-")[1], bearer
