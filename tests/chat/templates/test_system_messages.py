"""Several system messages, and those within a conversation, under every template."""

import pytest

from rollmesh.chat import Image, Message, RenderContext, ToolCall, group_messages, make_context
from rollmesh.chat.templates import REWRITING, Finding, SystemRule, TemplateRenderError
from tests.chat import families

BE, NOW = Message("system", "You code."), Message("system", "Skills: none.")
ASK, SAID = Message("user", "Go on."), Message("assistant", "Done.")
CALL = ToolCall("abcdef123", "f", '{"a": "x"}')
CALLED = Message("assistant", "", (CALL,))
GOT = Message("tool", "42", tool_call_id=CALL.id, name="f")
TOOLS = (
    b'[{"type": "function", "function": {"name": "f", "description": "Does it.",'
    b' "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]'
)
CLAUDE_CODE = (BE, ASK, NOW, CALLED, GOT, NOW, CALLED, GOT, SAID, ASK, NOW)
CODEX = (BE, NOW, ASK, ASK, CALLED, GOT, SAID, ASK)


@pytest.mark.parametrize(
    ("rule", "given", "seen"),
    [
        pytest.param(SystemRule(), [BE, NOW, ASK, NOW], [BE, NOW, ASK, NOW], id="none"),
        pytest.param(
            SystemRule(joins_first=True),
            [BE, NOW, ASK, NOW, NOW],
            [Message("system", "You code.\n\nSkills: none."), ASK, NOW, NOW],
            id="one at the beginning",
        ),
        pytest.param(
            SystemRule(later_as_user=True),
            [BE, NOW, ASK, NOW, SAID, NOW],
            [BE, NOW, ASK, Message("user", NOW.content), SAID, Message("user", NOW.content)],
            id="later ones as the user's",
        ),
        pytest.param(
            SystemRule(joins_first=True),
            [Message("system", ""), BE, Message("system", ""), ASK],
            [BE, ASK],
            id="empty ones",
        ),
        pytest.param(
            SystemRule(joins_first=True),
            [BE, Message("system", "See: .", images=(Image(5, "ab", 1, 1),))],
            [Message("system", "You code.\n\nSee: .", images=(Image(16, "ab", 1, 1),))],
            id="an image",
        ),
        pytest.param(
            SystemRule(joins_first=True, later_as_user=True), [ASK], [ASK], id="no system"
        ),
        pytest.param(SystemRule(joins_first=True), [], [], id="nothing"),
    ],
)
def test_a_rule_names_the_templates_input(
    rule: SystemRule, given: list[Message], seen: list[Message]
) -> None:
    assert rule.apply(given) == seen


@pytest.mark.parametrize("name", families.names())
def test_coding_agents_are_served_by_every_template_that_prints_tools(name: str) -> None:
    found = families.continuation(name)
    if Finding.IGNORES_TOOLS in found.profile.findings:
        return
    family, context = families.load(name), make_context(TOOLS, b"")
    for messages in (CLAUDE_CODE, CODEX):
        groups = group_messages(messages)
        parts = [ids.tolist() for ids in found.token_ids(groups, 0, context)]
        parts.append(found.generation_prompt(groups, context).tolist())
        for at in range(1, len(groups)):  # each turn adds what all of them together add
            assert found.token_ids(groups[: at + 1], at, context)[0].tolist() == parts[at]
        ids = [id_ for part in parts for id_ in part]
        text = family.tokenizer.rust.decode(ids, skip_special_tokens=False)
        assert text.count(NOW.content) == messages.count(NOW)
        assert text.count(BE.content) == 1
        full = families.rendered(family, families.given(found, messages), TOOLS)
        if full is not None and not found.profile.findings & REWRITING:
            assert ids == family.tokenizer.encode(full).tolist()


def test_a_template_that_takes_system_messages_is_given_them_as_they_are() -> None:
    findings = families.continuation("qwen2_5").profile.findings
    assert not findings & {Finding.JOINS_FIRST_SYSTEM, Finding.LATER_SYSTEM_AS_USER}


def test_where_users_and_answers_alternate_a_later_system_message_is_refused() -> None:
    found = families.continuation("gemma3")
    with pytest.raises(TemplateRenderError, match="system after user"):
        found.token_ids(group_messages((BE, ASK, NOW)), 0, RenderContext())
