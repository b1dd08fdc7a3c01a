"""`make harbor-demo`: the demo's policy learns tasks of a Harbor server, through cuts."""

import json

import pytest

from examples.demo.harbor.run import HARBOR
from tests.paths import ROOT
from tests.processes import run_to_end

_LIMIT_S = 3600.0  # beside other tests
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(_LIMIT_S + 60),
    pytest.mark.skipif(not HARBOR.exists(), reason="make .venv-harbor/.ready HARBOR_PYTHON=..."),
]


_READY = (".venv/.ready", ".venv-harbor/.ready")
"""What `make test-long` has set up before."""


async def test_the_demo_learns_on_a_harbor_server_to_which_ten_cuts_lose_and_double_nothing() -> (
    None
):
    output, said = await run_to_end(
        *("make", *(f"-o{one}" for one in _READY), "harbor-demo"),
        cwd=ROOT,
        env=None,
        limit_s=_LIMIT_S,
    )
    result = json.loads(output.splitlines()[-1])
    assert result["reward_last"] > result["reward_first"] + 0.2, said
    assert len(result["rewards"]) == result["steps"]
    assert (result["drift_tokens"], result["lost"], result["duplicated"]) == (0, 0, 0)
    assert result["sessions"] == result["trajectories"] > 0
    assert result["cuts"] == 10
    assert result["repeated"] > 0
    assert "HarborError" not in said  # no attempt failed by a cut
