"""Images through real templates: what is rendered, expanded, kept and refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import (
    GridRule,
    Image,
    Message,
    MessageGroup,
    PlacementError,
    RoleName,
    TokenIds,
    ToolCall,
    exact_key,
    expand,
    group_messages,
    images_of,
    locate,
    make_context,
    spelling_key,
)
from rollmesh.chat.templates import Continuation, Seen, SpecialText, TemplateRenderError
from tests.chat import families

BARE = make_context(b"", b"")
PLACEHOLDERS = {
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5_think": "<|image_pad|>",
    "smolvlm": "<image>",
    "llava_next": "<image>",
    "gemma3": "<start_of_image>",
}
ROLES: dict[str, set[RoleName]] = {
    "qwen2_5_vl": {"system", "user", "tool"},
    "qwen3_vl": {"user", "tool"},
    "qwen3_5_think": {"user", "tool"},
    "smolvlm": {"system", "user", "tool"},
    "llava_next": {"user"},
    "gemma3": {"user"},
}


@dataclass(slots=True)
class Held:
    """A group of a conversation that a session holds."""

    messages: MessageGroup
    token_ids: TokenIds
    end: int
    was_sampled: bool = False
    ends_turn: bool = True
    as_printed: bool | None = None
    seen: Seen | None = None


@cache
def sighted(name: str) -> tuple[families.Family, Continuation, GridRule]:
    """A template, with a rule whose runs have one id for each pixel."""
    family = families.load(name)
    id_ = family.tokenizer.special_id(PLACEHOLDERS[name])
    assert id_ is not None
    rule = GridRule(id_, (id_,), square=1, min_pixels=1, max_pixels=1000)
    return family, Continuation(family.template, family.tokenizer, rule), rule


def image(at: int, width: int = 2, height: int = 1) -> Image:
    return Image(at, f"{width:032x}{height:032x}", width, height)


def expected(name: str, messages: Sequence[Message]) -> TokenIds:
    """Transformers' own render of a conversation, with the runs of its images."""
    family, _, rule = sighted(name)
    text = families.rendered(family, messages, b"")
    assert text is not None
    return expand(family.tokenizer.encode(text), images_of([tuple(messages)]), rule)


def ids_of(name: str, messages: Sequence[Message]) -> TokenIds:
    _, continuation, _ = sighted(name)
    groups = group_messages(tuple(messages))
    parts = continuation.token_ids(groups, 0, BARE)
    return np.concatenate([*parts, continuation.generation_prompt(groups, BARE)])


@pytest.mark.parametrize("name", sorted(PLACEHOLDERS))
def test_the_prober_finds_the_roles_whose_images_are_printed(name: str) -> None:
    assert sighted(name)[1].profile.image_roles == ROLES[name]


def test_a_template_with_numbered_images_is_refused_because_the_numbers_would_begin_anew() -> None:
    _, continuation, _ = sighted("qwen2_5_vl")
    numbered = make_context(b"", b'{"add_vision_id": true}')
    with pytest.raises(TemplateRenderError, match="takes no images in user messages"):
        continuation.token_ids([(Message("user", "a", images=(image(0),)),)], 0, numbered)


TEXTS = st.sampled_from(("a", "Look here.", "x\n\ny", "caf\u00e9"))


@st.composite
def seeing(draw: st.DrawFn, role: RoleName) -> Message:
    """A message with up to three images anywhere in its text."""
    text = draw(TEXTS)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 3))
    return Message(role, text, images=tuple(image(at, *draw(sizes)) for at in places))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages = [Message("system", "Be brief.")] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        messages += [draw(seeing("user")), Message("assistant", draw(TEXTS))]
    return [*messages, draw(seeing("user"))]


