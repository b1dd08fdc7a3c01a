"""Every template of the `trl` package: exact, or refused with the reason. None silently wrong."""

import pytest

from rollmesh.chat import Message, ToolCall, group_messages, make_context
from rollmesh.chat.templates import (
    REWRITING,
    Continuation,
    TemplateRefusedError,
    TemplateRenderError,
)
from tests.chat import families
from tests.chat.templates import page
from tests.chat.templates.packages import TRL
from tests.paths import ROOT

TOOLS = (
    b'[{"type": "function", "function": {"name": "add", "description": "Adds, \\"fast\\".",'
    b' "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}]'
)
CALL = ToolCall("abcdef123", "add", '{"n": 41, "why": "caf\u00e9"}')
SYSTEM, ASK = Message("system", "You   add.\n"), Message("user", "\tAnd 1?  ")
SAID, CALLED = Message("assistant", "Two, or\n\nso."), Message("assistant", "", (CALL,))
GOT = Message("tool", "42\n", tool_call_id=CALL.id, name="add")
CONVERSATIONS = (
    (ASK,),
    (SYSTEM, ASK),
    (ASK, SAID, ASK, SAID, ASK),
    (SYSTEM, ASK, SAID, ASK),
    (ASK, CALLED, GOT),
    (SYSTEM, ASK, CALLED, GOT, SAID, ASK),
    (SYSTEM, ASK, CALLED, GOT, CALLED, GOT),
    (SAID, ASK),
    (SYSTEM, SAID, ASK, SAID, ASK),
    (ASK, SAID),
    (SYSTEM, ASK, CALLED, GOT, SAID),
    (SYSTEM, SYSTEM, ASK, SAID, ASK),
    (SYSTEM, ASK, SYSTEM),
    (SYSTEM, ASK, SYSTEM, CALLED, GOT, SYSTEM, SAID, SYSTEM, ASK),
)


def continuation(name: str) -> Continuation | None:
    try:
        return families.continuation(name)
    except TemplateRefusedError:
        return None


@pytest.mark.parametrize("name", families.names())
def test_a_continuation_equals_transformers_render(name: str) -> None:
    found = continuation(name)
    if found is None:
        return  # refused. That the reason is given is the table's test
    encode, checked = families.load(name).tokenizer.encode, 0
    for messages in CONVERSATIONS:
        for tools in (b"", TOOLS):
            seen = families.given(found, messages)
            full = families.rendered(families.load(name), seen, tools)
            groups, context = group_messages(messages), make_context(tools, b"")
            if full is None:
                continue
            try:
                parts = [ids.tolist() for ids in found.token_ids(groups, 0, context)]
                parts.append(found.generation_prompt(groups, context).tolist())
            except TemplateRenderError as error:
                assert found.profile.refused or "does not print tools" in str(error)  # noqa: PT017
                continue
            answers = [at for at, group in enumerate(groups) if group[0].role == "assistant"]
            whole, ids = [id_ for part in parts for id_ in part], encode(full).tolist()
            if not found.profile.findings & REWRITING or not answers:
                assert whole == ids
            else:
                behind = [id_ for part in parts[answers[-1] + 1 :] for id_ in part]
                assert ids[-len(behind) :] == behind
            checked += 1
    assert checked >= 2


def test_the_tables_in_the_docs_equal_the_findings_of_the_code() -> None:
    """But for the other packages, and the results of comparisons: those are long tests."""
    text = (ROOT / "docs" / "templates.md").read_text()
    tables = page.tables_of(text)
    assert text == page.document(tables)
    assert tables["mistral_common"] == [*page.mistral_rows()]
    found = [
        page.row(name, "", families.continuation(name).profile, TRL.format(name))
        for name in TRL.names()
    ]
    assert [*map(page.without_result, tables["trl"])] == [*map(page.without_result, found)]


def test_all_templates_are_continued() -> None:
    refused = [name for name in families.names() if continuation(name) is None]
    assert len(families.names()) >= 60
    assert refused == []
