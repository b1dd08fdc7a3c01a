"""A sidecar that gateways do not know: agents learn that it is not their key."""

import pytest

from rollmesh.runtime.errors import CallerUnknownError, RoleRefusedError
from rollmesh.sidecar.errors import to_http


@pytest.mark.parametrize("error", [CallerUnknownError("no token"), RoleRefusedError("an engine")])
def test_an_agent_is_not_told_that_its_key_is_wrong(
    error: CallerUnknownError | RoleRefusedError,
) -> None:
    assert to_http(error).status == 503
