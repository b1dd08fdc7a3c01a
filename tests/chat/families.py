"""The chat templates of the `trl` package, each with a tokenizer made for it on the spot, and the
tokenizers of `mistral_common`, which encode conversations without a template.

`python -m tests.chat.families > docs/templates.md` makes the table in the docs.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mistral_common
import trl
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.ends import TemplateRefusedError
from rollmesh.chat.templates.jinja import ChatTemplate, ModelTemplate
from rollmesh.chat.templates.mistral import MistralTemplate, MistralTokenizer
from rollmesh.chat.tokenizer import ModelTokenizer, Tokenizer

FOLDER = Path(str(trl.__file__)).parent / "chat_templates"
MISTRAL = Path(str(mistral_common.__file__)).parent / "data"
# Later versions are not in the package: a file as their makers write it, with a small vocabulary.
_LATER = {"tekken_v11.json": "v11", "tekken_v13.json": "v13"}
_LATER_TOKENS = ("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
# What stands in these templates for one token. Control tokens are special; tags are one token
# too, but are kept when text is decoded, as in the models' own tokenizers.
_CONTROL = re.compile(
    r"<\|[a-z_]+>|<[a-z_]+\|>|<[|\uff5c][^<>{}'\"\s]{1,40}[|\uff5c]>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|bos|eos|sop)>|</s>|\[/?INST\]|\[gMASK\]"
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


def load(name: str) -> Family:
    with tempfile.TemporaryDirectory() as folder:
        source, variables = write(name, Path(folder))
        tokenizer = Tokenizer(Path(folder))
    return Family(name, source, ChatTemplate(source, variables), tokenizer, variables)


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


def mistral_names() -> list[str]:
    return sorted([*(path.name for path in MISTRAL.iterdir() if path.is_file()), *_LATER])


def mistral_file(name: str, folder: Path) -> Path:
    """The file of a tokenizer; one of a later version is made in `folder`."""
    if name not in _LATER:
        return MISTRAL / name
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


def load_mistral(name: str) -> tuple[MistralTemplate, MistralTokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = MistralTokenizer(mistral_file(name, Path(folder)))
    return MistralTemplate(tokenizer), tokenizer


def rows() -> Iterator[str]:
    """The lines of the table."""
    for name in names():
        family = load(name)
        yield _row(name, family.template, family.tokenizer)


def mistral_rows() -> Iterator[str]:
    """The lines of the table of tokenizers."""
    for name in mistral_names():
        yield _row(name, *load_mistral(name))


def _row(name: str, template: ModelTemplate, tokenizer: ModelTokenizer) -> str:
    try:
        profile = Continuation(template, tokenizer).profile
    except TemplateRefusedError as error:
        return f"| {name} | refused | | {_cell(str(error))} |"
    findings = "; ".join(sorted(profile.findings))
    refused = "; ".join(f"no {order}" for order in sorted(profile.refused))
    seen = f"{profile.verified} whole"
    seen += f", {profile.kept} behind the last answer" if profile.kept else ""
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

When a gateway starts it probes the model's chat template over some fifty conversations, with and
without tools, and compares the pieces it would give the engine with the template's own render, as
text and as token ids. What it found is in `GetGatewayInfo` and in the report of `rollmesh
template check MODEL_DIR`.

- **append-only**: a longer conversation begins with the shorter one, in all orders of roles.
- **append-only except**: the same, but for what the last column names.
- **rewrites**: the template prints plain answers of earlier turns otherwise than they were
  sampled behind its own generation prompt (most often because that prompt opens a `<think>` which
  the history leaves out).

In every case the session *keeps* what was sampled: earlier tokens stay as they are, and what a
turn adds is exactly what the template prints behind the last answer. A turn carries
`TEMPLATE_REWRITE` exactly where the ids of its prompt are not those of the template's own render:
earlier reasoning is dropped, blanks are stripped, a call's arguments are spelt otherwise, or what
was sampled is not how the tokenizer cuts the same text. That is compared turn by turn. Behind an
append-only template each answer is looked at once; others are rendered in full for each turn, and
only what is new, or differs, is tokenised. With `--history=rewrite` such a turn goes on from what
the template prints instead, id for id, on a new branch. "Whole" counts the probes
where that is the template's whole render; "behind the last answer" those where only the new part
is. An order of roles in the last column ("no assistant, tool") is refused with a 400 when a
request needs it; a template that cannot be continued at all is refused when the gateway starts.
"No start, assistant" says that an agent may not greet first, "no first system, assistant" that it
may not behind a system message. A conversation that ends with an assistant message gets another
answer behind that one, where the template has it so: what stands there is ended, not gone on with
(`continue_final_message` is refused with a 400).

"Strips earlier answers" is no rewriting of all: only an answer that was sampled with blanks at an
end, which the template takes off, is concerned. Its tokens stay too, blanks included, and the turns
behind it carry `TEMPLATE_REWRITE`, because the context is not what the template would print.
Which blanks those are is probed. An echo without the blanks
is a `LENIENT_ECHO` beside.

Where answers have no end of their own (GLM), the model stops at the header of the next turn and so
samples it. That token stays, trained as it was sampled, and what follows does not print it again.
When another turn follows than the one whose header was sampled (a tool result behind `<|user|>`),
both headers stand in the context, as the engine sees it, and the turn carries `TEMPLATE_REWRITE`.

A model stops where its template ends an answer, which is not always where it ends a message.
Harmony (gpt-oss) ends each message of an answer with `<|end|>`, and in the history the answer too;
the model samples `<|return|>`, or `<|call|>` behind a call, and stops at these alone. A model whose
`generation_config.json` stops it inside of its own answers is refused when the gateway starts.
Gemma 4 ends a call with the `<|tool_response>` that begins the result; where the model sampled
another end, or was cut, that token is added. Its template prints text beside a call behind the
call's results: text that was sampled there stays where it was, and an agent's own message of that
kind is refused with a 400. With `--history=rewrite` a session keeps such text too.

Ids of tool calls count where the template prints them: a message with another id is another
message there, and a call has the id that the model sampled. Elsewhere they are ignored.

The table is made by `python -m tests.chat.families` from the {count} templates in the `trl`
package, each with a byte-level tokenizer made for it; {refused} of them are refused. A test
compares it with what the code finds, and all that are not refused with transformers' own rendering
of other conversations.

| template | profile | verified | what it does, what is refused |
|---|---|---|---|
"""

_MISTRAL = """
## Models without a chat template

Mistral's own files (`tekken.json`, `tokenizer.model.v*`) bring none: their conversations are
encoded by the `mistral_common` package (`pip install 'rollmesh[gateway-mistral]'`). The gateway
uses it for a model directory that has such a file and no chat template, as vLLM's
`--tokenizer-mode mistral` does. What a message says is tokenised alone and can spell no control
token; what stands behind the last answer is what the package gives.

- Up to v3 the first system message stands in the *last* user turn, up to v11 the tools stand in
  front of it: both move when the conversation goes on. A session keeps those that were there when
  an answer was sampled, and prints them again where the package does, in the new user turn.
- Two user messages in a row are one to the package, so a second one is refused with a 400.
- With `--history=rewrite` the gateway does not start where a turn moves or repeats what stood
  before: the package would print all of it otherwise, not only the answers.

The table is made from all files of the package, and for v11 and v13, of which it has none, from
files made for it. The test's reference is the package's own `encode_chat_completion`.

| tokenizer | profile | verified | what it does, what is refused |
|---|---|---|---|
"""

if __name__ == "__main__":
    sys.stdout.write(document())
