"""Templates that print the date or the time: a session prints those of its beginning."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from rollmesh.chat import (
    ChatModel,
    Conversation,
    Message,
    MessageGroup,
    RenderContext,
    Tokenizer,
    group_messages,
    make_context,
)
from rollmesh.chat.templates import ChatTemplate, Continuation, Finding, SpecialText, shown_time
from tests.chat import families

EVENING = int(datetime(2026, 3, 9, 23, 59, 58).astimezone().timestamp())
AFTER_MIDNIGHT = EVENING + 3
SYSTEM, ASK, SAID = Message("system", "Be kind."), Message("user", "q"), Message("assistant", "a")
CLOCK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'PLACE' %}{{ strftime_now('%H:%M:%S') }} {% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def at(time: int) -> RenderContext:
    return replace(make_context(b"", b""), now=time)


def prompt(found: Continuation, messages: Sequence[Message], context: RenderContext) -> list[int]:
    groups = group_messages(tuple(messages))
    parts = [*found.token_ids(groups, 0, context), found.generation_prompt(groups, context)]
    return [id_ for ids in parts for id_ in ids.tolist()]


def clock_of(role: str, folder: Path) -> tuple[ChatTemplate, Tokenizer]:
    source = CLOCK.replace("PLACE", role)
    variables = families.write_source(source, folder, "<|im_end|>")
    return ChatTemplate(source, variables), Tokenizer(folder)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss"])
def test_a_session_prints_the_date_of_its_beginning(name: str) -> None:
    family, found = families.load(name), families.continuation(name)
    assert Finding.PRINTS_DATE in found.profile.findings
    days = []
    for time in (EVENING, AFTER_MIDNIGHT, EVENING):
        days.append(prompt(found, (SYSTEM, ASK), at(time)))
        render = family.template.render((SYSTEM, ASK), at(time), generation_prompt=True)
        assert days[-1] == family.tokenizer.encode(render).tolist()
    assert days[0] == days[2] != days[1]


@pytest.mark.parametrize("name", ["llama3_2", "gptoss"])
def test_a_session_over_midnight_is_not_rewritten(name: str) -> None:
    found = families.continuation(name)
    groups, show = group_messages((SYSTEM, ASK)), list[MessageGroup]
    prompt(found, (SYSTEM, ASK), at(EVENING))
    for time in (EVENING, AFTER_MIDNIGHT):
        added = found.token_ids(groups, 0, at(time))
        added.append(found.generation_prompt(groups, at(time)))
        assert found.compare((), groups, at(time), added, show).at is None


@pytest.mark.parametrize("role", ["system", "user"])
def test_sessions_seconds_apart_print_their_own_times(role: str, tmp_path: Path) -> None:
    template, tokenizer = clock_of(role, tmp_path)
    found = Continuation(template, tokenizer)
    prompts = set[tuple[int, ...]]()
    for time in (EVENING, EVENING + 1, EVENING + 2):
        for messages in ((SYSTEM, ASK), (SYSTEM, ASK, SAID, ASK)):
            ids = prompt(found, messages, at(time))
            render = template.render(messages, at(time), generation_prompt=True)
            assert ids == tokenizer.encode(render).tolist()
            prompts.add(tuple(ids))
    assert len(prompts) == 6


def test_text_that_spells_a_token_does_not_keep_the_time_of_another_session(tmp_path: Path) -> None:
    _, tokenizer = clock_of("system", tmp_path)
    special, group = SpecialText(tokenizer, "plain"), group_messages((ASK,))
    tools = make_context(b'[{"function": {"name": "<|im_end|>"}}]', b"")
    for time in (EVENING, AFTER_MIDNIGHT):
        _, shown, _ = special.apply(group, 0, replace(tools, now=time))
        assert shown.now == time


def test_a_conversation_keeps_the_time_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_of("user", tmp_path)
    now = [EVENING]
    monkeypatch.setattr("time.time_ns", lambda: now[0] * 10**9)
    model = ChatModel.load(tmp_path)
    conversation = Conversation(model)
    first = conversation.prompt([{"role": "user", "content": "q"}])
    now[0] = AFTER_MIDNIGHT
    assert conversation.prompt([{"role": "user", "content": "q"}]).tolist() == first.tolist()
    assert Conversation(model).prompt([{"role": "user", "content": "q"}]).tolist() != first.tolist()


@pytest.mark.parametrize(
    ("source", "is_day"),
    [
        ("{{ strftime_now('%d %b %Y') }}", True),
        ('{% if strftime_now is defined %}{{ strftime_now( "%Y-%m-%d" ) }}{% endif %}', True),
        ("no time", True),
        ("{{ strftime_now('%Y-%m-%d %H:%M') }}", False),
        ("{{ strftime_now('%-I %p') }}", False),
        ("{{ strftime_now(pattern) }}", False),
        ("{{ strftime_now('%d' ~ rest) }}", False),
        ("{% set now = strftime_now %}{{ now('%d') }}", False),
    ],
)
def test_a_time_is_as_exact_as_the_template_prints_it(source: str, *, is_day: bool) -> None:
    assert (shown_time(source)(EVENING) == shown_time(source)(EVENING - 3600)) == is_day
    assert shown_time(source)(EVENING) != shown_time(source)(AFTER_MIDNIGHT) or source == "no time"
