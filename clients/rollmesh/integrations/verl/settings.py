"""The `rollmesh` part of verl's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollmesh.client import MeshAddresses, Retries, RolloutSettings, TimeLimits
from rollmesh.integrations.verl.queue import PromptStatus, checked_status
from rollmesh.runtime.errors import InvalidFieldError

_OPTIONAL_ADDRESSES = [one.name for one in fields(MeshAddresses) if one.name != "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the manager; those without a description are those of `RolloutSettings`."""

    addresses: MeshAddresses
    runners: dict[str, str]
    """Runners as `package.module:function`, by agent name."""
    consumer: str = "verl"
    """Consumer name at the collector; one per trainer."""
    model: str = RolloutSettings.model
    concurrency: int = RolloutSettings.concurrency
    timeout_s: float = RolloutSettings.timeout_s
    limits: TimeLimits = field(default_factory=TimeLimits)
    retries: Retries = field(default_factory=Retries)
    status: PromptStatus = "any_failed"
    """When a prompt counts as a failure."""
    flat_extra_fields: bool = False
    """Whether each entry of `extra_fields` is also a column."""
    image_model_path: str = ""
    """Folder of a vision model with its image processor; empty for a model of text."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: A setting is invalid.
        """
        checked_status(self.status)
        RolloutSettings(**self.rollout)

    @property
    def rollout(self) -> dict[str, Any]:
        """Keyword arguments of a rollout."""
        names = ("model", "concurrency", "timeout_s", "limits", "retries")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> "Settings":
        """Reads the settings.

        Raises:
            InvalidFieldError: A setting is missing, unknown or invalid.
        """
        found = {str(name): value for name, value in (config or {}).items()}
        try:
            addresses = MeshAddresses(
                router=str(found.pop("router")),
                **{name: str(found.pop(name)) for name in _OPTIONAL_ADDRESSES if name in found},
            )
            return cls(
                addresses=addresses,
                runners=dict(found.pop("runners")),
                limits=TimeLimits(**found.pop("limits", {})),
                retries=Retries(**found.pop("retries", {})),
                **found,
            )
        except (KeyError, TypeError) as error:
            raise InvalidFieldError("rollmesh", f"{error}; see docs/trainers.md") from error
