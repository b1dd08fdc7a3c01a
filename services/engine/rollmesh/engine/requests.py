"""Validates requests to generate and to score."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from rollmesh.engine.backend import NO_ID, GenerateInput, ModelLimits, ScoreInput, Transfer
from rollmesh.engine.config import EngineConfig
from rollmesh.mesh import HeldBytes, Images, check_hashes, check_places
from rollmesh.runtime.codec import (
    SAMPLING_RANGES,
    ImageLimits,
    TokenIds,
    check_ranges,
    name_of,
    unpack_ids,
)
from rollmesh.runtime.decoding import ImageDecoders
from rollmesh.runtime.errors import (
    InvalidConstraintError,
    InvalidFieldError,
    InvalidSamplingError,
    PromptEmptyError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
    WeightTransferError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2

# Estimates how much the JSON schemas of a structural tag slow down each sampling step.
#
# Any of an object's optional properties may come next. xgrammar merges the allowed tokens of all of
# them over the full vocabulary, within the step in which vLLM samples for all requests. This costs
# 0.3 ms per property at 150,000 tokens. Alternatives with a common prefix add up.

_MOST_LEVELS = 128
"""Levels of a schema, those that its references add included."""
_MOST_PARTS = 16_384
"""Objects and lists of a schema, most of which are subschemas."""
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_VALUES = {"const", "enum", "default", "examples"}
"""Schema keywords whose contents are values, not schemas."""
_MAPS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Schema keywords that map names to schemas."""


def tag_schemas(value: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the JSON schemas in a structural tag, each with the format that holds it."""
    if isinstance(value, list):
        for one in value:
            yield from tag_schemas(one)
    elif isinstance(value, dict) and value.get("type") == "json_schema":
        yield value.get("json_schema"), value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tag_schemas(one)


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yields the direct subschemas of a JSON schema."""
    for key, one in schema.items():
        if key in _MAPS and isinstance(one, dict):
            yield from one.values()
        elif key not in _VALUES:
            yield one


def most_optional(root: Any) -> int:
    """Returns the largest number of optional properties that may come next at any position.

    References point into the same schema. Each part is counted once, however many paths lead to
    it. A part that refers to itself adds nothing to its own count.

    Raises:
        ValueError: The schema has too many parts, or its references nest too deeply.
    """
    counts: dict[int, int] = {}  # by identity of the part, which the root keeps alive

    def count(schema: Any, level: int) -> int:
        if not isinstance(schema, dict | list):
            return 0
        if (known := counts.get(id(schema))) is not None:
            return known
        if level > _MOST_LEVELS:
            raise ValueError(f"its references nest deeper than {_MOST_LEVELS} levels")
        if len(counts) == _MOST_PARTS:
            raise ValueError(f"has more than {_MOST_PARTS} objects and lists")
        counts[id(schema)] = 0
        parts = schema if isinstance(schema, list) else subschemas(schema)
        most = max((count(one, level + 1) for one in parts), default=0)
        if isinstance(schema, dict):
            most = max(most, own(schema, level))
        counts[id(schema)] = most
        return most

    def own(schema: dict[str, Any], level: int) -> int:
        """Returns the count of what is no direct subschema: properties, reference, branches."""
        most, required = 0, schema.get("required")
        if isinstance(properties := schema.get("properties"), dict):
            names = required if isinstance(required, list) else ()
            most = len(properties.keys() - {one for one in names if isinstance(one, str)})
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part = root
            for key in reference.removeprefix("#").split("/")[1:]:
                name = key.replace("~1", "/").replace("~0", "~")
                part = part.get(name) if isinstance(part, dict) else None
            most = max(most, count(part, level + 1))
        for key in _ALTERNATIVES:
            if isinstance(branches := schema.get(key), list):
                most = max(most, sum(count(one, level + 2) for one in branches))
        return most

    return count(root, 0)


# Validates constraints as far as possible without a grammar library.

# vLLM's client parses a tag on the event loop in time superlinear in its depth. These limits keep
# that below about 0.1 s.
_MAX_BYTES = 128 * 1024
_MAX_NESTING = 64
_MAX_OPTIONAL = 256  # 80 ms of every step for a vocabulary of 150,000 tokens
_FIELD = "constraint.structural_tag_json"


def check_constraint(request: engine_pb2.GenerateRequest) -> None:
    """Checks the constraint of a request that has one.

    The time is linear in its size: up to some 50 ms, so call it in a thread if there is one.

    Raises:
        InvalidConstraintError: It is not a structural tag, or it is too large.
        InvalidSamplingError: A sampling parameter conflicts with it.
    """
    text = request.constraint.structural_tag_json
    if len(text.encode()) > _MAX_BYTES:
        raise InvalidConstraintError(_FIELD, f"has more than {_MAX_BYTES} bytes; simplify it")
    try:
        tag: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConstraintError(_FIELD, f"is not JSON: {error}") from error
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise InvalidConstraintError(_FIELD, "has no format; send a structural tag")
    if _is_deeper(tag, _MAX_NESTING):
        raise InvalidConstraintError(_FIELD, f"is nested deeper than {_MAX_NESTING} levels")
    try:
        optional = max((most_optional(schema) for schema, _ in tag_schemas(tag)), default=0)
    except ValueError as error:
        raise InvalidConstraintError(
            _FIELD, f"has a JSON schema that is too complex: {error}; simplify it"
        ) from error
    if optional > _MAX_OPTIONAL:
        raise InvalidConstraintError(
            _FIELD,
            f"has a JSON schema with {optional} optional properties in one object or its "
            f"alternatives; give at most {_MAX_OPTIONAL}: require some, or nest them",
        )
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_sequences"):
        if getattr(request.sampling, name):  # after the end of the tag only an end token is allowed
            raise InvalidSamplingError(f"sampling.{name}", "cannot be combined with a constraint")


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in value)


