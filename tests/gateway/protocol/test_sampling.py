"""Whose sampling parameters count, and when a turn has another distribution than its session."""

from typing import Any

import pytest
from google.protobuf import json_format

from rollmesh.gateway import SessionSpec, turn_sampling
from rollmesh.runtime.errors import InvalidSamplingError
from rollmesh.v1 import gateway_pb2, sampling_pb2

AGENT = sampling_pb2.SAMPLING_POLICY_AGENT
ENFORCE = sampling_pb2.SAMPLING_POLICY_ENFORCE
REFUSE = sampling_pb2.SAMPLING_POLICY_REFUSE
TOKENS = [sampling_pb2.TokenSequence(token_ids=[5])]


def spec(policy: int, **sampling: Any) -> SessionSpec:
    own = json_format.MessageToJson(sampling_pb2.SamplingParams(**sampling), indent=None)
    return SessionSpec("s", 0, sampling=own, sampling_policy=policy)


def asking(*, bad_words: tuple[str, ...] = (), **sampling: Any) -> gateway_pb2.ChatRequest:
    params = sampling_pb2.SamplingParams(**sampling)
    return gateway_pb2.ChatRequest(sampling=params, bad_words=bad_words)


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, id="unset"),
        pytest.param({}, {"presence_penalty": 0.0, "repetition_penalty": 1.0}, id="no penalty"),
        pytest.param({}, {"logit_bias": {5: 0.0}}, id="no bias"),
        pytest.param({"temperature": 0.7}, {"temperature": 0.7}, id="equal"),
        pytest.param({"temperature": 0.0}, {"top_p": 0.5, "top_k": 3}, id="greedy is not cut"),
        pytest.param({"temperature": 0.0}, {"temperature": 1e-6}, id="as good as greedy"),
        pytest.param({"top_p": 0.9}, {"temperature": 1.0}, id="the session's top_p"),
        pytest.param({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [2, 1]}, id="order"),
        pytest.param({}, {"max_tokens": 5, "stop_token_ids": [7]}, id="limits"),
    ],
)
def test_equal_distributions_are_not_changed(own: dict[str, Any], asked: dict[str, Any]) -> None:
    assert not turn_sampling(asking(**asked), spec(AGENT, **own)).is_changed
    assert turn_sampling(asking(**asked), spec(ENFORCE, **own)).ignored == ()
    turn_sampling(asking(**asked), spec(REFUSE, **own))


@pytest.mark.parametrize(
    ("own", "name", "value"),
    [
        ({}, "temperature", 0.0),
        ({}, "temperature", 0.7),
        ({"temperature": 0.5}, "temperature", 1.0),
        ({}, "top_p", 0.9),
        ({"top_p": 0.9}, "top_p", 1.0),
        ({}, "top_k", 1),
        ({}, "min_p", 0.1),
        ({}, "presence_penalty", 0.5),
        ({}, "frequency_penalty", -0.5),
        ({}, "repetition_penalty", 1.1),
        ({}, "min_tokens", 3),
        ({}, "ignore_eos", True),
        ({}, "allowed_token_ids", [5]),
        ({}, "logit_bias", {5: 1.0}),
        ({"logit_bias": {5: 1.0}}, "logit_bias", {6: 1.0}),
        ({}, "bad_sequences", TOKENS),
        ({}, "bad_words", ("no",)),
    ],
)
def test_another_distribution_is_changed_ignored_or_refused(
    own: dict[str, Any], name: str, value: Any
) -> None:
    request = asking(**{name: value}, max_tokens=5)
    assert turn_sampling(request, spec(AGENT, **own)).is_changed
    enforced = turn_sampling(request, spec(ENFORCE, **own))
    expected = sampling_pb2.SamplingParams(**own, max_tokens=5)
    assert (enforced.params, enforced.bad_words) == (expected, ())
    assert (enforced.is_changed, enforced.ignored) == (False, (name,))
    with pytest.raises(InvalidSamplingError) as refused:
        turn_sampling(request, spec(REFUSE, **own))
    assert refused.value.field.removeprefix("sampling.") == name
    assert f"leave {name} out" in refused.value.message
    counted = turn_sampling(request, spec(REFUSE, **own), may_refuse=False)
    assert counted.params == expected


def test_a_seed_is_the_sessions_and_no_other_distribution() -> None:
    request = asking(seed=7)
    assert not turn_sampling(request, spec(AGENT)).is_changed
    enforced = turn_sampling(request, spec(ENFORCE, seed=3))
    assert (enforced.params.seed, enforced.ignored) == (3, ("seed",))
    assert not turn_sampling(request, spec(ENFORCE)).params.HasField("seed")
    with pytest.raises(InvalidSamplingError, match="seed"):
        turn_sampling(request, spec(REFUSE))


def test_limits_and_stops_are_the_agents_under_every_policy() -> None:
    request = asking(max_tokens=5, stop_token_ids=[7])
    for policy in (AGENT, ENFORCE, REFUSE):
        found = turn_sampling(request, spec(policy, max_tokens=50, stop_token_ids=[6])).params
        assert (found.max_tokens, list(found.stop_token_ids)) == (5, [6, 7])
        assert turn_sampling(asking(), spec(policy, max_tokens=50)).params.max_tokens == 50


def test_a_refusal_names_every_parameter() -> None:
    with pytest.raises(InvalidSamplingError) as refused:
        turn_sampling(asking(temperature=0.2, top_p=0.9, seed=1), spec(REFUSE, temperature=0.7))
    assert refused.value.message == (
        "sampling.temperature: is 0.2, and the session enforces 0.7; leave temperature and top_p "
        "and seed out, or open the session with sampling_policy agent"
    )
