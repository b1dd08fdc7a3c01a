"""Generates docs/peers.md: the checks of the conformance kit at rollmesh and at other servers.

    python -m scripts.pages.peers > docs/peers.md

`make conformance-peers` writes the results in docs/conformance that it shows.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rollmesh.conformance import RECORDS
from scripts.pages.conformance import RECORD as VLLM, cell

RESULTS = Path(__file__).parents[2] / "docs" / "conformance"
_ORDER = ("rollmesh", "rllm", "agent-lightning", "openenv", "verifiers", "areal", "litellm", "vllm")
_INTRO = """# Conformance of other servers

`make conformance-peers` installs servers from locks, runs the checks of the
[conformance kit](conformance.md) at each of them, and writes the raw results into
`docs/conformance`. This page is made from them.

## Training records

The checks `training.records` compare the record of a session, as a trainer reads it, with the
samples of the engine.

A proxy runs in front of an engine that follows a script and answers as vLLM does with token ids.
Encoding the text of its answers gives the sampled tokens again, except where `other-ids` asks for
others. So no other split comes from the tokenizer. The engine of rollmesh follows the same script.
`vllm serve` is an engine itself, and runs a small random model on the CPU. Free samples of such a
model are rarely encoded as they were sampled, and then `one-sequence` fails for the reason that
`other-ids` shows. So `structured_outputs` and `allowed_token_ids` hold the model to numbers of
three digits, one token each, and the end of its turn.

Any form of record can pass. Rows of one request that continue each other count as one sequence, and
every finish reason, stop reason, finding, role or later branch in the record counts as a label.
*Not seen* means that the server or its engine gave no occasion. *Not run* means that the check is
newer than the server's results.

verifiers opens a session in its own process, so `benchmarks/peers/intercept.py` does that by HTTP.
It samples by the parameters of the session, not of the agent, so each session has the agent's.
verifiers and AReaL render prompts by themselves, and ask the engine in token ids. The data proxy of
AReaL runs with the transformers of its own requirements, beside the torch of rollmesh. It exports
the leaves of a session's tree: those after the first count as later branches.
"""
_PROTOCOLS = """
## What agents see

The other checks of the kit at the same servers, in front of a mesh of rollmesh with a scripted
engine. No check fails at the mesh itself, so a failure in front of it comes from the proxy. A pass
may come from the mesh: some proxies pass requests on as they are. verifiers does that here
(`EvalClientConfig`), as its client for training takes chat completions only. `vllm serve` is
version {vllm} with an engine of its own ([conformance](conformance.md#vllms-own-server)).

The kit was written with rollmesh, and some failures are choices of the others: Agent Lightning
refuses streams, OpenEnv ends an agent with an answer where the context is full, and only verifiers
and rLLM pass or answer retries by their marks. rLLM keeps token ids out of its answers, and LiteLLM
puts them into fields of its own, so the checks of tokens see none. Each cell has the numbers of
checks: passed, failed, not seen. The files of `docs/conformance` name them.

"""
_NOT_TRIED = """
## Not tried

- Code of trainers that reads these records: the trainers of rLLM, Agent Lightning and TRL join
  rows, and may label or drop more than the servers do.
- Records of streams, Responses and Messages: these checks are complete chat completions.
- rLLM's cumulative token mode, which release 0.1.0 does not have.
- A real engine behind the proxies.
- What agents see of AReaL's data proxy: it asks its engine for completions of token ids, and a mesh
  has no such route.
- The semantic edges of verifiers: its own harnesses declare compactions and sub-agents by them.
- AReaL 2: PyPI has 1.0.4. Its mode `hf`: `concat` keeps the sampled ids, and ignores stop strings.
- smg 1.13.0 and vllm-router 0.1.17: they are routers.

The code of these packages was read, without their dependencies, and none of it was run:

- NeMo Gym 0.7.0 needs Python 3.13.14. Release 0.4.0, the newest for Python 3.12, has a model server
  that returns token ids (`return_token_id_information`). That server could be checked.
- The capture proxy of tinker-cookbook 0.6.1 samples by the Tinker service.
- OpenPipe ART 0.5.23 records in the agent's own process, by patches of HTTP clients.
- SkyRL 0.4.0: no proxy with a record of sessions was found in it.

Not found on PyPI:

- Polar, slime, miles, prime-rl, Dressage and uni-agent. Other projects have some of the names.
"""


def page() -> str:
    """Returns the page."""
    found = {name: _read(name) for name in _ORDER if (RESULTS / f"{name}.json").exists()}
    text = _INTRO + "\n| check | " + " | ".join(one["title"] for one in found.values()) + " |\n"
    text += "|---" * (len(found) + 1) + "|\n"
    for check in RECORDS.checks:
        ends = [one["records"].get(check.name, ["not run"])[0] for one in found.values()]
        text += f"| `{check.name.rpartition('.')[2]}` | {' | '.join(ends)} |\n"
    text += (
        "\n## Settings\n\n| server | version | date | settings | record |\n|---|---|---|---|---|\n"
    )
    for one in found.values():
        version = f"{one['package']} {one['version']}"
        row = (one["title"], version, one["date"], one["settings"], one["record"])
        text += f"| {' | '.join(row)} |\n"
    for one in found.values():
        text += _details(one)
    return text + _protocols(found) + _NOT_TRIED


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text("utf-8")))


def _protocols(found: dict[str, dict[str, Any]]) -> str:
    """Returns the section of the other checks: their ends by protocol."""
    vllm = json.loads(VLLM.read_text("utf-8"))
    known = {one["title"]: one["protocols"] for one in found.values() if "protocols" in one}
    known["vllm serve"] = vllm["results"]
    text = _PROTOCOLS.format(vllm=vllm["version"])
    text += "| protocol | " + " | ".join(known) + " |\n" + "|---" * (len(known) + 1) + "|\n"
    for protocol in ("http", "chat", "responses", "messages"):
        text += f"| {protocol} | {' | '.join(_counts(one, protocol) for one in known.values())} |\n"
    return text


def _counts(results: dict[str, list[str]], protocol: str) -> str:
    """Returns how many checks of a protocol passed, failed, and were not seen."""
    ends = Counter(end for name, (end, _) in results.items() if name.startswith(f"{protocol}."))
    if ends["skipped"]:
        return "not served"
    return ", ".join(str(ends[one]) for one in ("passed", "failed", "not seen"))


def _details(found: dict[str, Any]) -> str:
    """Returns the section of a server: the checks that did not pass, and the reasons."""
    rest = {name: end for name, end in found["records"].items() if end[0] != "passed"}
    text = f"\n## {found['title']}\n\n"
    if not rest:
        return text + "Every check passed.\n"
    text += "| check | ended | seen |\n|---|---|---|\n"
    for name, (kind, detail) in rest.items():
        text += f"| `{name.rpartition('.')[2]}` | {kind} | {cell(detail)} |\n"
    return text


if __name__ == "__main__":
    print(page(), end="")
