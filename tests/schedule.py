"""Which tests share a worker of `pytest -n`, and which begin first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# By the start of a test's path. The first that fits. Groups begin in this order: the longest first.
# Tests with vLLM run one after another, for its memory and its threads; so do those with Ray.
_GROUPS = (
    ("tests/engine/vllm/test_parallel.py", "parallel"),  # minutes, beside what learns
    ("tests/engine/vllm/", "vllm"),
    ("tests/engine/conformance/", "vllm"),
    ("tests/engine/test_servers.py", "vllm"),
    ("tests/engine/requests/test_constraint.py", "vllm"),
    ("tests/mesh/requests/test_against_serve.py", "vllm"),
    ("tests/mesh/requests/test_free_answers_against_serve.py", "vllm"),
    ("tests/mesh/requests/test_protocols_against_serve.py", "vllm"),
    ("tests/mesh/requests/test_forms.py", "vllm"),
    ("tests/agents/test_vllm_agents.py", "vllm"),
    ("tests/vision/", "vllm"),
    ("tests/examples/", "vllm"),
    ("tests/kubernetes/test_multi_node.py", "vllm"),
    ("tests/kubernetes/", None),
    ("tests/trainers/", "ray"),
    ("tests/ray/", "ray"),
    ("tests/docs/", "docs"),  # these use the default ports
    ("tests/agents/", "agents"),
    ("tests/chat/templates/", "templates"),  # these share what probing a template found
    ("tests/gateway/turns/test_prompt.py", "templates"),
    ("tests/faults/test_tunnels_of_vllm.py", "vllm"),
    ("tests/pairs/test_scores_beside_weights.py", "vllm"),
    ("tests/harbor/test_trainers.py", "ray"),  # for the imports of TRL
    ("tests/harbor/", None),
    ("tests/router/test_control_repeats.py", None),  # these wait
    ("tests/faults/", None),
    ("tests/chat/", None),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.nodeid)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling  # not installed in every environment

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc] # the checkers skip xdist
        """A module's tests share a worker and the module's fixtures. So do those of a group."""

        def _split_scope(self, nodeid: str) -> str:
            return _place(nodeid)[1]

    return Scheduling(config, log)


def _place(nodeid: str) -> tuple[int, str]:
    for place, (path, group) in enumerate(_GROUPS):
        if nodeid.startswith(path):
            return place, group or nodeid.partition("::")[0]
    return len(_GROUPS), nodeid.partition("::")[0]
