"""Settings of rollmesh in verl's configuration, and verl's own settings of rollouts.

The mesh serves some of verl's and refuses others by name. Settings of verl's inference servers
alone (memory, parallel sizes, batches) are not read. The tables are in docs/verl.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollmesh.client import (
    Budget,
    MeshAddresses,
    Retries,
    RolloutSettings,
    TimeLimits,
    chosen,
    run_of_state,
)
from rollmesh.integrations.verl.queue import STATUSES, PromptStatus
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1.sampling_pb2 import PolicyRun

RUN = "run"
"""Setting in `engine_kwargs.rollmesh`, by which `Checkpoints` tells all processes the job's run."""

_OPTIONAL_ADDRESSES = [one.name for one in fields(MeshAddresses) if one.name != "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the manager. Those without a description are those of `RolloutSettings`."""

    addresses: MeshAddresses
    runners: dict[str, str]
    """Runners as `package.module:function`, by agent name."""
    consumer: str = "verl"
    """Consumer name at the collector. One per trainer."""
    model: str = RolloutSettings.model
    adapter: str = ""
    """Name of the adapter that is trained, as `engine_kwargs` has it. Empty: the model itself."""
    teacher: str = RolloutSettings.teacher
    teacher_top_k: int = RolloutSettings.teacher_top_k
    """As verl's `distillation_loss.topk`. 0 for the losses that need the tokens' own."""
    concurrency: int = RolloutSettings.concurrency
    timeout_s: float = RolloutSettings.timeout_s
    limits: TimeLimits = field(default_factory=TimeLimits)
    retries: Retries = field(default_factory=Retries)
    refill: int = RolloutSettings.refill
    sampling_policy: Literal["enforce", "refuse"] = "enforce"
    """The treatment of an agent's own temperature, top_p and the like, unknown to verl: they are
    ignored, or a 400."""
    status: PromptStatus = "any_failed"
    """When a prompt counts as a failure."""
    flat_extra_fields: bool = False
    """Whether each entry of `extra_fields` is also a column."""
    image_model_path: str = ""
    """Folder of a vision model with its image processor. Empty for a model of text."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: A setting is invalid.
        """
        chosen("status", self.status, STATUSES)
        chosen("sampling_policy", self.sampling_policy, dict.fromkeys(("enforce", "refuse")))
        RolloutSettings(**self.rollout)

    @property
    def rollout(self) -> dict[str, Any]:
        """Keyword arguments of a rollout."""
        names = (
            "model",
            "teacher",
            "teacher_top_k",
            "concurrency",
            "timeout_s",
            "limits",
            "retries",
            "refill",
            "sampling_policy",
        )
        adapters = [self.adapter] if self.adapter else []
        return {"adapters": adapters, **{name: getattr(self, name) for name in names}}

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
            raise InvalidFieldError("rollmesh", f"{error}; see docs/verl.md") from error


_ROLLOUT = "actor_rollout_ref.rollout"
_SERVER = "is for verl's inference servers, whose place the mesh takes; set up the mesh's engines"
_TOOLS = (
    "is for verl's own agent loops; agents of the mesh bring their tools, so do it in the runner"
)

_REFUSED: Mapping[str, tuple[Any, str]] = {
    "do_sample": (True, "is not read by verl either; give a temperature"),
    "over_sample_rate": (0, "no session of a group is given up early; give a larger n"),
    "full_determinism": (False, "sessions are sampled without seeds"),
    "quantization": (None, _SERVER),
    "router_config_path": (None, _SERVER),
    "disaggregation.enabled": (False, _SERVER),
    "prometheus.enable": (False, f"{_SERVER}, which have metrics"),
    "trace.backend": (None, "is for verl's own agent loops; the mesh has traces of its own"),
    "agent.agent_loop_config_path": (
        None,
        "names verl's agent loops; name runners as +rollmesh.runners.NAME=package.module:function",
    ),
    "agent.custom_async_server.path": (None, _SERVER),
    "multi_turn.tool_config_path": (None, _TOOLS),
    "multi_turn.function_tool_path": (None, _TOOLS),
    "multi_turn.max_parallel_calls": (1, _TOOLS),
    "multi_turn.max_tool_response_length": (256, _TOOLS),
    "multi_turn.tool_response_truncate_side": ("middle", _TOOLS),
    "multi_turn.max_user_turns": (None, "give max_assistant_turns, or end the agent in the runner"),
    "multi_turn.num_repeat_rollouts": (None, "give n"),
    "multi_turn.use_inference_chat_template": (
        False,
        "the tokens as sampled are trained; a gateway's --history decides about templates",
    ),
    "multi_turn.format": ("hermes", "the gateway parses tool calls; give it a --tool-parser"),
}
"""Setting of `actor_rollout_ref.rollout`: its value in verl, and the reason for no other."""


def served(config: Any) -> dict[str, Any]:
    """Returns the keyword arguments of a rollout that verl's settings mean.

    Raises:
        InvalidFieldError: A setting cannot be served. The error names it.
    """
    for name, (default, why) in _REFUSED.items():
        value = _at(config, f"{_ROLLOUT}.{name}", default)
        if value not in (default, None):
            problem = f"is {value!r}: {why}, and leave this setting at {default!r}"
            raise InvalidFieldError(f"{_ROLLOUT}.{name}", problem)
    name = _at(config, f"{_ROLLOUT}.name", "rollmesh")
    mode = _at(config, "trainer.v1.trainer_mode", "sync")
    if name != "rollmesh" and mode != "separate_async":
        raise InvalidFieldError(
            f"{_ROLLOUT}.name", f"is {name!r}: its weights do not reach the mesh; give rollmesh"
        )
    is_late = _at(config, "reward.reward_model.enable_resource_pool", default=False) is False
    if _at(config, "reward.reward_model.enable", default=False) and is_late:
        raise InvalidFieldError(
            "reward.reward_model.enable_resource_pool",
            "is False: sessions are scored before they are in the queue; give True",
        )
    rollout: dict[str, Any] = {}
    if turns := _at(config, f"{_ROLLOUT}.multi_turn.max_assistant_turns", None):
        rollout["budget"] = Budget(calls=int(turns))
    if _at(config, f"{_ROLLOUT}.enable_rollout_routing_replay", default=False):
        rollout["columns"] = ["routed_experts"]
    return rollout


def sampling_of(config: Any, *, validate: bool, greedy: bool) -> dict[str, Any]:
    """Returns the sampling parameters of a session, as in verl's own agent loops."""
    source = config.val_kwargs if validate else config
    sampling = {
        "temperature": 0.0 if greedy else float(source.temperature),
        "top_p": 1.0 if greedy else float(source.top_p),
        "top_k": 0 if greedy else max(int(source.top_k), 0),  # verl's -1 is our 0: off
        "repetition_penalty": 1.0,
        "ignore_eos": bool(config.get("ignore_eos")),
    }
    if config.get("response_length"):
        sampling["max_tokens"] = int(config.response_length)
    return sampling


def run_of(settings: Mapping[str, Any]) -> PolicyRun | None:
    """Returns the run of the job, from `engine_kwargs.rollmesh`. None if it opened none."""
    run = settings.get(RUN)
    return None if run is None else run_of_state({"policy_run": {**run}})


def _at(config: Any, name: str, default: Any) -> Any:
    """Returns the value of a dotted name. The default if a part of it is missing."""
    for part in name.split("."):
        if config is None:
            return default
        config = config.get(part)
    return default if config is None else config
