"""Generates docs/templates.md: `python -m tests.chat.templates.page > docs/templates.md`.

It needs the packages of `make .venv-templates/.ready`, and vLLM, which knows the names of parsers.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rollmesh.chat.parsing import UNKNOWN, AnswerFormat
from rollmesh.chat.templates import TemplateProfile, TemplateRefusedError, TemplateRenderError
from tests.chat import families
from tests.chat.templates.comparison import ODD, USUAL, Outcome, Turn
from tests.chat.templates.packages import PACKAGES, Package

Tables = Mapping[str, Sequence[str]]
"""The lines of each table, by its heading."""


def result_of(turns: Sequence[Turn]) -> str:
    """Returns what a table says of a template whose prompts were compared."""
    counts = Counter(turn.outcome for turn in turns)
    if counts[Outcome.WRONG]:
        return "wrong"
    return "flagged" if counts[Outcome.FLAGGED] else "exact"


def package_rows(package: Package) -> Iterator[str]:
    """Yields the lines of a package's table."""
    for name in package.names():
        try:
            model = package.model(name)
        except (TemplateRefusedError, TemplateRenderError) as error:
            yield f"| {name} | refused | | | | | {_cell(str(error))} |"
            continue
        result = result_of([*model.turns((*USUAL, *ODD))])
        yield row(name, result, model.continuation.profile, package.format(name))


def row(name: str, result: str, profile: TemplateProfile, format_: AnswerFormat) -> str:
    """Returns the line of a template that is continued."""
    said = [*_said(profile)]
    if format_.one_call:
        said.append("allows one tool call in an answer")
    if format_.tools == UNKNOWN:
        said.append(f"tools are refused: {format_.why}")
    cells = (name, result, profile.kind, _seen(profile), format_.tools, format_.reasoning_name)
    return f"| {' | '.join(cells)} | {_cell('; '.join(said))} |"


def without_result(line: str) -> list[str]:
    """Returns the cells of a line but for the result, which takes the time of a long test."""
    cells = line.split(" | ")
    return [*cells[:1], *cells[2:]]


def mistral_rows() -> Iterator[str]:
    """Yields the lines of the table of tokenizers."""
    for name in families.mistral_names():
        profile = families.load_mistral(name)[0].profile
        said = _cell("; ".join(_said(profile)))
        yield f"| {name} | {profile.kind} | {_seen(profile)} | {said} |"


def _said(profile: TemplateProfile) -> Iterator[str]:
    yield from sorted(profile.findings)
    yield from (f"no {order}" for order in sorted(map(str, profile.refused)))


def _seen(profile: TemplateProfile) -> str:
    seen = f"{profile.verified} complete"
    return seen + (f", {profile.kept} after the last answer" if profile.kept else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def document(tables: Tables) -> str:
    """Returns the page of the docs."""
    parts = [_HEAD]
    for package in PACKAGES:
        lines = tables[package.name]
        refused = sum(" | refused | " in line for line in lines)
        of = f"{package.count} templates, {refused or 'none'} of them refused."
        head = f"### {package.title}\n\n{of}\n\n{_COLUMNS}"
        parts += [head, *(f"{line}\n" for line in lines), "\n"]
    return "".join([*parts, _MISTRAL, *(f"{line}\n" for line in tables["mistral_common"])])


def tables_of(text: str) -> dict[str, list[str]]:
    """Returns the tables of a page as it is written."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|---"):
            rows.append([])
        elif line.startswith("| ") and not line.startswith(("| template |", "| tokenizer |")):
            rows[-1].append(line)
    return dict(zip((*(one.name for one in PACKAGES), "mistral_common"), rows, strict=True))


def made() -> dict[str, list[str]]:
    """Returns all tables, made anew."""
    tables = {package.name: [*package_rows(package)] for package in PACKAGES}
    return tables | {"mistral_common": [*mistral_rows()]}


_COLUMNS = """\
| template | result | profile | verified | tool calls | reasoning | what it does, what is refused |
|---|---|---|---|---|---|---|
"""

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

**A line break before the end token** (Nemotron Nano v2, Laguna, Reka Edge) is part of the
history. If the model samples the end token without it, its tokens stay, and later turns carry
`TEMPLATE_REWRITE`.

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

**Two templates.** A model may have a template `tool_use`, in `additional_chat_templates/` or in a
list in `tokenizer_config.json`. It prints requests with tools, and `default` all others. Both are
probed, and the profile is true of both.

**The date and the time.** A template that prints them prints those at which the session was
opened, in all its turns. A session over midnight keeps its first date: its tokens contain it.

**Ids of tool calls** count where the template prints them: a message with another id is another
message, and a call has the id that the model sampled. Elsewhere they are ignored.

## What is refused

A template that cannot be continued at all is refused when the gateway starts. An order of roles in
the last column is refused with a 400 when a request needs it. "No assistant, tool" means that no
tool result may follow an assistant message; "no start, assistant" that an agent may not greet
first; "no first system, assistant" that it may not do so after a system message. "Behind a system
message" is an order that is refused only in conversations that begin with one: some templates then
print it by the wrong neighbour.

A conversation that ends with an assistant message gets another answer after it, where the template
allows that. Continuing the message itself (`continue_final_message`) is refused.

## Templates

These are the templates of three packages, each with a byte-level tokenizer made for it. Tests
compare the tables with the code, and every prompt of some forty conversations with transformers'
`apply_chat_template`: without and with tools, calls, parallel calls and their results, reasoning,
system messages, and odd orders such as a result before its call. Earlier answers are sampled in one
half of the prompts, and brought along by the agent in the other.

- **exact**: every prompt that is served is the template's own render, id for id.
- **flagged**: the same, or the turn carries `TEMPLATE_REWRITE`.
- **refused**: the gateway does not start with it; the last column says why.

"Complete" counts probes where the gateway's pieces are the template's complete render; "after the
last answer" those where only the new part is. Tool calls and reasoning are the formats that are
detected; `vllm:` formats are read by the installed vLLM. Where the format of calls is unknown,
requests with tools are refused, unless `--tool-parser` is set.

"""

_MISTRAL = """\
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
    sys.stdout.write(document(made()))
