from collections.abc import Iterator

import pytest

from tests.docker.compose import Project, docker_problem, running_project


@pytest.fixture(scope="session")
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    """`docker compose up` with real vLLM and the small policy; only where it is asked for."""
    if "docker" not in str(request.config.getoption("markexpr")):
        pytest.skip("builds images and takes minutes; `make test-docker` runs it")
    if problem := docker_problem():
        pytest.skip(problem)
    with running_project() as running:
        yield running
