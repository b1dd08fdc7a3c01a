"""Ids of responses and of their items, made from the gateway's answer id.

An answer `chatcmpl-S-N` is the response `resp_S-N` with the items `rs_S-N`, `msg_S-N` and
`fc_S-N_0`. Ids are never stored: an id that comes back names its answer, in every sidecar and after
a restart.
"""

import re

from rollmesh.runtime.errors import InvalidFieldError

_ANSWER = "chatcmpl-"
_RESPONSE = "resp_"
_INSTRUCTED = "-i"
"""Ends the id of a response whose request had instructions: its conversation begins with them."""
_MAX_CHARS = 256

REASONING = "rs"
MESSAGE = "msg"
FUNCTION_CALL = "fc"
CUSTOM_CALL = "ctc"
RAW_CUSTOM_CALL = "ctr"
"""A call of a custom tool whose sampled arguments are not its input, but are passed on as it."""
_ITEM = re.compile(r"(rs|msg|fc|ctc|ctr)_([0-9a-zA-Z]+-[0-9]+)(?:_[0-9]+)?")
"""Other servers' ids have no such form: they say nothing about which items are one turn."""


def response_id(answer_id: str, *, instructed: bool) -> str:
    """Returns the id of the response that is an answer.

    Args:
        answer_id: The gateway's id of the answer.
        instructed: Whether the request has instructions.
    """
    return _RESPONSE + answer_id.removeprefix(_ANSWER) + (_INSTRUCTED if instructed else "")


def item_id(kind: str, answer_id: str, at: int | None = None) -> str:
    """Returns the id of an item of an answer; `at` counts items of the same kind."""
    end = "" if at is None else f"_{at}"
    return f"{kind}_{answer_id.removeprefix(_ANSWER)}{end}"


def answer_of_response(given: str, field: str) -> tuple[str, bool]:
    """Returns the answer id of a response, and whether its request had instructions.

    Raises:
        InvalidFieldError: It is no id of a response.
    """
    rest = given.removeprefix(_RESPONSE)
    if rest == given or not rest or len(given) > _MAX_CHARS:
        raise InvalidFieldError(field, f"{given!r:.100} is not the id of a response of this server")
    return _ANSWER + rest.removesuffix(_INSTRUCTED), rest.endswith(_INSTRUCTED)


def answer_of_item(given: object) -> str:
    """Returns the answer id that an item's id names; empty if this server did not make the id."""
    if not isinstance(given, str) or len(given) > _MAX_CHARS:
        return ""
    made = _ITEM.fullmatch(given)
    return _ANSWER + made[2] if made else ""


def kind_of_item(given: object) -> str:
    """Returns the kind of an item that this server made; empty if it did not make the id."""
    return str(given).partition("_")[0] if answer_of_item(given) else ""
