"""The door of `rollmesh.runtime.access`: its names for other rooms and tests."""

from rollmesh.runtime.access.guard import (
    Failures as Failures,
    address_of as address_of,
    caller_roles as caller_roles,
    check_caller as check_caller,
)
from rollmesh.runtime.access.identity import (
    CallerConfig as CallerConfig,
    Identity as Identity,
    present as present,
)
from rollmesh.runtime.access.roles import (
    MEANING as MEANING,
    OPEN as OPEN,
    TABLE as TABLE,
    Role as Role,
    may_call as may_call,
)
from rollmesh.runtime.access.tls import (
    Reloaded as Reloaded,
    TlsFiles as TlsFiles,
    read_secret as read_secret,
)
from rollmesh.runtime.access.tokens import (
    AcceptedTokens as AcceptedTokens,
    PresentedToken as PresentedToken,
    TokensOfFile as TokensOfFile,
    digest_line as digest_line,
    make_tokens as make_tokens,
    token_of as token_of,
    write_private as write_private,
)
