"""Turns arguments into messages. Errors name the argument."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from google.protobuf.message import Message

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2, sampling_pb2, session_pb2
from rollmesh.v1.sampling_pb2 import AdapterChoice

ExportForm: TypeAlias = Literal["leaves", "turns", "tree"]
"""The form in which a session's conversation tree is delivered."""
SamplingPolicy: TypeAlias = Literal["agent", "enforce", "refuse"]
"""Whose sampling parameters count: the agent's over the session's ("agent"), or the session's,
where others of the agent are ignored ("enforce") or a 400 ("refuse"). `max_tokens` and stops are
the agent's under every policy."""
POLICIES: dict[str, sampling_pb2.SamplingPolicy.ValueType] = {
    "agent": sampling_pb2.SAMPLING_POLICY_AGENT,
    "enforce": sampling_pb2.SAMPLING_POLICY_ENFORCE,
    "refuse": sampling_pb2.SAMPLING_POLICY_REFUSE,
}
EXPORT_FORMS: dict[str, gateway_pb2.ExportMode.ValueType] = {
    "leaves": gateway_pb2.EXPORT_MODE_LEAVES,
    "turns": gateway_pb2.EXPORT_MODE_TURNS,
    "tree": gateway_pb2.EXPORT_MODE_TREE,
}
Column: TypeAlias = Literal["sampling_support", "routed_experts"]
"""Further values of each token: see the methods of `Columns` with these names."""
Purpose: TypeAlias = Literal["train", "eval", "other"]
"""The use of a session's tokens. A consumer gets sessions to train on by default."""
PURPOSES: dict[str, session_pb2.SessionPurpose.ValueType] = {
    "train": session_pb2.SESSION_PURPOSE_TRAIN,
    "eval": session_pb2.SESSION_PURPOSE_EVAL,
    "other": session_pb2.SESSION_PURPOSE_OTHER,
}
_ACTIONS = {
    "answer": gateway_pb2.BUDGET_ACTION_ANSWER,
    "refuse": gateway_pb2.BUDGET_ACTION_REFUSE,
}
OUTCOMES: dict[str, session_pb2.SessionOutcome.ValueType] = {
    "COMPLETED": session_pb2.SESSION_OUTCOME_COMPLETED,
    "FAILED": session_pb2.SESSION_OUTCOME_FAILED,
    "ABORTED": session_pb2.SESSION_OUTCOME_ABORTED,
    "LOST": session_pb2.SESSION_OUTCOME_LOST,
}
_LONGEST_S = 1e12
_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the use of one session. 0 means no limit."""

    calls: int = 0
    """Most answers. Each choice of a request is one."""
    sampled_tokens: int = 0
    """Most sampled tokens of all answers. The last one is cut."""
    seconds: float = 0.0
    """Time after which no turn begins, from the opening on."""
    when_spent: Literal["answer", "refuse"] = "answer"
    """Whether further requests get a final answer that is not sampled, or fail with 400."""


def budget_of(budget: Budget | None) -> gateway_pb2.SessionBudget | None:
    """Returns the message of a budget. None for None.

    Raises:
        InvalidFieldError: A field is invalid.
    """
    if budget is None:
        return None
    if not 0 <= budget.seconds < _LONGEST_S:
        raise InvalidFieldError("budget", f"seconds is {budget.seconds}; give a number from 0 on")
    try:
        return filled(
            gateway_pb2.SessionBudget,
            calls=budget.calls,
            sampled_tokens=budget.sampled_tokens,
            time_ms=math.ceil(budget.seconds * 1000),
            action=chosen("when_spent", budget.when_spent, _ACTIONS),
        )
    except InvalidFieldError as error:
        raise InvalidFieldError("budget", error.message) from error


def chosen(field: str, name: object, values: Mapping[str, _Value]) -> _Value:
    """Returns the value of a name.

    Raises:
        InvalidFieldError: There is no such name.
    """
    if not isinstance(name, str) or name not in values:
        raise InvalidFieldError(field, f"{name!r} is invalid; give one of {', '.join(values)}")
    return values[name]


def choices_of(adapters: Sequence[AdapterChoice | str]) -> list[AdapterChoice]:
    """Returns the policies of a session. A name means the newest revision at each turn.

    Raises:
        InvalidFieldError: One is neither a name nor a choice.
    """
    choices = []
    for at, one in enumerate(adapters):
        if not isinstance(one, (str, AdapterChoice)):
            raise InvalidFieldError(f"adapters[{at}]", f"is {one!r}; give a name or AdapterChoice")
        choices.append(AdapterChoice(name=one) if isinstance(one, str) else one)
    return choices


def filled(kind: type[_Message], /, **values: Any) -> _Message:
    """Returns a message with these values. Fields that are None stay unset.

    Raises:
        InvalidFieldError: A field cannot hold its value. The error names the field.
    """
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        for name, value in values.items():
            _check(kind, name, value)
        raise InvalidFieldError(kind.__name__, str(error)) from error


def read_sampling(sampling: Mapping[str, Any] | None) -> sampling_pb2.SamplingParams:
    """Returns sampling parameters.

    Raises:
        InvalidFieldError: A parameter does not exist or has the wrong type.
    """
    try:
        return filled(sampling_pb2.SamplingParams, **(sampling or {}))
    except InvalidFieldError as error:
        raise InvalidFieldError("sampling", error.message) from error


def _check(kind: type[Message], name: str, value: Any) -> None:
    try:
        kind(**{name: value})
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(name, f"cannot be {value!r:.200}: {error}") from error
