"""verl's agent loop manager, backed by a mesh.

verl loads the class by name and uses it for rollouts only:

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollmesh.integrations.verl.manager.AgentLoopManager
    +rollmesh.router=HOST:PORT
    +rollmesh.runners.my_agent=my_package.my_module:run

Prompts become groups of sessions, `agent_name` names the runner, and delivered sessions are written
to the TransferQueue, from which verl's replay buffer reads them.
"""

import asyncio
import concurrent.futures
import importlib
import threading
from collections.abc import Mapping
from typing import Any, cast

import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rollmesh.client import AgentRunner
from rollmesh.integrations.verl.rollouts import Prompt, PromptRollouts, RewardLoopScore
from rollmesh.integrations.verl.settings import Settings
from rollmesh.runtime.errors import InvalidFieldError

_START_S = 60.0


class AgentLoopManager:
    """Rolls out prompts in a thread; results go to the TransferQueue."""

    def __init__(
        self, config: Any, *, reward_loop_worker_handles: Any = None, **_handles: Any
    ) -> None:
        """Takes verl's configuration and its reward workers; verl's inference servers are not used.

        Raises:
            InvalidFieldError: `config.rollmesh` is incomplete or invalid.
        """
        self._config = config
        settings = Settings.from_config(config.get("rollmesh"))
        self._runners = {name: load_runner(name, path) for name, path in settings.runners.items()}
        workers = reward_loop_worker_handles
        self._rollouts = PromptRollouts(settings, _reward_loop(workers) if workers else None)
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="rollmesh-rollouts", daemon=True)

    @classmethod
    def create(cls, config: Any, **handles: Any) -> "AgentLoopManager":
        """Creates and starts the manager; called by verl.

        Raises:
            RollmeshError: The collector refuses, or the configuration is wrong.
        """
        manager = cls(config, **handles)
        tq.init()
        manager._thread.start()
        manager._ready.result(_START_S)
        return manager

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Starts rolling out prompts; returns at once.

        Args:
            prompts: Batch size [prompts]. Every row has `uid`, `global_steps` and the data set's
                columns; `validate` selects partition and sampling parameters.

        Raises:
            RollmeshError: The rollouts have ended; the error is the reason.
            InvalidFieldError: A row names a runner that is not configured, or its uid has a "_".
        """
        rows = [
            self._prompt(row, validate=bool(row.pop("validate", False))) for row in _rows(prompts)
        ]
        for prompt in rows:
            self._rollouts.submit(prompt)

    def close(self) -> None:
        """Stops the rollouts; unfinished prompts become failures."""
        self._rollouts.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._rollouts.serve(lambda: self._ready.set_result(None)))
        except asyncio.CancelledError:  # by `close`
            return
        except Exception as error:  # noqa: BLE001 - raised in the trainer's thread
            if not self._ready.done():
                self._ready.set_exception(error)

    def _prompt(self, row: dict[str, Any], *, validate: bool) -> Prompt:
        config = self._config.actor_rollout_ref.rollout
        row.setdefault("agent_name", config.agent.default_agent_loop)
        runner = self._runners.get(row["agent_name"])
        if runner is None:
            raise InvalidFieldError(
                "agent_name",
                f"{row['agent_name']!r} is not one of {sorted(self._runners)}; "
                "add it as rollmesh.runners.NAME=package.module:function",
            )
        n = int(row.pop("__rollout_n__", config.val_kwargs.n if validate else config.n))
        greedy = not row.pop("__do_sample__", True) and not validate
        return Prompt(
            row,
            runner,
            n,
            sampling_of(config, validate=validate, greedy=greedy),
            "val" if validate else "train",
        )


def sampling_of(config: Any, *, validate: bool, greedy: bool) -> dict[str, Any]:
    """Returns the default sampling parameters of a session, as in verl's own agent loops."""
    source = config.val_kwargs if validate else config
    sampling = {
        "temperature": 0.0 if greedy else float(source.temperature),
        "top_p": 1.0 if greedy else float(source.top_p),
        "top_k": 0 if greedy else max(int(source.top_k), 0),  # verl's -1 is our 0: off
        "repetition_penalty": 1.0,
    }
    if config.get("response_length"):
        sampling["max_tokens"] = int(config.response_length)
    return sampling


def _reward_loop(workers: Any) -> RewardLoopScore:
    """Returns verl's reward loop; verl is imported only if there is one."""
    module = importlib.import_module("rollmesh.integrations.verl.rewards")
    return cast("RewardLoopScore", module.RewardLoop(list(workers)).score)


def load_runner(name: str, path: str) -> AgentRunner:
    """Returns the function that `package.module:function` names.

    Raises:
        InvalidFieldError: There is no such function.
    """
    module, _, function = path.partition(":")
    try:
        return cast("AgentRunner", getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"{path!r} is not a package.module:function: {error}"
        raise InvalidFieldError(f"rollmesh.runners.{name}", problem) from error


def _rows(prompts: TensorDict) -> list[dict[str, Any]]:
    columns: Mapping[str, Any] = dict(prompts.items())
    return [
        {name: _value(column, at) for name, column in columns.items()} for at in range(len(prompts))
    ]


def _value(column: Any, at: int) -> Any:
    if isinstance(column, NonTensorStack):
        return column[at].data
    return column.data if isinstance(column, NonTensorData) else column[at]