# Validates sampling parameters and fills in their defaults.


_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}  # others 0
_MOST_IDS = {"stop_token_ids": 64, "allowed_token_ids": 4096, "logit_bias": 1024}
_MOST_BIAS = 100.0
_MAX_BAD, _MAX_BAD_IDS = 1000, 256
MAX_TOP_LOGPROBS = 20  # vLLM's own default limit
_LEAST_TEMPERATURE = float(np.float32(0.01))


def read_sampling(
    params: sampling_pb2.SamplingParams, room: int, vocabulary_tokens: int
) -> sampling_pb2.SamplingParams:
    """Returns checked parameters with all defaults. A seed has none.

    `room` is the number of ids left in the context.

    Raises:
        InvalidSamplingError: Names the field.
    """
    check_ranges(params)
    found = sampling_pb2.SamplingParams()
    found.CopyFrom(params)
    for name in SAMPLING_RANGES:
        if not params.HasField(name):  # type: ignore[arg-type]
            setattr(found, name, _DEFAULTS.get(name, 0.0))
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    if max_tokens < 1:
        raise InvalidSamplingError("sampling.max_tokens", "is 0; give at least 1")
    if params.min_tokens > max_tokens:
        raise InvalidSamplingError("sampling.min_tokens", f"is above max_tokens, {max_tokens}")
    found.max_tokens, found.min_tokens = min(max_tokens, room), min(params.min_tokens, room)
    for name, most in _MOST_IDS.items():
        ids = getattr(params, name)
        if len(ids) > most or max(ids, default=0) >= vocabulary_tokens:
            raise InvalidSamplingError(
                f"sampling.{name}", f"give at most {most} ids below {vocabulary_tokens}"
            )
    if params.logit_bias and not all(abs(one) <= _MOST_BIAS for one in params.logit_bias.values()):
        raise InvalidSamplingError(
            "sampling.logit_bias", f"give {-_MOST_BIAS} to {_MOST_BIAS} for each id"
        )
    if bad := params.bad_sequences:
        if len(bad) > _MAX_BAD or not all(0 < len(one.token_ids) <= _MAX_BAD_IDS for one in bad):
            raise InvalidSamplingError(
                "sampling.bad_sequences",
                f"give at most {_MAX_BAD} sequences of 1 to {_MAX_BAD_IDS} ids",
            )
        if max(max(one.token_ids) for one in bad) >= vocabulary_tokens:
            raise InvalidSamplingError(
                "sampling.bad_sequences", f"give ids below {vocabulary_tokens}"
            )
    if params.allowed_token_ids or bad:  # at least one token can always be sampled
        masked = {one.token_ids[-1] for one in bad}
        masked |= set(params.stop_token_ids) if params.min_tokens else set()
        allowed = set(params.allowed_token_ids)
        left = len(allowed - masked) if allowed else vocabulary_tokens - len(masked)
        if left < 1:
            name = "bad_sequences" if bad else "allowed_token_ids"
            raise InvalidSamplingError(f"sampling.{name}", "leaves no token to sample; mask fewer")
    return found


