"""The settings of all services that are installed."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rollmesh.runtime.config import SERVICES, describe, from_environment

_CLASSES = {
    "router": "RouterConfig",
    "engine": "EngineConfig",
    "scorer": "ScorerConfig",
    "collector": "CollectorConfig",
    "gateway": "GatewayConfig",
    "sidecar": "SidecarConfig",
}


def installed() -> dict[str, type[Any]]:
    """Returns the settings' class of each service whose packages are installed."""
    found: dict[str, type[Any]] = {}
    for service in SERVICES:
        try:
            module = import_module(f"rollmesh.{service}.config")
        except ImportError:
            continue
        found[service] = getattr(module, _CLASSES[service])
    return found


def environment(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the settings that the environment gives, by service."""
    found: dict[str, dict[str, str]] = {}
    for service, cls in installed().items():
        given = from_environment(describe(cls, service), environ)
        found[service] = {name: one.value for name, one in given.items()}
    return found
