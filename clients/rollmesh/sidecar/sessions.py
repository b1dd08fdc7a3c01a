"""The session of a request, and the key that opens it."""

from collections.abc import Mapping

from rollmesh.runtime.errors import SessionKeyWrongError

_KEY_PREFIX = "rmk-"


def named_session(path: str, headers: Mapping[bytes, str]) -> tuple[str, str]:
    """Returns the id and the key of the session that a request names.

    Args:
        path: The session in the path: its key, which opens it whatever other bearer token is sent;
            its id, which needs the key as bearer token; or empty, if the bearer token names it.
        headers: By lower-case name. `x-api-key` is read if there is no bearer token.

    Raises:
        SessionKeyWrongError: There is no key, or there are two different ones.
    """
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    bearer = bearer or headers.get(b"x-api-key", "")
    if not bearer.startswith(_KEY_PREFIX):
        bearer = ""  # a placeholder: many agents insist on some key
    if path.startswith(_KEY_PREFIX):
        if bearer and bearer != path:
            raise SessionKeyWrongError(
                "the bearer token is not the key in the path; send one of them"
            )
        bearer, path = path, ""
    if not bearer:
        raise SessionKeyWrongError(
            "give the session's key as bearer token, or call the session's base URL"
        )
    return path or bearer.split("-")[1], bearer