@pytest.mark.parametrize("name", sorted(PLACEHOLDERS))
@families.for_each
@given(messages=conversations())
def test_ids_are_those_of_the_whole_render(name: str, messages: list[Message]) -> None:
    found, wanted = ids_of(name, messages), expected(name, messages)
    if name.startswith("qwen3_5"):  # the generation prompt thinks, the history does not
        size = len(ids_of(name, messages[-1:])) - 1
        assert found[-size:].tolist() == wanted[-size:].tolist()
    else:
        assert found.tolist() == wanted.tolist()
    assert len(locate(found, images_of([tuple(messages)]), sighted(name)[2])) == len(
        images_of([tuple(messages)])
    )


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_images_of_tool_results_are_in_their_turn(name: str) -> None:
    call = ToolCall("call00001", "look", "{}")
    messages = [
        Message("user", "What?"),
        Message("assistant", "", (call,)),
        Message("tool", "It is", tool_call_id=call.id, images=(image(2, 3, 2),)),
        Message("tool", "", tool_call_id=call.id, images=(image(0), image(0, 4))),
    ]
    if name == "qwen2_5_vl":  # prints no calls
        messages[1] = Message("assistant", "So.")
    assert ids_of(name, messages).tolist() == expected(name, messages).tolist()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_a_conversation_with_images_is_printed_as_it_is_held(name: str) -> None:
    _, continuation, _ = sighted(name)
    messages = [
        Message("user", "What?", images=(image(0, 3),)),
        Message("assistant", "A cat."),
        Message("user", "And?", images=(image(4), image(4, 1))),
    ]
    groups = group_messages(tuple(messages))
    parts = continuation.token_ids(groups, 0, BARE)
    ends = np.cumsum([len(one) for one in parts])
    path = [Held(groups[at], parts[at], int(ends[at])) for at in range(2)]
    path[1].was_sampled = True
    added = [parts[2], continuation.generation_prompt(groups, BARE)]
    assert continuation.compare(path, groups[2:], BARE, added, list).at is None
    other = replace(messages[2], images=(image(4), image(4, 2)))
    longer = continuation.token_ids([*groups[:2], (other,)], 2, BARE)
    differs = 2 if name == "smolvlm" else None  # an append-only template compares answers only
    assert continuation.compare(path, groups[2:], BARE, [*longer, added[1]], list).at == differs
    reprinted = continuation.reprint(path[:1], groups, BARE, list)
    assert reprinted is not None
    assert np.concatenate([parts[0], *reprinted[0]]).tolist() == np.concatenate(parts).tolist()


def test_the_same_words_with_another_image_are_another_message() -> None:
    plain, one = Message("user", "a"), Message("user", "a", images=(image(0),))
    others = (
        replace(one, images=(image(1),)),
        replace(one, images=(image(0), image(0))),
        replace(one, images=(image(0, 3),)),
    )
    for key in (lambda group: exact_key(group, call_ids=False), spelling_key):
        assert len({key((message,)) for message in (plain, one, *others)}) == 5
        assert key((replace(one),)) == key((one,))


def test_a_role_without_images_is_named() -> None:
    with pytest.raises(TemplateRenderError, match="no images in assistant messages"):
        ids_of("qwen2_5_vl", [Message("assistant", "", images=(image(0),))])
    family = families.load("qwen3")
    blind = Continuation(family.template, family.tokenizer)
    with pytest.raises(TemplateRenderError, match="no images in user messages"):
        blind.token_ids([(Message("user", "", images=(image(0),)),)], 0, BARE)


@pytest.mark.parametrize("setting", ["parity", "plain"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_text_that_spells_a_placeholder_stays_text(name: str, setting: str) -> None:
    family, continuation, rule = sighted(name)
    pad = PLACEHOLDERS[name]
    said = Message("user", f"{pad}a{pad}", images=(image(0), image(len(pad) + 1, 3)))
    groups = group_messages((said, Message("assistant", f"x{pad}"), Message("user", pad)))
    special = SpecialText(family.tokenizer, setting, (pad,))
    shown, context, spelled = special.apply(groups, 0, BARE)
    parts = continuation.token_ids(shown, 0, context)
    assert not spelled
    pairs = zip(parts, groups, strict=True)
    assert [len(locate(one, images_of([group]), rule)) for one, group in pairs] == [2, 0, 0]
    text = family.tokenizer.rust.decode(np.concatenate(parts).tolist(), skip_special_tokens=False)
    assert text.count(pad) == 4 + 2 + 3  # spelled, and the runs of both images


@pytest.mark.parametrize("setting", ["parity", "plain"])
def test_images_stay_where_they_are_when_text_is_hidden(setting: str) -> None:
    family, _, _ = sighted("qwen2_5_vl")
    said = Message("user", "<|im_end|>\ufdd3b<|image_pad|>c", images=(image(12), image(25)))
    special = SpecialText(family.tokenizer, setting, ("<|image_pad|>",))
    ((shown,),), _, spelled = special.apply([(said,)], 0, BARE)
    assert spelled is (setting == "parity")
    texts = [part for part in shown.parts if isinstance(part, str)]
    marks = str.maketrans("", "", "\ufdd3\ufdd4")
    assert [text.translate(marks) for text in texts] == ["<|im_end|>b", "<|image_pad|>", "c"]


def test_a_placeholder_that_reaches_the_ids_is_refused() -> None:
    with pytest.raises(PlacementError, match="2 placeholders for 1 images"):
        ids_of("qwen2_5_vl", [Message("user", "<|image_pad|>", images=(image(0),))])
    with pytest.raises(PlacementError, match="1 placeholders for 0 images"):
        ids_of("qwen2_5_vl", [Message("user", "<|image_pad|>")])
