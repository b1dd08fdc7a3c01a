"""The chat templates of the `trl` package, each with a tokenizer made for it on the spot, and the
tokenizers of `mistral_common`, which encode conversations without a template.

`python -m tests.chat.families > docs/templates.md` makes the table in the docs.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from rollmesh.chat.messages import Message
from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.ends import TemplateRefusedError
from rollmesh.chat.templates.jinja import ChatTemplate
from rollmesh.chat.templates.profile import Finding
from rollmesh.chat.templates.system_messages import SystemRule
from rollmesh.chat.tokenizer import Tokenizer
from tests.paths import package_folder

if TYPE_CHECKING:
    from rollmesh.chat.templates.mistral import MistralTokenizer

FOLDER = package_folder("trl") / "chat_templates"
MISTRAL = package_folder("mistral_common") / "data"
# Later versions are not in the package: a file as their makers write it, with a small vocabulary.
_LATER = {"tekken_v11.json": "v11", "tekken_v13.json": "v13"}
_LATER_TOKENS = ("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
# Texts that are one token in these templates. Control tokens are special; tags are one token
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
    """A template's continuation; to probe one takes the most time of these tests.

    Raises:
        TemplateRefusedError: It cannot be continued.
    """
    family = load(name)
    return Continuation(family.template, family.tokenizer)


def rendered(family: Family, messages: Sequence[Message], tools_json: bytes) -> str | None:
    """Transformers' own render; None where the template refuses the conversation."""
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - it is large
        render_jinja_template,
    )

    plain: list[dict[str, Any]] = []
    in_parts = family.name.startswith(("llava", "idefics", "smolvlm"))
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if in_parts or message.images:
            parts = message.parts if message.images else [message.content]
            entry["content"] = [
                {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"}
                for one in parts
            ]
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
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
        plain.append(entry)
    try:
        texts, _ = render_jinja_template(
            conversations=[plain],
            tools=json.loads(tools_json) if tools_json else None,
            chat_template=family.source,
            add_generation_prompt=True,
            **family.variables,
        )
    except Exception:  # noqa: BLE001 - whatever a template raises
        return None
    return str(texts[0])


def write(name: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Writes tokenizer, template and config of a model; returns the template and its variables."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    end = next((end for prefix, end in _ENDS.items() if name.startswith(prefix)), "<|im_end|>")
    variables = {"eos_token": end, "bos_token": "<s>", "pad_token": end}
    _write_tokenizer(folder, source, variables, _MORE_CONTROL.get(name.partition("_")[0], set()))
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return source, variables


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
    """The file of a tokenizer; one of a later version is made in `folder`."""
    if name not in _LATER:
        return MISTRAL / name
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # noqa: PLC0415 - it is large

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
    from rollmesh.chat.templates.mistral import (  # noqa: PLC0415 - it is large
        MistralTemplate,
        MistralTokenizer,
    )

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = MistralTokenizer(mistral_file(name, Path(folder)))
    return Continuation(MistralTemplate(tokenizer), tokenizer), tokenizer


def rows() -> Iterator[str]:
    """The lines of the table."""
    for name in names():
        yield _row(name, partial(continuation, name))


def mistral_rows() -> Iterator[str]:
    """The lines of the table of tokenizers."""
    for name in mistral_names():
        yield _row(name, partial(_mistral, name))


def _mistral(name: str) -> Continuation:
    return load_mistral(name)[0]


def _row(name: str, load: Callable[[], Continuation]) -> str:
    try:
        profile = load().profile
    except TemplateRefusedError as error:
        return f"| {name} | refused | | {_cell(str(error))} |"
    findings = "; ".join(sorted(profile.findings))
    refused = "; ".join(f"no {order}" for order in sorted(map(str, profile.refused)))
    seen = f"{profile.verified} complete"
    seen += f", {profile.kept} after the last answer" if profile.kept else ""
    said = "; ".join(filter(None, (findings, refused)))
    return f"| {name} | {profile.kind} | {seen} | {_cell(said)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def document() -> str:
    """The page of the docs."""
    table = list(rows())
    refused = sum("| refused |" in row for row in table)
    head = _HEAD.format(count=len(table), refused=refused or "none")
    return "\n".join((head + "\n".join(table), _MISTRAL + "\n".join(mistral_rows()), ""))


_HEAD = """\
# Chat templates

A gateway continues a session's tokens without tokenising the past again. For that it must know what
the model's chat template does to earlier messages. When it starts, it probes the template with some
fifty conversations, with and without tools, and compares its own pieces with the template's render,
as text and as token ids. `GetGatewayInfo` and `rollmesh template check MODEL_DIR` show the result:

- **append-only**: a longer conversation begins with the shorter one, in all orders of roles.
- **append-only except**: the same, except for what the last column names.
- **rewrites**: the template prints plain answers of earlier turns differently from how they were
  sampled after its own generation prompt, usually because that prompt opens a `<think>` which the
  history leaves out.

## What a session keeps

Sampled tokens always stay as they are, and a turn adds exactly what the template prints after the
last answer. A turn carries `TEMPLATE_REWRITE` if the ids of its prompt differ from the template's
own render: earlier reasoning is dropped, whitespace is stripped, a call's arguments are spelt
differently, or the tokenizer would cut the sampled text differently. With `--history=rewrite` such
a turn continues from the template's render instead, id for id, on a new branch.

With an append-only template each answer is compared once. Other templates are rendered in full for
each turn, and only what is new or different is tokenised.

**Strips earlier answers.** The template strips whitespace at the ends of answers. It matters only
for an answer that was sampled with such whitespace: its tokens stay, and the turns after it carry
`TEMPLATE_REWRITE`. An echo without the whitespace is also a `LENIENT_ECHO`.

**Answers without an end of their own** (GLM). The model stops at the header of the next turn and so
samples it. That token stays and is trained; the next turn does not print it again. If a different
turn follows than the one whose header was sampled (a tool result after `<|user|>`), both headers
are in the context and the turn carries `TEMPLATE_REWRITE`.

**Where an answer stops.** Harmony (gpt-oss) ends each message of an answer with `<|end|>`, and in
the history the answer too, but the model samples `<|return|>`, or `<|call|>` after a call, and
stops only there. A model whose `generation_config.json` stops it inside its own answers is refused
at start. Gemma 4 ends a call with the `<|tool_response>` that begins the result; if the model
sampled another end, or was cut, that token is added. Its template prints text beside a call after
the call's results: sampled text stays where it was, also with `--history=rewrite`, and an agent's
own message of that kind is refused with a 400.

**System messages.** Agents send several at the beginning, and others within the conversation: Codex
begins with two, Claude Code adds reminders. A template that prints only one at the beginning is
given their texts as one, with an empty line between them. A template that refuses or drops later
ones is given them as user messages, unchanged and in their place, if it takes more orders of
messages like that. The last column says so, and so does `GetGatewayInfo`. The rule depends on the
template and its options alone, so a message is printed the same in every turn.

**Ids of tool calls** count where the template prints them: a message with another id is another
message, and a call has the id that the model sampled. Elsewhere they are ignored.

## What is refused

A template that cannot be continued at all is refused when the gateway starts. An order of roles in
the last column is refused with a 400 when a request needs it. "No assistant, tool" means that no
tool result may follow an assistant message; "no start, assistant" that an agent may not greet
first; "no first system, assistant" that it may not do so after a system message.

A conversation that ends with an assistant message gets another answer after it, where the template
allows that. Continuing the message itself (`continue_final_message`) is refused.

## Templates

These are the {count} templates of the `trl` package, each with a byte-level tokenizer made for it;
{refused} of them are refused. "Complete" counts probes where the gateway's pieces are the
template's complete render; "after the last answer" those where only the new part is. A test
compares the table with the code, and the gateway's prompts with transformers' render of other
conversations.

| template | profile | verified | what it does, what is refused |
|---|---|---|---|
"""

_MISTRAL = """
## Models without a chat template

Mistral's own files (`tekken.json`, `tokenizer.model.v*`) contain no template. The gateway encodes
their conversations with the `mistral_common` package (`pip install 'rollmesh[gateway-mistral]'`),
for a model directory that has such a file and no chat template, as vLLM's `--tokenizer-mode
mistral` does. The text of a message is tokenised alone and can spell no control token; the part
after the last answer is what the package returns.

- Up to v3 the first system message is in the *last* user turn, and up to v11 the tools are in front
  of it: both move as the conversation continues. A session keeps those that were there when an
  answer was sampled, and prints them again in the new user turn, as the package does.
- The package merges two consecutive user messages, so a second one is refused with a 400.
- With `--history=rewrite` the gateway does not start if a turn moves or repeats earlier parts: the
  package would print the complete history differently, not only the answers.

The table has all files of the package, and files made for v11 and v13, which the package lacks. The
reference is the package's own `encode_chat_completion`.

| tokenizer | profile | verified | what it does, what is refused |
|---|---|---|---|
"""

if __name__ == "__main__":
    sys.stdout.write(document())
