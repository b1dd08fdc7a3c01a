"""Roles that a client certificate shows: URIs such as `rollmesh://role/engine`."""

from collections.abc import Iterable, Mapping

from rollmesh.runtime.access.roles import Role, role_named

_PREFIX = b"rollmesh://role/"


def role_uri(role: Role) -> str:
    """Returns the URI of a certificate that shows a role."""
    return f"{_PREFIX.decode()}{role}"


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Role]:
    """Returns the roles of a verified client certificate; unknown ones do not count.

    Args:
        auth_context: What gRPC says of the connection.
    """
    names = auth_context.get("x509_subject_alternative_name", ())
    found = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    roles = (role_named(name.decode(errors="replace")) for name in found)
    return frozenset(role for role in roles if role is not None)
