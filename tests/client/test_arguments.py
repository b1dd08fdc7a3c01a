"""Arguments of the SDK that are wrong: each is refused by its name, before anything is sent."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollmesh.client import (
    Client,
    CommandRunner,
    Retries,
    Rewards,
    Session,
    Subscription,
    TimeLimits,
    Transfer,
    rollout,
)
from rollmesh.runtime.errors import InvalidFieldError
from tests.client.conftest import addresses_of, length, one_sample
from tests.sidecar.scripted_gateway import ScriptedGateway

NOWHERE = "127.0.0.1:1"
SESSION = Session("5e55", "rmk-5e55-secret", "http://127.0.0.1:1/sessions/rmk-5e55-secret/v1")
TENSORS = {"w": np.zeros(2)}


def client() -> Client:
    """A client of a mesh that is not there: what is not refused here fails otherwise."""
    return Client(addresses_of(gateway=NOWHERE, router=NOWHERE))


def subscription(**wrong: Any) -> Subscription:
    return Subscription(NOWHERE, **{"consumer": "trainer", "unit": "group", **wrong})


CALLS: dict[str, Callable[..., Any]] = {
    "session": lambda **wrong: client().session_request(**wrong),
    "close": lambda **wrong: client().close_session(SESSION, **wrong),
    "rewards": lambda reward: Rewards(reward).to_proto("5e55"),
    "later rewards": lambda **wrong: client().set_rewards("5e55", **wrong),
    "subscription": subscription,
    "grant": lambda count: subscription(credits=0).grant(count),
    "version": lambda version: subscription().report_version(version),
    "push": lambda weights=TENSORS, policy_version=7, **wrong: client().push_weights(
        weights, policy_version, **wrong
    ),
    "retries": Retries,
    "limits": TimeLimits,
    "command": lambda argv=("a",), **wrong: CommandRunner(argv=argv, **wrong),
}


@pytest.mark.parametrize(
    ("call", "field", "wrong"),
    [
        ("session", "export", {"export": "leafs"}),
        ("session", "sample_index", {"sample_index": -1}),
        ("session", "group_size", {"group_size": 2**40}),
        ("session", "group_id", {"group_id": 7}),
        ("session", "metadata", {"metadata": {"task": 7}}),
        ("session", "sampling", {"sampling": {"heat": 1}}),
        ("session", "sampling", {"sampling": {"top_k": "all"}}),
        ("close", "outcome", {"outcome": "DONE"}),
        ("close", "reward_timeout_ms", {"reward_timeout_ms": -1}),
        ("close", "metadata", {"metadata": {"task": 7}}),
        *(("rewards", "rewards", {"reward": one}) for one in ("high", float("nan"), [1.0])),
        ("later rewards", "rewards", {"reward": "high"}),
        ("subscription", "unit", {"unit": "turn"}),
        *(("subscription", "credits", {"credits": one}) for one in (-1, "8", 65_537)),
        ("subscription", "lease_ms", {"lease_ms": 2**32}),
        ("subscription", "consumer", {"consumer": 7}),
        *(("grant", "count", {"count": one}) for one in (0, -1, 65_537, 0.5)),
        ("version", "policy_version", {"version": "3"}),
        ("push", "weights", {"weights": "/checkpoints/7"}),
        ("push", "weights", {"weights": {}}),
        ("push", "weights['w']", {"weights": {"w": [1.0]}}),
        ("push", "weights['w']", {"weights": {"w": np.zeros(2, np.complex64)}}),
        ("push", "updates", {"weights": Transfer("nccl", [{"w": object()}])}),
        ("push", "policy_version", {"policy_version": "7"}),
        ("push", "mode", {"mode": "soon"}),
        ("retries", "retries.tries", {"tries": 0}),
        ("retries", "retries.delay_s", {"delay_s": -1}),
        ("limits", "limits.grace_s", {"grace_s": 0}),
        ("command", "argv", {"argv": []}),
        ("command", "argv", {"argv": "agent --fast"}),
        ("command", "argv", {"argv": ["agent", 7]}),
        ("command", "argv", {"argv": ["agent", "\0"]}),
        ("command", "env.N", {"env": {"N": 7}}),
    ],
)
async def test_an_impossible_argument_is_named(
    call: str, field: str, wrong: dict[str, Any]
) -> None:
    async def made() -> None:
        made = CALLS[call](**wrong)
        if inspect.isawaitable(made):
            await made

    with pytest.raises(InvalidFieldError) as caught:
        await made()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        pytest.param("timeout_s", {"timeout_s": 0}, id="no time"),
        pytest.param("export", {"export": "leafs"}, id="export form"),
        pytest.param("sampling", {"sampling": {"heat": 1}}, id="unknown sampling parameter"),
        pytest.param("runner", {"runner": 7}, id="runner that cannot be called"),
        pytest.param("group_id", {"group_id": lambda _: None}, id="group without an id"),
    ],
)
async def test_a_rollout_that_cannot_work_opens_no_session(
    gateway: ScriptedGateway, address: str, field: str, wrong: dict[str, Any]
) -> None:
    async with Client(addresses_of(gateway=address)) as mesh:
        with pytest.raises(InvalidFieldError) as caught:
            await rollout(mesh, ["p"], **{"runner": length, **wrong})
    assert caught.value.field == field
    assert not gateway.opened


async def test_a_runner_that_is_not_asynchronous_is_not_tried_again(
    gateway: ScriptedGateway, address: str
) -> None:
    def wrong(_prompt: str, _session: Session) -> Any:
        return 1.0

    async with Client(addresses_of(gateway=address)) as mesh:
        summary, outcome = await one_sample(mesh, wrong, retries=Retries(tries=3, delay_s=0))
    assert (summary.errors, summary.retries) == ({"InvalidFieldError": 1}, 0)
    assert "runner: gave a float; give an asynchronous function" in outcome.error


async def test_what_on_sample_raises_ends_the_rollout_as_it_is(
    gateway: ScriptedGateway, address: str
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("mine")

    async with Client(addresses_of(gateway=address)) as mesh:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await rollout(mesh, ["p", "q"], runner=length, n=2, on_sample=broken)
    assert len(gateway.opened) == len(gateway.closed)
