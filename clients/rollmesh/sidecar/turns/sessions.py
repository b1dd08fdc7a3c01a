"""The session of a request, and the key that opens it."""

from collections.abc import Mapping

from rollmesh.runtime.errors import SessionKeyWrongError

_KEY_PREFIX = "rmk-"


def named_session(path: str, headers: Mapping[bytes, str]) -> tuple[str, str]:
    """Returns the id and the key of the session that a request names.

    Args:
        path: The session part of the path: the session's key, which works with any placeholder as
            bearer token; the session's id, which needs the key as bearer token; or empty, if the
            bearer token names the session.
        headers: Headers by lower-case name. `x-api-key` is read if there is no bearer token.

    Raises:
        SessionKeyWrongError: There is no key, or there are two different ones.
    """
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    bearer = bearer or headers.get(b"x-api-key", "")
    if not bearer.startswith(_KEY_PREFIX):
        bearer = ""  # a placeholder: many agents require some key
    if path.startswith(_KEY_PREFIX):
        if bearer and bearer != path:
            raise SessionKeyWrongError(
                "the bearer token differs from the key in the path; send only one of them"
            )
        bearer, path = path, ""
    if not bearer:
        raise SessionKeyWrongError(
            "send the session's key as bearer token, or call the session's base URL, "
            "which contains it"
        )
    return path or bearer.split("-")[1], bearer
