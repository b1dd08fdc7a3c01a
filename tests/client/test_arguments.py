"""Arguments of the SDK that are wrong: each is refused by its name, before anything is sent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollmesh.client import Client, CommandRunner, Retries, Rewards, Session, Subscription, rollout
from rollmesh.runtime.errors import InvalidFieldError
from tests.client.conftest import addresses_of, length, one_sample
from tests.sidecar.scripted_gateway import ScriptedGateway

NOWHERE = "127.0.0.1:1"
NO_WORDS: Any = ["agent", 7]
NO_TEXTS: Any = {"N": 7}
SESSION = Session("5e55", "rmk-5e55-secret", "http://127.0.0.1:1/sessions/rmk-5e55-secret/v1")


def client() -> Client:
    """A client of a mesh that is not there: what is not refused here fails otherwise."""
    return Client(addresses_of(gateway=NOWHERE, router=NOWHERE))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        pytest.param("export", {"export": "leafs"}, id="export form"),
        pytest.param("sample_index", {"sample_index": -1}, id="index below zero"),
        pytest.param("group_size", {"group_size": 2**40}, id="size that no group has"),
        pytest.param("group_id", {"group_id": 7}, id="group without a text"),
        pytest.param("metadata", {"metadata": {"task": 7}}, id="metadata that is no text"),
        pytest.param("sampling", {"sampling": {"heat": 1}}, id="unknown sampling parameter"),
        pytest.param("sampling", {"sampling": {"top_k": "all"}}, id="sampling of another type"),
    ],
)
def test_an_impossible_field_of_a_session_is_named(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        client().session_request(**wrong)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        pytest.param("outcome", {"outcome": "DONE"}, id="outcome"),
        pytest.param("reward_timeout_ms", {"reward_timeout_ms": -1}, id="wait below zero"),
        pytest.param("metadata", {"metadata": {"task": 7}}, id="metadata that is no text"),
    ],
)
async def test_an_impossible_field_of_a_close_is_named(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await client().close_session(SESSION, **wrong)
    assert caught.value.field == field


@pytest.mark.parametrize("reward", ["high", float("nan"), [1.0]], ids=str)
def test_a_reward_that_is_no_number_is_named(reward: Any) -> None:
    with pytest.raises(InvalidFieldError, match="rewards"):
        Rewards(reward).to_proto("5e55")


async def test_a_later_reward_that_is_no_number_is_named() -> None:
    wrong: Any = "high"
    with pytest.raises(InvalidFieldError) as caught:
        await client().set_rewards("5e55", reward=wrong)
    assert caught.value.field == "rewards"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        pytest.param("unit", {"unit": "turn"}, id="unit"),
        pytest.param("credits", {"credits": -1}, id="credits below zero"),
        pytest.param("credits", {"credits": "8"}, id="credits as text"),
        pytest.param("credits", {"credits": 65_537}, id="more credits than there may be"),
        pytest.param("lease_ms", {"lease_ms": 2**32}, id="lease that is too long"),
        pytest.param("consumer", {"consumer": 7}, id="a name that is no text"),
    ],
)
def test_an_impossible_field_of_a_subscription_is_named(field: str, wrong: dict[str, Any]) -> None:
    arguments = {"consumer": "trainer", "unit": "group", **wrong}
    with pytest.raises(InvalidFieldError) as caught:
        Subscription(NOWHERE, **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("count", [0, -1, 65_537, 0.5], ids=str)
def test_a_grant_of_nothing_is_refused(count: Any) -> None:
    subscription = Subscription(NOWHERE, consumer="trainer", unit="group", credits=0)
    with pytest.raises(InvalidFieldError, match="count"):
        subscription.grant(count)


def test_a_version_that_is_none_is_refused() -> None:
    wrong: Any = "3"
    subscription = Subscription(NOWHERE, consumer="trainer", unit="group")
    with pytest.raises(InvalidFieldError, match="policy_version"):
        subscription.report_version(wrong)


@pytest.mark.parametrize(
    ("field", "weights", "options"),
    [
        pytest.param("weights", "/checkpoints/7", {}, id="a path as text"),
        pytest.param("policy_version", {}, {"policy_version": "7"}, id="version as text"),
        pytest.param("mode", {}, {"mode": "soon"}, id="pause mode"),
    ],
)
async def test_weights_that_cannot_be_pushed_are_named(
    field: str, weights: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await client().push_weights(weights, **{"policy_version": 7, **options})
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


@pytest.mark.parametrize(
    ("field", "make"),
    [
        pytest.param("retries.tries", partial(Retries, tries=0), id="no try"),
        pytest.param("retries.delay_s", partial(Retries, delay_s=-1), id="delay below zero"),
        pytest.param("argv", partial(CommandRunner, argv=[]), id="no command"),
        pytest.param("argv", partial(CommandRunner, argv="agent --fast"), id="a line, no words"),
        pytest.param("argv", partial(CommandRunner, argv=NO_WORDS), id="a word that is none"),
        pytest.param("argv", partial(CommandRunner, argv=["agent", "\0"]), id="a zero byte"),
        pytest.param("env.N", partial(CommandRunner, argv=["a"], env=NO_TEXTS), id="a number"),
    ],
)
def test_a_runner_that_cannot_run_is_refused(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        make()
    assert caught.value.field == field


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
