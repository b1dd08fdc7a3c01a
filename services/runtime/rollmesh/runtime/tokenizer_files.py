"""The digest of a model's tokenizer: services with equal digests map ids to the same text."""

import hashlib
import json
from pathlib import Path
from typing import Any

_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "model")
"""The parts that determine ids. Tools rewrite the others (truncation, padding, decoder)."""


def tokenizer_sha256(model_path: Path) -> str:
    """Returns the digest of the tokenizer in a model's directory, SHA-256, hexadecimal.

    Of `tokenizer.json` it covers the parts that decide ids, as JSON values: a copy that another
    release of the library saved has the same digest. Of a tokenizer of `mistral_common` it covers
    the bytes of the file.

    Raises:
        OSError: There is no tokenizer, or it cannot be read.
        ValueError: `tokenizer.json` is not a JSON object.
    """
    path = model_path / "tokenizer.json"
    others = [*model_path.glob("tekken*.json"), *sorted(model_path.glob("*.model.v*"))[::-1]]
    if not path.exists() and others:
        return hashlib.sha256(others[0].read_bytes()).hexdigest()
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")  # noqa: TRY004 - a bad file
    parts = {name: value.get(name) for name in _PARTS}
    if isinstance(parts["model"], dict):
        parts["model"] = _with_plain_merges(parts["model"])
    data = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(data.encode()).hexdigest()


def _with_plain_merges(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model with its merges in one form: releases write "a b" or ["a", "b"]."""
    merges = [
        merge.split(" ", 1) if isinstance(merge, str) else merge
        for merge in model.get("merges") or []
    ]
    return {**model, "merges": merges}
