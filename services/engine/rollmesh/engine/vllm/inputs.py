"""What vLLM is given, checked and in its form: constraints, prompts with images, and adapters.

Images have expanded ids, explicit ranges, and our own hashes. vLLM's processor is asked about one
image at a time, with one placeholder. It is never given a prompt, because it would search the
placeholders there: it expands runs a second time, and gives images to placeholders that stand for
nothing. Both happen without an error.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from vllm.inputs.engine import mm_input
from vllm.lora.peft_helper import PEFTHelper
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    has_xgrammar_unsupported_json_features,
)

from rollmesh.engine.backend import Adapter, GenerateInput
from rollmesh.engine.checkpoints import read_headers
from rollmesh.engine.requests import subschemas, tag_schemas
from rollmesh.engine.vllm.grammars import length_pattern
from rollmesh.mesh import Images
from rollmesh.runtime import ByteCache
from rollmesh.runtime.codec import ImageLimits, TokenIds
from rollmesh.runtime.decoding import ImageDecoders
from rollmesh.runtime.errors import (
    InvalidConstraintError,
    InvalidFieldError,
    InvalidImageError,
    InvalidWeightsError,
)
from rollmesh.v1 import engine_pb2

# Constraints: whether the model supports them, and how a constraint is given to it.

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_COMBINED = {"pattern", "format", "const", "enum"}
"""Other bounds of a string, which xgrammar cannot combine with its length."""
_FIELD = "constraint.structural_tag_json"


def has_tokenizer(model_path: Path) -> bool:
    """Returns whether a model's directory has the tokenizer that constraints need."""
    return any((model_path / name).exists() for name in _TOKENIZERS)


def vocabulary_of(llm: Any) -> bytes:
    """Returns the tokens of an `AsyncLLM` as vLLM gives them to xgrammar. Call it in a thread."""
    backend = XgrammarBackend(
        llm.vllm_config,
        tokenizer=llm.renderer.tokenizer,
        vocab_size=llm.vllm_config.model_config.get_vocab_size(),
    )
    compiled = backend.compiler.compile_regex("a")
    return str(compiled.tokenizer_info.serialize_json()).encode()


def written(constraint: engine_pb2.Constraint) -> str:
    """Returns the structural tag for vLLM. Call it in a thread.

    Raises:
        InvalidConstraintError: It is strict, and xgrammar would ignore a part of a JSON schema.
    """
    tag = json.loads(constraint.structural_tag_json)
    for schema, form in tag_schemas(tag):
        if not isinstance(schema, dict):
            continue
        # Patterns cannot bound strings inside tags or where text is excluded: xgrammar ignores
        # exclusions in patterns.
        takes_patterns = form.get("style", "json") == "json" and not form.get("excludes")
        bounds = list(_bounded_strings(schema))
        unsupported = has_xgrammar_unsupported_json_features(schema)
        if constraint.strict and (unsupported or (bounds and not takes_patterns)):
            raise InvalidConstraintError(
                _FIELD,
                "has a JSON schema with a keyword that cannot be enforced (multipleOf, "
                "uniqueItems, contains, allOf of several, unusual formats, lengths of strings that "
                "may not contain the format's delimiters, ...); remove the keyword, or strict",
            )
        for string in bounds if takes_patterns else ():
            # With length bounds, xgrammar 0.2.8 allows control characters, which are invalid in
            # JSON strings. With a pattern it does not.
            least, most = string.pop("minLength", 0), string.pop("maxLength", None)
            string["pattern"] = length_pattern(least, most)
    text = json.dumps(tag, ensure_ascii=False)
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidConstraintError(_FIELD, "has a lone surrogate; write whole characters")
    return text


