"""Who calls: every role, strangers, and those who show what opens nothing."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.kills.matrix import Doors
from rollmesh.runtime.access import TABLE, CallerConfig, Identity, Role, may_call
from rollmesh.runtime.rpc import open_channel
from tests.trial_certificates import make_certificates

_Metadata = tuple[tuple[str, str], ...]
_REFUSALS = {"CALLER_UNKNOWN", "ROLE_REFUSED"}
_NO_ANSWER = {"left", "DEADLINE", "DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"}
"""Outcomes that tell nothing: the caller left, or there was no time or no connection."""
_TOO_LARGE = {"RESOURCE_EXHAUSTED"}
"""What gRPC itself says of large metadata, before anybody reads them."""
_REGISTER = "/rollmesh.internal.v1.MembershipService/Register"
"""Refuses a role also if it registers as another one."""
_NOBODY: frozenset[Role] = frozenset()


@dataclass(frozen=True)
class Caller:
    """What one caller shows, and what that should open."""

    name: str
    roles: frozenset[Role] | None
    """Roles that the mesh should see. None if it asks for none."""
    identity: Identity
    metadata: _Metadata = ()
    is_met: bool = True
    """Whether the handshake succeeds."""

    def may_call(self, method: str) -> bool:
        """Returns whether the table lets the caller call a method, given by its full name."""
        return self.roles is None or (self.is_met and may_call(method, self.roles))

    def violation(self, method: str, outcome: str) -> str:
        """Returns how an outcome contradicts the table of roles. Empty if it does not.

        Args:
            method: Full name of the method.
            outcome: Reason or status code, `OK`, or `left`.
        """
        if self.roles is None or outcome in _NO_ANSWER:
            return ""
        if not self.is_met:
            return f"{self.name}, who cannot shake hands, got {outcome}"
        if may_call(method, self.roles):
            is_refused = outcome in _REFUSALS and (method, outcome) != (_REGISTER, "ROLE_REFUSED")
            return f"{self.name}, whom the table lets in, got {outcome}" if is_refused else ""
        expected = "ROLE_REFUSED" if self.roles else "CALLER_UNKNOWN"
        if outcome == expected or outcome in _TOO_LARGE:
            return ""
        return f"{self.name}, whom the table lets not in, got {outcome}"


class Callers:
    """Makes callers of a mesh, and keeps their channels."""

    def __init__(self, doors: Doors, locks: Path, addresses: Mapping[str, str]) -> None:
        """Reads the tokens and certificates.

        Args:
            doors: What the mesh asks for.
            locks: Folder with `tokens` and `certs`, as the doors need them.
            addresses: host:port of the services, by their names.
        """
        self._doors = doors
        self._certs = locks / "certs"
        self._foreign = locks / f"foreign-{os.getpid()}"
        self._addresses = addresses
        self._channels: dict[tuple[int, str], grpc.aio.Channel] = {}
        self._identities: dict[str, Identity] = {}
        self._tokens = {
            role: (locks / "tokens" / f"{role}.token").read_text().strip()
            for role in (Role if doors is not Doors.OPEN else ())
        }
        if doors is Doors.TLS:
            make_certificates(self._foreign)

    @property
    def tokens(self) -> list[str]:
        """The tokens of all roles."""
        return list(self._tokens.values())

    def trainer(self) -> Caller:
        """Returns a trainer as it should be."""
        return self._own(Role.TRAINER)

    def known(self, rng: random.Random) -> Caller:
        """Returns a caller with the token of a role. Roles that may call more come more often."""
        if self._doors is Doors.OPEN:
            return self.trainer()
        weights = [sum(role in allowed for allowed in TABLE.values()) for role in Role]
        return self._own(rng.choices(list(Role), weights)[0])

    def other(self, rng: random.Random) -> Caller:
        """Returns any caller: with parts of credentials, with wrong ones, with none."""
        if self._doors is Doors.TOKENS:
            shown, roles, metadata = self._token(rng)
            return Caller(shown, roles, self._identity("plain"), metadata)
        if rng.random() < 0.1:
            stranger = rng.choice(("plain", "no certificate", "foreign"))
            metadata = _bearer(self._tokens[rng.choice(list(Role))])
            return Caller(stranger, _NOBODY, self._identity(stranger), metadata, is_met=False)
        certified = rng.choice(list(Role))
        shown, roles, metadata = self._token(rng)
        name = f"certificate of {certified} with {shown}"
        return Caller(name, roles | {certified}, self._identity(certified), metadata)

    def channel(self, caller: Caller, service: str) -> grpc.aio.Channel:
        """Returns the channel of a caller to a service."""
        key = id(caller.identity), service
        if key not in self._channels:
            address = self._addresses[service]
            self._channels[key] = open_channel(address, identity=caller.identity)
        return self._channels[key]

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()

    def _own(self, role: Role) -> Caller:
        if self._doors is Doors.OPEN:
            return Caller("anybody", None, self._identity("plain"))
        metadata = _bearer(self._tokens[role])
        shown = role if self._doors is Doors.TLS else "plain"
        return Caller(role, frozenset({role}), self._identity(shown), metadata)

    def _token(self, rng: random.Random) -> tuple[str, frozenset[Role], _Metadata]:
        """Returns a token or what stands for it, the roles that it shows, and the metadata."""
        role = rng.choice(list(Role))
        if rng.random() < 0.5:
            return f"token of {role}", frozenset({role}), _bearer(self._tokens[role])
        name, metadata = rng.choice(_WRONG)
        return f"{name} of {role}", _NOBODY, metadata(self._tokens[role])

    def _identity(self, name: str) -> Identity:
        if name not in self._identities:
            self._identities[name] = Identity(self._files(name))
        return self._identities[name]

    def _files(self, name: str) -> CallerConfig:
        ca = f"{self._certs}/ca.crt"
        match name:
            case "plain":
                return CallerConfig()
            case "no certificate":
                return CallerConfig(tls_ca_file=ca)
            case "foreign":
                folder, role = self._foreign, str(Role.OPERATOR)
            case role:
                folder = self._certs
        return CallerConfig(
            tls_ca_file=ca,
            tls_certificate_file=f"{folder}/{role}.crt",
            tls_key_file=f"{folder}/{role}.key",
        )


def _bearer(token: str) -> _Metadata:
    return (("authorization", f"Bearer {token}"),)


def _turned(token: str) -> str:
    return token[:-1] + ("A" if token[-1] != "A" else "B")


_WRONG: Sequence[tuple[str, Callable[[str], _Metadata]]] = (
    ("no token, instead", lambda _: ()),
    ("an empty token, instead", lambda _: _bearer("")),
    ("a truncated token", lambda token: _bearer(token[:-1])),
    ("the first half of a token", lambda token: _bearer(token[: len(token) // 2])),
    ("a token with another last character", lambda token: _bearer(_turned(token))),
    ("a token in upper case and more", lambda token: _bearer(f"{token}Z".upper())),
    ("a token and more", lambda token: _bearer(token + token)),
    ("two tokens, the wrong one first,", lambda token: _bearer("x" * 40) + _bearer(token)),
    ("two tokens in one entry", lambda token: _bearer(f"{token}, Bearer {token}")),
    ("a large token", lambda token: _bearer(token * 100)),
    ("a token that is too large", lambda token: _bearer(token * 600)),
    ("a token of another scheme", lambda token: (("authorization", f"Basic {token}"),)),
    ("a bare token", lambda token: (("authorization", token),)),
    ("a token in another header", lambda token: (("x-authorization", f"Bearer {token}"),)),
    ("a role's name, instead", lambda _: _bearer("operator")),
)
"""What opens nothing, made from a token."""
