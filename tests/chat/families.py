"""The chat templates of the `trl` package, each with a tokenizer made for it on the spot, and the
tokenizers of `mistral_common`, which encode conversations without a template.
"""

import json
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from rollmesh.chat import Message, Tokenizer
from rollmesh.chat.templates import ChatTemplate, Continuation, Finding, SystemRule
from tests.paths import package_folder

if TYPE_CHECKING:
    from rollmesh.chat.templates.mistral import MistralTokenizer

FOLDER = package_folder("trl") / "chat_templates"
MISTRAL = package_folder("mistral_common") / "data"
# Later versions are not in the package: a file as their makers write it, with a small vocabulary.
_LATER = {"tekken_v11.json": "v11", "tekken_v13.json": "v13"}
_LATER_TOKENS = ("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
# Texts that are one token in these templates. Control tokens are special. Tags are one token
# too, but are kept when text is decoded, as in the models' own tokenizers.
_CONTROL = re.compile(
    r"<\|[a-z_]+>|<[a-z_]+\|>|<[|\uff5c][^<>{}'\"\s]{1,40}[|\uff5c]>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|start_of_image|image|bos|eos|sop)>|</s>"
    r"|\[/?INST\]|\[gMASK\]"
)
# Control tokens of the models' tokenizers that their templates do not print.
_MORE_CONTROL = {"gptoss": {"<|constrain|>", "<|endoftext|>"}}
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>")
_ENDS = {
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "phi": "<|endoftext|>",
    "gpt": "<|return|>",
    "llava": "</s>",
    "idefics": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
}
for_each = settings(max_examples=settings().max_examples // 6)
"""Of a property that is tested with each template."""


@dataclass(frozen=True)
class Family:
    """One template and its tokenizer."""

    name: str
    source: str
    template: ChatTemplate
    tokenizer: Tokenizer
    variables: dict[str, str]


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def parameters() -> list[ParameterSet]:
    """The names for tests of random conversations.

    A template for training prints what its plain one prints, and marks the answers: a long test.
    """
    known = set(names())
    long = {f"{name}_training" for name in known} & known
    return [pytest.param(name, marks=[pytest.mark.long] * (name in long)) for name in names()]


@cache
def load(name: str) -> Family:
    with tempfile.TemporaryDirectory() as folder:
        source, variables = write(name, Path(folder))
        tokenizer = Tokenizer(Path(folder))
    return Family(name, source, ChatTemplate(source, variables), tokenizer, variables)


@cache
def continuation(name: str) -> Continuation:
    """A template's continuation. To probe one takes the most time of these tests.

    Raises:
        TemplateRefusedError: It cannot be continued.
    """
    family = load(name)
    return Continuation(family.template, family.tokenizer)


def rendered(family: Family, messages: Sequence[Message], tools_json: bytes) -> str | None:
    """Transformers' own render. None where the template refuses the conversation."""
    from transformers.utils.chat_template_utils import (  # it is large
        render_jinja_template,
    )

    in_parts = family.name.startswith(("llava", "idefics", "smolvlm"))
    plain = [plain_message(message, in_parts=in_parts) for message in messages]
    try:
        texts, _ = render_jinja_template(
            conversations=[plain],
            tools=json.loads(tools_json) if tools_json else None,
            chat_template=family.source,
            add_generation_prompt=True,
            **family.variables,
        )
    except Exception:  # whatever a template raises
        return None
    return str(texts[0])


def plain_message(message: Message, *, in_parts: bool = False) -> dict[str, Any]:
    """A message as transformers takes it."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if in_parts or message.images:
        parts = message.parts if message.images else [message.content]
        entry["content"] = [
            {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"}
            for one in parts
        ]
    if message.reasoning:
        entry |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        entry |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return entry


def write(name: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Writes tokenizer, template and config of a model. Returns the template and its variables."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    end = next((end for prefix, end in _ENDS.items() if name.startswith(prefix)), "<|im_end|>")
    more = _MORE_CONTROL.get(name.partition("_")[0], set())
    return source, write_source(source, folder, end, more)


def write_source(source: str, folder: Path, end: str, more: Collection[str] = ()) -> dict[str, str]:
    """Writes the files of a model whose template and end token are given. Returns its variables.

    Args:
        source: The chat template.
        folder: Where the files are written.
        end: Text of the token that ends an answer.
        more: Control tokens that the template does not print.
    """
    variables = {"eos_token": end, "bos_token": "<s>", "pad_token": end}
    _write_tokenizer(folder, source, variables, set(more))
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return variables


def _write_tokenizer(folder: Path, source: str, variables: dict[str, str], more: set[str]) -> None:
    control = {*_CONTROL.findall(source), *variables.values(), *more}
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=sorted(control),
    )
    rust.train_from_iterator([source, "\n\n \n  .\n"] * 3, trainer)
    tags = sorted(set(_TAGS.findall(source)))
    rust.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(variables))
    harmony = ("<|return|>", "<|endoftext|>", "<|call|>")  # as gpt-oss ships it
    stops = [text for text in harmony if "<|return|>" in control]
    if "[gMASK]" in control:
        stops = ["<|user|>", "<|observation|>"]  # as in the models' own generation_config.json
    generation = {"eos_token_id": [rust.token_to_id(stop) for stop in stops]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def given(found: Continuation, messages: Sequence[Message]) -> list[Message]:
    """The messages as the template is given them."""
    findings = found.profile.findings
    rule = SystemRule(
        Finding.JOINS_FIRST_SYSTEM in findings, Finding.LATER_SYSTEM_AS_USER in findings
    )
    return rule.apply(messages)


def mistral_names() -> list[str]:
    return sorted([*(path.name for path in MISTRAL.iterdir() if path.is_file()), *_LATER])


def mistral_file(name: str, folder: Path) -> Path:
    """The file of a tokenizer. One of a later version is made in `folder`."""
    if name not in _LATER:
        return MISTRAL / name
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # it is large

    made = json.loads((MISTRAL / "tekken_240718.json").read_text())
    tokens: list[str] = [str(one["token_str"]) for one in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    tokens += [token for token in _LATER_TOKENS if token not in tokens]
    made["config"] |= {"version": _LATER[name], "default_vocab_size": 3000}
    made["vocab"] = made["vocab"][:3000]
    made["special_tokens"] = [
        {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(tokens)
    ]
    path = folder / name
    path.write_text(json.dumps(made))
    return path


@cache
def load_mistral(name: str) -> "tuple[Continuation, MistralTokenizer]":
    from rollmesh.chat.templates.mistral import (  # it is large
        MistralTemplate,
        MistralTokenizer,
    )

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = MistralTokenizer(mistral_file(name, Path(folder)))
    return Continuation(MistralTemplate(tokenizer), tokenizer), tokenizer
