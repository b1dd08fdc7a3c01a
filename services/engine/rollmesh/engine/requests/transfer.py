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
        InvalidFieldError: It is not a JSON object, or has a pickled field.
    """
    _check_backend(request.backend, own_backend)
    info = _parse(request.init_json, "init_json")
    if not isinstance(info, dict):
        raise InvalidFieldError("init_json", "is not an object; give the fields of init_info")
    _refuse_pickles(info, "init_json")
    return info


def read_transfer(transfer: engine_pb2.WeightTransfer, own_backend: str) -> Transfer:
    """Returns the description of a transfer.

    Raises:
        WeightTransferError: The engine was not started with that backend.
        InvalidFieldError: There is no description, one is neither a JSON object nor a list of
            them, or one has a pickled field.
    """
    _check_backend(transfer.backend, own_backend)
    field = "header.transfer.update_json"
    updates = tuple(_parse(text, field) for text in transfer.update_json)
    if not updates or not all(isinstance(update, dict | list) for update in updates):
        raise InvalidFieldError(field, "give at least one object or list of objects")
    for update in updates:
        for part in update if isinstance(update, list) else [update]:
            if not isinstance(part, dict):
                raise InvalidFieldError(field, "give at least one object or list of objects")
            _refuse_pickles(part, field)
    return Transfer(updates)


def _check_backend(wanted: str, own: str) -> None:
    if not own:
        raise WeightTransferError(
            f"backend: is {wanted!r}, and the engine has no transfer backend; "
            "start it with --weight-transfer"
        )
    if wanted != own:
        raise WeightTransferError(f"backend: is {wanted!r}, and the engine uses {own!r}; give that")


def _refuse_pickles(info: dict[str, Any], field: str) -> None:
    """Refuses fields that vLLM would unpickle: whoever writes them runs code in the engine.

    vLLM asks for VLLM_ALLOW_INSECURE_SERIALIZATION first; it is not asked here.
    """
    for name, value in info.items():
        if "pickle" in name.lower() and value is not None:
            raise InvalidFieldError(
                f"{field}.{name}", "is pickled, and is never read; give CUDA IPC handles as JSON"
            )


def _parse(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(field, f"is not JSON: {error}") from error
