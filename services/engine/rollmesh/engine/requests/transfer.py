"""Parses the description of a weight transfer; the weights themselves bypass gRPC."""

import json
from typing import Any

from rollmesh.engine.backend import Transfer
from rollmesh.runtime.errors import InvalidFieldError, WeightTransferError
from rollmesh.v1 import engine_pb2


def read_init(request: engine_pb2.InitWeightTransferRequest, own_backend: str) -> dict[str, Any]:
    """Returns the `init_info` of a request.

    Raises:
        WeightTransferError: The engine was not started with that backend.
        InvalidFieldError: It is not a JSON object.
    """
    _check_backend(request.backend, own_backend)
    info = _parse(request.init_json, "init_json")
    if not isinstance(info, dict):
        raise InvalidFieldError("init_json", "is not an object; give the fields of init_info")
    return info


def read_transfer(transfer: engine_pb2.WeightTransfer, own_backend: str) -> Transfer:
    """Returns the description of a transfer.

    Raises:
        WeightTransferError: The engine was not started with that backend.
        InvalidFieldError: There is no description, or one is neither a JSON object nor a list.
    """
    _check_backend(transfer.backend, own_backend)
    field = "header.transfer.update_json"
    updates = tuple(_parse(text, field) for text in transfer.update_json)
    if not updates or not all(isinstance(update, dict | list) for update in updates):
        raise InvalidFieldError(field, "give at least one object or list of objects")
    return Transfer(updates)


def _check_backend(wanted: str, own: str) -> None:
    if not own:
        raise WeightTransferError(
            f"backend: is {wanted!r}, and the engine has no transfer backend; "
            "start it with --weight-transfer"
        )
    if wanted != own:
        raise WeightTransferError(f"backend: is {wanted!r}, and the engine uses {own!r}; give that")


def _parse(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(field, f"is not JSON: {error}") from error
