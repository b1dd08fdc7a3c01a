"""Passwords and tokens in settings: refused as flags, masked where they are printed."""

import json
from typing import Any

import pytest

from rollmesh.engine import EngineConfig
from rollmesh.runtime.config import ConfigError, fill, has_secret, masked, parse_config

SECRETS = [
    "postgresql://user:hunter2@host:5432/mesh",
    "postgresql://:hunter2@host/mesh",
    "postgresql://user@host/mesh?sslmode=require&password=hunter2",
    "postgresql://user:hunter2@two@host/mesh",
    "rediss://:hunter2@host:6379/0",
    "host=a password = hunter2",
    "host=a password='hunter2 \\' x' user=b",
    {"hf_token": "hunter2"},
    {"inner": {"api_key": "hunter2", "b": 1}},
    {"url": "http://user:hunter2@host"},
]
PLAIN = [
    "postgresql://user@host:5432/mesh",
    "redis://host:6379/0",
    "host=a user=b",
    "",
    "{not json",
    7,
    {"tensor_parallel_size": 2, "hf_token": "", "max_tokens": 5},
]


@pytest.mark.parametrize("value", SECRETS)
def test_a_secret_is_noticed_and_masked(value: object) -> None:
    assert has_secret(value)
    assert "hunter2" not in str(masked(value))
    assert "***" in str(masked(value))


@pytest.mark.parametrize("value", [one for one in SECRETS if isinstance(one, dict)])
def test_a_secret_in_json_is_one_too(value: object) -> None:
    text = json.dumps(value)
    assert has_secret(text)
    assert "hunter2" not in masked(text)


@pytest.mark.parametrize("value", PLAIN)
def test_values_without_a_secret_are_not_masked(value: object) -> None:
    assert not has_secret(value)
    assert masked(value) == value


def test_what_surrounds_a_secret_stays_readable() -> None:
    url = "postgresql://user:hunter2@host:5432/mesh?sslmode=require"
    assert masked(url) == "postgresql://user:***@host:5432/mesh?sslmode=require"
    assert masked("host=a password='x y' user=b") == "host=a password=*** user=b"


@pytest.mark.parametrize(
    "value", ['{"hf_token": "hunter2"', '{"hf_token": "hunter2', ["postgresql://user:hunter2@host"]]
)
def test_an_error_about_a_value_does_not_show_its_secret(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^vllm: is .*\*\*\*") as caught:
        fill(EngineConfig, {"vllm": value})
    assert "hunter2" not in str(caught.value)


def test_a_token_for_vllm_is_no_flag() -> None:
    with pytest.raises(ConfigError, match=r"^vllm: a flag with a password or a token") as caught:
        parse_config(EngineConfig, "engine", ['--vllm={"hf_token": "hunter2"}'], {})
    assert "hunter2" not in str(caught.value)
    environ = {"ROLLMESH_ENGINE_VLLM": '{"hf_token": "hunter2"}'}
    assert parse_config(EngineConfig, "engine", [], environ).vllm == {"hf_token": "hunter2"}
