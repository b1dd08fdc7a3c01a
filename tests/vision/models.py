"""Small vision models made on the spot, with random weights: like Qwen-VL, and like LLaVA."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from examples.demo.chatml import CHAT_TEMPLATE, END, make_tokenizer
from tests.models import CONTEXT_TOKENS, CORPUS

_PARTS = """\
{%%- macro show(content) -%%}
    {%%- if content is string -%%}{{- content -}}
    {%%- else -%%}
        {%%- for part in content -%%}
            {%%- if part.type == 'image' -%%}{{- '%s' -}}
            {%%- else -%%}{{- part.text -}}{%%- endif -%%}
        {%%- endfor -%%}
    {%%- endif -%%}
{%%- endmacro -%%}
"""
_NORM = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # vLLM's attention on CPUs takes heads of 32, not of 16
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
# A tower with larger weights turns the rounding of pixels into more than rounding of the answer.
_VISION = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
KINDS = ("qwen2_5_vl", "llava")


def make_vision_dir(kind: str, path: Path) -> Path:
    """Writes a model's files without weights: all that a gateway needs."""
    printed = "<image>" if kind == "llava" else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer = _tokenizer(kind, printed, path)
    _write(path / "config.json", _config(kind, tokenizer))
    for name, content in _processors(kind).items():
        _write(path / f"{name}.json", content)
    return path


def make_vision_model(kind: str, path: Path, seed: int = 0) -> Path:
    """Writes a whole random model of about 0.2 M parameters that vLLM can load."""
    import torch  # these take six seconds
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    make_vision_dir(kind, path)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    _write(path / "generation_config.json", {"eos_token_id": config.text_config.eos_token_id})
    if kind == "llava":  # as published checkpoints name it, and vLLM expects
        file = path / "model.safetensors"
        weights = load_file(file)
        old, new = "vision_tower.", "vision_tower.vision_model."
        renamed = {name.replace(old, new): weight for name, weight in weights.items()}
        save_file(renamed, file, {"format": "pt"})
    return path


def _tokenizer(kind: str, printed: str, path: Path) -> Tokenizer:
    tokenizer = make_tokenizer(CORPUS * 50, 400, path, CONTEXT_TOKENS)
    more = ["<image>"]
    if kind != "llava":
        more = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in more])
    tokenizer.save(str(path / "tokenizer.json"))
    template = CHAT_TEMPLATE.replace("message.content + ", "show(message.content) + ")
    (path / "chat_template.jinja").write_text(_PARTS % printed + template)
    return tokenizer


def _config(kind: str, tokenizer: Tokenizer) -> dict[str, Any]:
    text = _TEXT | {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(END),
        "bos_token_id": None,
    }
    if kind == "llava":
        clip = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2}
        clip |= {"image_size": 56, "patch_size": 14, "initializer_factor": 3.0, **_VISION}
        return {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": tokenizer.token_to_id("<image>"),
            "text_config": {"model_type": "llama", **text},
            "vision_config": clip,
            "tie_word_embeddings": True,
        }
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(f"<|{text}|>")
        for name, text in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": rope, **text},
        "vision_config": {"window_size": 56, **vision, **_VISION},
        "tie_word_embeddings": True,
        **ids,
    }


def _processors(kind: str) -> dict[str, dict[str, Any]]:
    if kind == "llava":
        image = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": True, **_NORM}
        image |= {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        whole = {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": "<image>"}
        whole |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return {"preprocessor_config": image, "processor_config": whole}
    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 16}, **_NORM}
    shared = {"processor_class": "Qwen2_5_VLProcessor", "patch_size": 14, "merge_size": 2, **sizes}
    return {
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", **shared},
        "video_preprocessor_config": {"video_processor_type": "Qwen2VLVideoProcessor", **shared},
    }


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