def check_temperature(sampling: sampling_pb2.SamplingParams) -> None:
    """Checks that vLLM samples at the temperature of a request. It raises lower ones to 0.01.

    Raises:
        InvalidSamplingError: It is lower, so a trainer would not have the distribution.
    """
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise InvalidSamplingError(
            "sampling.temperature",
            f"is {sampling.temperature:.6g}, and vLLM would sample at 0.01; give 0, or at least "
            "0.01 to engines with sampled log-probabilities",
        )


_SAME_IN_VLLM = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def vllm_sampling(sampling: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """Returns checked parameters by their names in vLLM's `SamplingParams`."""
    found: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME_IN_VLLM}
    found |= {"stop_token_ids": list(sampling.stop_token_ids), "detokenize": False}
    if sampling.HasField("seed"):
        found["seed"] = sampling.seed
    if sampling.allowed_token_ids:
        found["allowed_token_ids"] = list(dict.fromkeys(sampling.allowed_token_ids))
    if sampling.logit_bias:
        found["logit_bias"] = dict(sampling.logit_bias)
    return found


_MAX_ID_CHARS = 128
_MAX_BANNED = 64


def read_generate(streamed: engine_pb2.StreamedGenerate, limits: ModelLimits) -> GenerateInput:
    """Returns the validated request.

    Its sampling gets its defaults. With `max_chunk_tokens` 0 it asks for a single message.

    Raises:
        InvalidFieldError: Names the field and its fault.
    """
    request = streamed.generate
    token_ids = _read_sequence(request, limits, room=1)
    room = max(limits.max_context_tokens - len(token_ids), 1)
    sampling = read_sampling(request.sampling, room, limits.vocabulary_tokens)
    request.sampling.CopyFrom(sampling)
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidFieldError(
            "top_logprobs", f"is {request.top_logprobs}; give at most {MAX_TOP_LOGPROBS}"
        )
    for at, kind in enumerate(request.columns):
        name = name_of(sampling_pb2.ColumnKind.DESCRIPTOR, kind)
        if kind not in limits.columns:
            problem = f"this engine does not return {name}; see docs/engines.md for what does"
            raise InvalidFieldError(f"columns[{at}]", problem)
        if kind in request.columns[:at]:
            raise InvalidFieldError(f"columns[{at}]", f"is {name} again; give each kind once")
    first = request.routed_experts_start
    if first and first >= len(token_ids):
        problem = f"is {first}; give one below the {len(token_ids)} ids"
        raise InvalidFieldError("routed_experts_start", problem)
    if request.HasField("constraint"):
        check_constraint(request)
    banned = request.banned_token_ids
    if len(banned) > _MAX_BANNED or max(banned, default=0) >= limits.vocabulary_tokens:
        raise InvalidFieldError(
            "banned_token_ids", f"give at most {_MAX_BANNED} ids below {limits.vocabulary_tokens}"
        )
    if request.sampled_tokens >= len(token_ids):
        raise InvalidFieldError(
            "sampled_tokens",
            f"is {request.sampled_tokens} of {len(token_ids)} ids; a prompt begins with others",
        )
    return GenerateInput(request, token_ids, streamed.max_chunk_tokens, streamed.collect_ms)


MAX_TOP_K = 256


