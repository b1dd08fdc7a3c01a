"""verl 0.9.1's own configuration: the settings of the docs, and those that are refused."""

import re
from typing import Any

import pytest_asyncio

from tests.paths import ROOT
from tests.trainers.processes import run_script
from tests.trainers.verl_pages import command

_SETTING = re.compile(r"\+?(actor_rollout_ref|rollmesh|trainer)\.[\w.]+=")
_MANAGER = "rollmesh.integrations.verl.manager"
_ROLLOUT = "actor_rollout_ref.rollout"
_MESH = [f"{_ROLLOUT}.name=rollmesh"]
_REFUSED = {
    f"{_ROLLOUT}.agent.agent_loop_config_path": "loops.yaml",
    f"{_ROLLOUT}.agent.custom_async_server.path": "server.py",
    f"{_ROLLOUT}.disaggregation.enabled": "True",
    f"{_ROLLOUT}.do_sample": "False",
    f"{_ROLLOUT}.full_determinism": "True",
    f"{_ROLLOUT}.multi_turn.format": "llama3_json",
    f"{_ROLLOUT}.multi_turn.function_tool_path": "tools.py",
    f"{_ROLLOUT}.multi_turn.max_parallel_calls": "2",
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": "512",
    f"{_ROLLOUT}.multi_turn.max_user_turns": "3",
    f"{_ROLLOUT}.multi_turn.num_repeat_rollouts": "4",
    f"{_ROLLOUT}.multi_turn.tool_config_path": "tools.yaml",
    f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": "left",
    f"{_ROLLOUT}.multi_turn.use_inference_chat_template": "True",
    f"{_ROLLOUT}.over_sample_rate": "0.1",
    f"{_ROLLOUT}.prometheus.enable": "True",
    f"{_ROLLOUT}.quantization": "fp8",
    f"{_ROLLOUT}.router_config_path": "router.yaml",
    f"{_ROLLOUT}.trace.backend": "mlflow",
}
_SERVED = [
    f"{_ROLLOUT}.n=4",
    f"{_ROLLOUT}.temperature=0.7",
    f"{_ROLLOUT}.top_p=0.9",
    f"{_ROLLOUT}.top_k=20",
    f"{_ROLLOUT}.ignore_eos=True",
    f"{_ROLLOUT}.response_length=99",
    f"{_ROLLOUT}.val_kwargs.temperature=0.5",
    f"{_ROLLOUT}.val_kwargs.top_p=0.8",
    f"{_ROLLOUT}.calculate_log_probs=False",
    f"{_ROLLOUT}.free_cache_engine=False",
    f"{_ROLLOUT}.enable_rollout_routing_replay=True",
    f"{_ROLLOUT}.multi_turn.enable=True",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns=7",
    f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode=disable",
    "trainer.v1.trainer_mode=colocate_async",
    "reward.reward_model.enable=True",
    "reward.reward_model.enable_resource_pool=True",
]
_CASES = [
    command(),
    [*_MESH, *_SERVED],
    _MESH,
    [f"{_ROLLOUT}.name=vllm"],
    [f"{_ROLLOUT}.name=vllm", "trainer.v1.trainer_mode=separate_async"],
    [*_MESH, "reward.reward_model.enable=True"],
    *([*_MESH, f"{name}={value}"] for name, value in _REFUSED.items()),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(tmp_path_factory: Any) -> Any:
    return await run_script("verl_overrides_run", tmp_path_factory.mktemp("verl"), cases=_CASES)


async def test_verls_command_line_takes_the_command_of_the_page(found: Any) -> None:
    assert found[0]["manager"] == f"{_MANAGER}.AgentLoopManager"
    assert found[0]["router"] == "HOST:PORT"


async def test_settings_that_verl_users_know_are_served(found: Any) -> None:
    served = found[1]
    assert served["train"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "max_tokens": 99,
    }
    assert (served["validation"]["temperature"], served["validation"]["top_p"]) == (0.5, 0.8)
    assert (served["calls"], served["columns"]) == (7, ["routed_experts"])


async def test_verls_defaults_are_not_refused(found: Any) -> None:
    assert "error" not in found[2]


async def test_inference_servers_that_get_no_weights_are_refused(found: Any) -> None:
    assert f"{_ROLLOUT}.name: is 'vllm'" in found[3]["error"]
    assert "error" not in found[4]


async def test_a_reward_model_that_scores_too_late_is_refused(found: Any) -> None:
    assert "reward.reward_model.enable_resource_pool: is False" in found[5]["error"]


async def test_a_setting_that_is_not_served_is_refused_by_its_name(found: Any) -> None:
    for name, case in zip(_REFUSED, found[6:], strict=True):
        assert f"{name}: is " in case["error"], name
        assert "leave this setting at" in case["error"], name


def test_settings_in_the_code_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "verl.md").read_text()
    for module in (ROOT / "clients/rollmesh/integrations/verl").glob("*.py"):
        lines = [line.strip() for line in module.read_text().splitlines()]
        shown = [line for line in lines if _SETTING.match(line)]
        assert [line for line in shown if line not in page] == [], module


def test_the_page_has_every_setting_that_is_refused() -> None:
    page = (ROOT / "docs" / "verl.md").read_text()
    for name in _REFUSED:
        assert name.rpartition(".")[2] in page
