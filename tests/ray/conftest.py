import os
from collections.abc import Iterator

import pytest

from tests.ray_on_busy_machines import PATIENT

# Ray's processes inherit these. Without a mode, Ray takes the token that a machine may have.
os.environ.update(PATIENT, RAY_AUTH_MODE="disabled")


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """A mesh waits for the workers of its nodes as long as Ray does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollmesh.integrations.ray.mesh._CALL_S", 300.0)
        yield
