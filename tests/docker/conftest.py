from collections.abc import Iterator

import pytest

from tests.docker.compose import Project, docker_problem, running_project


@pytest.fixture(scope="session")
def docker_is_there(request: pytest.FixtureRequest) -> None:
    """Skips where containers cannot be run, and where they were not asked for."""
    if "docker" not in str(request.config.getoption("markexpr")):
        pytest.skip("builds images and takes minutes; `make test-docker` runs it")
    if problem := docker_problem():
        pytest.skip(problem)


@pytest.fixture(scope="module")
def project(docker_is_there: None) -> Iterator[Project]:
    """`docker compose up` with real vLLM and the small policy."""
    with running_project() as running:
        yield running