def read_score(request: engine_pb2.ScoreTokensRequest, limits: ModelLimits) -> ScoreInput:
    """Returns the validated request.

    Raises:
        InvalidFieldError: Names the field and its fault.
    """
    given = request.ids_u32le
    fills = limits.scores_whole_context and not given
    token_ids = _read_sequence(request, limits, room=0 if fills else 1)
    start, most = max(request.start, 1), min(MAX_TOP_K, limits.vocabulary_tokens)
    if start >= len(token_ids):
        raise InvalidFieldError(
            "start", f"is {start} of {len(token_ids)} ids; the last index is {len(token_ids) - 1}"
        )
    if request.top_k > most:
        raise InvalidFieldError("top_k", f"is {request.top_k}; give at most {most}")
    if not given:
        return ScoreInput(request.request_id, token_ids, start, request.top_k)
    if not limits.scores_given_ids:
        raise InvalidFieldError(
            "ids_u32le", "this engine cannot score given ids; give top_k, or ask another engine"
        )
    if request.top_k:
        raise InvalidFieldError("top_k", "cannot be combined with ids_u32le; give 0")
    ids = unpack_ids(given, "ids_u32le")
    width, rest = divmod(len(ids), len(token_ids) - start)
    if rest or width > MAX_TOP_K:
        raise InvalidFieldError(
            "ids_u32le",
            f"has {len(ids)} ids; give {len(token_ids) - start} rows of at most {MAX_TOP_K}",
        )
    _check_vocabulary("ids_u32le", ids[ids != NO_ID], limits)
    return ScoreInput(request.request_id, token_ids, start, 0, ids.reshape(-1, width))


def _read_sequence(
    request: engine_pb2.GenerateRequest | engine_pb2.ScoreTokensRequest,
    limits: ModelLimits,
    room: int,
) -> TokenIds:
    """Returns the ids of a request, uint32 [N]. The model must hold `room` more.

    Raises:
        InvalidFieldError: The request has no id, or a long one.
        PromptEmptyError: It has no ids.
        TokenOutOfVocabularyError: It has an id outside of the vocabulary.
        PromptTooLongError: It leaves too little room.
    """
    if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
        raise InvalidFieldError("request_id", f"give 1 to {_MAX_ID_CHARS} characters")
    ids = unpack_ids(request.token_ids_u32le, "token_ids_u32le")
    if not len(ids):
        raise PromptEmptyError("token_ids_u32le", "is empty; send at least one id")
    _check_vocabulary("token_ids_u32le", ids, limits)
    if len(ids) + room > limits.max_context_tokens:
        raise PromptTooLongError(
            "token_ids_u32le",
            f"has {len(ids)} ids; at most {limits.max_context_tokens - room} fit into the context",
        )
    return ids


def _check_vocabulary(field: str, ids: TokenIds, limits: ModelLimits) -> None:
    largest = int(np.max(ids, initial=0))
    if largest >= limits.vocabulary_tokens:
        raise TokenOutOfVocabularyError(
            field, f"has id {largest}; ids are below {limits.vocabulary_tokens}"
        )


# The images of requests: their bytes are checked when they come, and held for later requests.


class RequestImages:
    """Reads the images of requests."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts without images. Takes the limits from the settings of the engine."""
        self._most = config.max_images
        limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)
        self._decoders = ImageDecoders(limits)
        self._held = HeldBytes(config.image_cache_bytes)

    async def read(self, images: Images, prompt_tokens: int) -> dict[str, bytes]:
        """Returns the bytes of the images of a request, by hash.

        Raises:
            InvalidFieldError: There are too many, or one has no place in the prompt.
            InvalidImageError: Bytes have another hash, are no image, or are too large.
            ImageUnknownError: The bytes of some neither came nor are held.
        """
        check_places(images, prompt_tokens, self._most)
        if any(image.data for image in images):
            await self._check(images)
        return self._held.take(images)

    async def close(self) -> None:
        """Ends the processes that decode images."""
        await self._decoders.close()

    async def _check(self, images: Images) -> None:
        """Checks bytes that came. Images that are held are known to be good."""
        await asyncio.to_thread(check_hashes, images)
        checked: set[str] = set()
        for at, image in enumerate(images):
            if image.data and image.sha256 not in self._held and image.sha256 not in checked:
                await self._decoders.decode(image.data, f"images[{at}].data", "")
                checked.add(image.sha256)


# Parses the description of a weight transfer. The weights themselves bypass gRPC.


def read_init(
    init: engine_pb2.ControlEnginesRequest.InitWeightTransfer, engine_id: str, own_backend: str
) -> dict[str, Any]:
    """Returns the `init_info` for an engine.

    Raises:
        WeightTransferError: The engine was not started with that backend.
        InvalidFieldError: It is not a JSON object, or has a pickled field.
    """
    _check_backend(init.backend, own_backend)
    info = _parse(init.init_json_by_engine.get(engine_id, init.init_json), "init_json")
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
    """Refuses fields that vLLM would unpickle: their author runs code in the engine.

    vLLM asks for VLLM_ALLOW_INSECURE_SERIALIZATION first. It is not asked here.
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