def _bounded_strings(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a JSON schema that are strings bounded only by their length."""
    if isinstance(schema, list):
        for one in schema:
            yield from _bounded_strings(one)
    if not isinstance(schema, dict):
        return
    bounds = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    is_bounded = bounds and all(type(bound) is int for bound in bounds.values())
    alone = schema.keys().isdisjoint(_NOT_COMBINED)
    if schema.get("type") == "string" and is_bounded and alone:
        yield schema
    for one in subschemas(schema):
        yield from _bounded_strings(one)


# Prompts with images.

_ID_NAMES = ("image_token_id", "image_token_index")


def takes_images(model_path: Path) -> bool:
    """Returns whether a model's config names an id that stands for images."""
    try:
        config = json.loads((model_path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # vLLM names the fault
    return isinstance(config, dict) and any(name in config for name in _ID_NAMES)


class ProcessedImage(NamedTuple):
    """An image as the model's processor made it."""

    token_ids: TokenIds
    item: Any
    embeds: torch.Tensor | None
    """Which of its ids are filled with the image's embeddings. None: all."""


class ImagePrompts:
    """Makes prompts with images. Keeps each processed image.

    Weights do not change that, so it outlives every push, which empties vLLM's own caches: each
    request carries everything that vLLM needs.
    """

    def __init__(self, llm: Any, max_bytes: int, limits: ImageLimits) -> None:
        """Takes vLLM with the model's processor, a bound of the kept bytes, and the limits."""
        self._decoders = ImageDecoders(limits)
        config = llm.vllm_config.model_config.hf_config
        ids = (getattr(config, name, None) for name in _ID_NAMES)
        self._placeholder = next((one for one in ids if isinstance(one, int)), None)
        if not llm.vllm_config.model_config.supports_multimodal_inputs:
            self._placeholder = None
        self._renderer = llm.renderer
        self._processed: ByteCache[str, ProcessedImage] = ByteCache(max_bytes)

    async def close(self) -> None:
        """Ends the processes that decode images."""
        await self._decoders.close()

    async def prompt(self, request: GenerateInput) -> Any:
        """Returns vLLM's input for the prompt of a request.

        Raises:
            InvalidFieldError: The processor represents an image by other ids than the prompt does,
                there are placeholders without an image, or the model takes no images.
            InvalidImageError: The processor cannot take an image.
        """
        token_ids, images = request.token_ids, request.generate.images
        ids = token_ids.tolist()
        if not images:
            return {"prompt_token_ids": ids}
        if self._placeholder is None:
            raise InvalidFieldError("images", "this model takes no images; send text alone")
        made: list[ProcessedImage] = []
        for at, image in enumerate(images):
            processed = await self._process(
                image.sha256, request.images[image.sha256], f"images[{at}]"
            )
            wanted, ids_there = processed.token_ids, token_ids[image.offset :][: image.length]
            if len(wanted) != image.length:
                raise InvalidFieldError(
                    f"images[{at}].length",
                    f"is {image.length}; the model's processor makes {len(wanted)} ids of the "
                    "image; start the gateway and the engine from the same model_path",
                )
            if not np.array_equal(ids_there, wanted):
                raise InvalidFieldError(
                    f"images[{at}].offset", "the ids there are not those that stand for an image"
                )
            made.append(processed)
        self.check_rest(images, token_ids)
        return mm_input(
            prompt_token_ids=ids,
            mm_kwargs=MultiModalKwargsItems({"image": [one.item for one in made]}),
            mm_hashes={"image": [image.sha256 for image in images]},
            mm_placeholders={
                "image": [
                    PlaceholderRange(image.offset, image.length, one.embeds)
                    for image, one in zip(images, made, strict=True)
                ]
            },
        )

    async def _process(self, sha256: str, data: bytes, field: str) -> ProcessedImage:
        """Returns an image as the model's processor makes it."""
        if (found := self._processed.find(sha256)) is not None:
            return found
        decoded = await self._decoders.decode(data, field, "", pixels=True)
        prompt = {
            "prompt_token_ids": [self._placeholder],
            "multi_modal_data": {"image": [decoded.pixels]},
            "multi_modal_uuids": {"image": [sha256]},
        }
        try:
            (rendered,) = await self._renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise InvalidImageError(
                field, f"is not taken by the model's processor: {error.__cause__ or error}"
            ) from error
        (item,), (place,) = rendered["mm_kwargs"]["image"], rendered["mm_placeholders"]["image"]
        made = ProcessedImage(
            np.array(rendered["prompt_token_ids"], np.uint32), item, place.is_embed
        )
        tensors = (one for one in item.get_data().values() if isinstance(one, torch.Tensor))
        size = sum(one.nbytes for one in tensors) + made.token_ids.nbytes
        self._processed.add(sha256, made, size)
        return made

    def check_rest(self, images: Images, token_ids: TokenIds) -> None:
        """Checks that no id stands for an image that is not in `images`.

        Raises:
            InvalidFieldError: One does. Trainers cannot tell such an id from ids of images.
        """
        is_placeholder = token_ids == self._placeholder
        for image in images:
            is_placeholder[image.offset : image.offset + image.length] = False
        if is_placeholder.any():
            raise InvalidFieldError(
                "token_ids_u32le",
                f"has the id of an image, {self._placeholder}, at index "
                f"{int(is_placeholder.argmax())}, where no image is; name all images",
            )


# Matrices of LoRA adapters, compared with the model before vLLM's worker reads them.
#
# A failure inside vLLM would come in the middle of a step, and vLLM accepts adapters that it then
# applies in part. So shapes, types and values are checked here, while the model samples.

_PREFIX = "base_model.model."
_A, _B, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
_CONFIG = "header.config_json"
_MATRIX = 2  # dimensions
_BYTES = 4  # of a number, at most
_HEADER_BYTES = 16 * 1024 * 1024


def linear_modules(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of matrices of a checkpoint, by the module. It takes a moment."""
    headers = read_headers(model_path).items()
    return {
        name.removesuffix(_WEIGHT): one.shape for name, one in headers if len(one.shape) == _MATRIX
    }


def modules_of(adapter: Adapter) -> list[str]:
    """Returns the names that an adapter's file gives to modules, as far as it can be read."""
    try:
        with safetensors.safe_open(adapter.file, framework="pt") as file:
            return sorted(set(map(_module_of, file.keys())))
    except (safetensors.SafetensorError, OSError):
        return []


class AdapterChecks:
    """Knows the modules of one model."""

    def __init__(self, modules: Mapping[str, tuple[int, ...]], config: Any) -> None:
        """Takes the shapes of the modules that take adapters, by vLLM's names."""
        self._config = config
        self._modules = modules

    @property
    def most_bytes(self) -> int:
        """Size of the largest file that an adapter may have, bytes."""
        rank: int = self._config.max_lora_rank
        return _HEADER_BYTES + _BYTES * rank * sum(map(sum, self._modules.values()))

    def check(self, adapter: Adapter, names: Mapping[str, str]) -> None:
        """Checks an adapter. Reads all of its file.

        `names` has its modules as vLLM names them, empty if vLLM adapts none there.

        Raises:
            InvalidFieldError: VLLM does not support its config, or a target module is unknown.
            InvalidWeightsError: A tensor does not fit the model.
        """
        try:
            helper = PEFTHelper.from_dict(dict(adapter.config))
            helper.validate_legal(self._config)
        except (ValueError, TypeError) as error:
            raise InvalidFieldError(_CONFIG, str(error)) from error
        targets = adapter.config["target_modules"]
        if isinstance(targets, list):
            taking = itertools.chain(self._modules, (name for name, one in names.items() if one))
            known = set(itertools.chain.from_iterable(map(_ends, taking)))
            if odd := sorted(set(targets) - known):
                raise InvalidFieldError(
                    _CONFIG, f"target_modules: the model has no module {odd[0]!r:.80} to adapt"
                )
            targets = set(targets)
        try:
            with safetensors.safe_open(adapter.file, framework="pt") as file:
                self._check_tensors(file, targets, helper, names)
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidWeightsError("safetensors_chunk", f"cannot be read: {error}") from error

    def _check_tensors(
        self, file: Any, targets: Any, helper: PEFTHelper, modules: Mapping[str, str]
    ) -> None:
        names = set(file.keys())
        if not names:
            raise InvalidWeightsError("safetensors_chunk", "has no tensors")
        for name in sorted(names):
            module = _module_of(name)
            shape = self._modules.get(modules[module])
            if shape is None or name not in {f"{_PREFIX}{module}{one}" for one in (_A, _B)}:
                raise InvalidWeightsError(
                    name,
                    "is no matrix A or B of a module of the model; give what PEFT's "
                    "get_peft_model_state_dict returns, of linear layers",
                )
            if isinstance(targets, set) and targets.isdisjoint(_ends(module)):
                raise InvalidWeightsError(name, "is of no module in target_modules")
            is_a = name.endswith(_A)
            other = f"{_PREFIX}{module}{_B if is_a else _A}"
            if other not in names:
                raise InvalidWeightsError(other, "is missing")
            rank, _ = helper.get_rank_and_scaling(module)
            wanted = [rank, shape[1]] if is_a else [shape[0], rank]
            tensor = file.get_tensor(name)
            if list(tensor.shape) != wanted:
                raise InvalidWeightsError(
                    name, f"has shape {list(tensor.shape)}, the model needs {wanted}"
                )
            if tensor.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
                raise InvalidWeightsError(
                    name, f"has dtype {tensor.dtype}; give float32, float16 or bfloat16"
                )
            if not torch.isfinite(tensor.to(self._config.lora_dtype)).all():
                raise InvalidWeightsError(
                    name, f"has a NaN or an infinite value in {self._config.lora_dtype}"
                )


def _module_of(tensor: str) -> str:
    """Returns the module of a matrix A or B, by its name."""
    return tensor.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)


def _ends(module: str) -> Iterator[str]:
    """Yields the names by which a target of PEFT's config means a module: its ends at a dot."""
    while module:
        yield module
        module = module.partition(".")[2]
