from typing import Any

import pytest

from rollmesh.collector import CollectorConfig
from rollmesh.runtime.config import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("scorer", "my_scorer", id="no port"),
        pytest.param("scorer", "module:function", id="no address"),
        pytest.param("scorer", "grpc://scorer:7500", id="a URL"),
        pytest.param("scorer_concurrency", 0, id="nobody scores"),
        pytest.param("scorer_tries", 0, id="no try"),
        pytest.param("scorer_timeout_ms", 0, id="no time"),
        pytest.param("scorer_hold_ms", -1, id="hold below zero"),
        pytest.param("tick_ms", 0, id="no pause"),
        pytest.param("max_stored_bytes", 0, id="no room"),
        pytest.param("retain_settled_ms", -1, id="retention below zero"),
    ],
)
def test_a_setting_that_no_collector_can_work_with_is_named(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name}: "):
        CollectorConfig(**settings)
