"""Makes a tiny model for a first try: a tokenizer, a chat template, and random weights.

    python -m examples.tiny_model model              # with torch and transformers: vLLM loads it
    python -m examples.tiny_model model --no-weights # the tokenizer alone, for a scripted engine

Its answers are noise: it shows that a mesh runs, and what an answer looks like.
"""

import argparse
import json
from pathlib import Path

from examples.demo.chatml import END, make_tokenizer

_CORPUS = [
    "You are a helpful assistant. What is 12 plus 30? The answer is 42.",
    '{"name": "calculator", "arguments": {"a": 6, "b": 7}}',
    '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}',
    "system user assistant tool\n",
]
_CONTEXT = 2048


def make(folder: Path, *, weights: bool) -> None:
    """Writes the files of a model of 0.1 M parameters."""
    tokenizer = make_tokenizer(_CORPUS * 100, 400, folder, _CONTEXT)
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": _CONTEXT,
        "eos_token_id": tokenizer.token_to_id(END),
        "tie_word_embeddings": True,
    }
    if weights:
        from transformers import Qwen3Config, Qwen3ForCausalLM  # optional

        Qwen3ForCausalLM(Qwen3Config(**shape, dtype="float32")).save_pretrained(folder)
        return
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **shape}
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-weights", action="store_true")
    given = parser.parse_args()
    make(given.folder, weights=not given.no_weights)
