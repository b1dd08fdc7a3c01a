"""Small models made on the spot: a tokenizer with a ChatML template, and random weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from examples.demo.chatml import make_tokenizer
from tests.paths import package_folder

CORPUS = [
    "You are a helpful assistant. Use the tools.",
    "What is 12 plus 30? The answer is 42. I am not sure.",
    '{"name": "calculator", "arguments": {"a": 6, "b": 7}}',
    '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}',
    "system user assistant tool\n" * 20,
]
CONTEXT_TOKENS = 2048


def make_tokenizer_dir(path: Path, context: int = CONTEXT_TOKENS) -> Path:
    """Writes a model's files without weights: all that a gateway needs."""
    tokenizer = make_tokenizer(CORPUS * 50, 400, path, context)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_thinking_dir(path: Path, context: int = CONTEXT_TOKENS) -> Path:
    """Writes the same with a template that has reasoning, and drops that of earlier turns."""
    make_tokenizer_dir(path, context)
    template = package_folder("trl") / "chat_templates" / "qwen3.jinja"
    (path / "chat_template.jinja").write_text(template.read_text())
    return path


_SHOWN = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def make_vision_dir(path: Path, context: int = 8192) -> Path:
    """Writes the same with images: one id for each 32 x 32 pixels, as Qwen3-VL has them."""
    make_tokenizer_dir(path, context)
    template = path / "chat_template.jinja"
    source = template.read_text()
    for before in ("message.role + '\\n'", "'\\n<tool_response>\\n'"):
        assert f"{before} + message.content" in source
        source = source.replace(f"{before} + message.content", f"{before} + shown(message.content)")
    template.write_text(_SHOWN + source)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    config = {  # the language model's part apart, as published
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": context,
        },
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
    }
    (path / "config.json").write_text(json.dumps(config))
    processor = {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def make_model_dir(
    path: Path,
    seed: int = 0,
    *,
    corpus: Sequence[str] = CORPUS,
    tags: Sequence[str] = (),
    spread: float = 0.3,
) -> Path:
    """Writes a whole random model of about 0.1 M parameters that vLLM can load.

    Args:
        path: Folder.
        seed: Of the weights.
        corpus: What its tokenizer is trained on.
        tags: Texts of one id each.
        spread: Standard deviation of the weights.
    """
    import torch  # only the tests with vLLM have it
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer([*corpus] * 50, 400, path, CONTEXT_TOKENS)
    if tags:
        tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
        tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=spread,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    generation = {"eos_token_id": config.eos_token_id, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load_network(path: Path) -> Any:
    """The model in torch, float32."""
    import torch  # these take six seconds
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)


def torch_logprobs(path: Path, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """What torch gives for each id of the vocabulary after each of `ids`, by position and id."""
    import torch

    with torch.no_grad():
        logits = load_network(path)(torch.tensor(np.array(ids, np.int64))[None]).logits[0]
    found: npt.NDArray[np.float32] = torch.log_softmax(logits.float(), -1).numpy()
    return found


def make_adapter(
    path: Path, seed: int, config: Mapping[str, Any], spread: float = 0.15
) -> dict[str, Any]:
    """Returns random matrices of a LoRA adapter for a model, by the names that PEFT gives them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for name, module in load_network(path).named_modules():
        if name.rpartition(".")[2] in config["target_modules"]:
            outputs, inputs = module.weight.shape
            for matrix, shape in (("A", (config["r"], inputs)), ("B", (outputs, config["r"]))):
                values = torch.randn(shape, generator=generator) * spread
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values
    return tensors


def merged_logprobs(
    path: Path, ids: npt.ArrayLike, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> npt.NDArray[np.float64]:
    """As `torch_logprobs`, of the weights W + alpha/r * B A, computed in float64."""
    import torch

    network = load_network(path).double()
    with torch.no_grad():
        for name, module in network.named_modules():
            prefix = f"base_model.model.{name}.lora_"
            if f"{prefix}A.weight" in tensors:
                a, b = (tensors[f"{prefix}{one}.weight"].double() for one in "AB")
                module.weight += config["lora_alpha"] / config["r"] * (b @ a)
        logits = network(torch.tensor(np.array(ids, np.int64))[None]).logits[0]
    found: npt.NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
    return found
