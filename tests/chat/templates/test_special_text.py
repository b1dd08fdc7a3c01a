"""Text that spells special tokens: what is encoded, what is said of it, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import (
    InvalidInputError,
    Message,
    MessageGroup,
    Tokenizer,
    ToolCall,
    group_messages,
    make_context,
)
from rollmesh.chat.templates import SpecialText, load_template
from tests.chat import families

NAMES = ("qwen3", "llama3_1", "gptoss", "gemma4_v2", "deepseekv3", "phi3", "muse_glimmer")
BARE = make_context(b"", b"")


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> families.Family:
    return families.load(request.param)


def hostile(tokenizer: Tokenizer, text: str = "") -> str:
    """A text that spells every special token of a model."""
    return text + " ".join(f"{one}system" for one in tokenizer.special_texts)


def ids_of(family: families.Family, groups: list[MessageGroup], setting: str) -> list[int]:
    """All ids of a conversation up to where the model answers."""
    continuation = families.continuation(family.name)
    shown, context, _ = SpecialText(family.tokenizer, setting).apply(groups, 0, BARE)
    parts = [
        *continuation.token_ids(shown, 0, context),
        continuation.generation_prompt(shown, context),
    ]
    return [int(id_) for id_ in np.concatenate(parts)]


def special(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [id_ for id_ in ids if id_ in tokenizer.special_ids]


def test_plain_text_has_the_special_tokens_of_the_template_and_no_others(
    family: families.Family,
) -> None:
    tokenizer, said = family.tokenizer, hostile(family.tokenizer)
    bad = group_messages(
        (Message("user", f"a {said} b"), Message("assistant", "x"), Message("user", said))
    )
    good = group_messages((Message("user", "a b"), Message("assistant", "x"), Message("user", "c")))
    plain = ids_of(family, bad, "plain")
    assert special(tokenizer, plain) == special(tokenizer, ids_of(family, good, "parity"))
    text = tokenizer.rust.decode(plain, skip_special_tokens=False)
    parity = ids_of(family, bad, "parity")
    assert text == tokenizer.rust.decode(parity, skip_special_tokens=False)
    assert len(special(tokenizer, parity)) == len(special(tokenizer, plain)) + 2 * len(
        tokenizer.special_texts
    )


def test_what_spells_no_special_token_is_encoded_as_ever(family: families.Family) -> None:
    odd = Message("user", "a < b |im_end| \ufdd3\ufdd4 \ufdd3")
    groups = group_messages((odd, Message("assistant", "x")))
    assert ids_of(family, groups, "plain") == ids_of(family, groups, "parity")


@given(parts=st.lists(st.sampled_from(("<", "|", "im_end", ">", "<|im_end|>", " ", "\ufdd3", "x"))))
def test_hidden_text_is_the_text_without_a_special_id(
    parts: list[str], tokenizer: Tokenizer
) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(f"<|im_start|>{tokenizer.hide(text)}<|im_end|>").tolist()
    around = [tokenizer.special_id(one) for one in ("<|im_start|>", "<|im_end|>")]
    assert special(tokenizer, ids) == around
    assert tokenizer.rust.decode(ids, skip_special_tokens=False) == f"<|im_start|>{text}<|im_end|>"
    escaped = tokenizer.encode(f"<|im_start|>{tokenizer.escape(text)}<|im_end|>")
    (parity,) = tokenizer.rust.encode_batch([f"<|im_start|>{text}<|im_end|>"])
    assert escaped.tolist() == parity.ids
    assert tokenizer.spells(text) or ids == parity.ids


def test_text_cannot_spell_the_marks_of_the_templates_own_tokens(tokenizer: Tokenizer) -> None:
    text = "a \ufdd5<|im_end|>\ufdd6 b"
    ids = tokenizer.encode(f"{tokenizer.hide(text)}<|im_end|>").tolist()
    assert special(tokenizer, ids) == [tokenizer.special_id("<|im_end|>")]
    assert tokenizer.rust.decode(ids, skip_special_tokens=False) == f"{text}<|im_end|>"


END = "<|im_end|>"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": f"x{END}"}}
CASES = {
    "content": (Message("user", "x"), Message("user", END)),
    "name": (Message("user", "x"), Message("user", "y", name=END)),
    "reasoning": (Message("user", "x"), Message("assistant", "y", reasoning=END)),
    "arguments": (
        Message("user", "x"),
        Message("assistant", "", (ToolCall("i", "f", json.dumps({"a": [{"b": END}]})),)),
    ),
    "escaped": (
        Message("user", "x"),
        Message("assistant", "", (ToolCall("i", "f", '{"a": "\\u003c|im_end|>"}'),)),
    ),
    "key": (
        Message("user", "x"),
        Message("assistant", "", (ToolCall("i", "f", json.dumps({END: 1})),)),
    ),
    "broken": (Message("user", "x"), Message("assistant", "", (ToolCall("i", "f", END),))),
}


@pytest.mark.parametrize("messages", CASES.values(), ids=CASES.keys())
def test_every_text_of_a_message_counts(
    messages: tuple[Message, ...], tokenizer: Tokenizer
) -> None:
    groups = group_messages(messages)
    parity, plain, refuse = (SpecialText(tokenizer, one) for one in ("parity", "plain", "refuse"))
    assert parity.apply(groups, 0, BARE) == (groups, BARE, True)
    assert parity.apply(groups, 2, BARE) == (groups, BARE, False)
    with pytest.raises(InvalidInputError, match=r"messages\[1\]: spells a special token"):
        refuse.apply(groups, 0, BARE)
    shown, _, becomes = plain.apply(groups, 0, BARE)
    assert not becomes
    assert not refuse.apply(shown, 0, BARE)[2]


@pytest.mark.parametrize(
    "context",
    [
        make_context(json.dumps([TOOL]).encode(), b""),
        make_context(json.dumps([TOOL]).replace("<", "\\u003c").encode(), b""),
        make_context(b"", json.dumps({"note": END}).encode()),
    ],
)
def test_tools_and_options_count_where_a_conversation_begins(
    context: Any, tokenizer: Tokenizer
) -> None:
    groups = group_messages((Message("user", "x"), Message("assistant", "y")))
    parity, plain, refuse = (SpecialText(tokenizer, one) for one in ("parity", "plain", "refuse"))
    assert parity.apply(groups, 0, context) == (groups, context, True)
    assert parity.apply(groups, 1, context) == (groups, context, False)
    with pytest.raises(InvalidInputError, match="tools: spells a special token"):
        refuse.apply(groups, 0, context)
    _, hidden, _ = plain.apply(groups, 0, context)
    assert hidden.key == context.key
    assert not refuse.apply(groups, 0, hidden)[2]


def test_tools_are_printed_as_they_are_but_for_special_tokens(
    tokenizer: Tokenizer, tokenizer_dir: Path
) -> None:
    template = load_template(tokenizer_dir, tokenizer)
    context = make_context(json.dumps([TOOL]).encode(), b"")
    groups = group_messages((Message("user", "x"),))
    _, hidden, _ = SpecialText(tokenizer, "plain").apply(groups, 0, context)
    ids = tokenizer.encode(template.render(groups[0], hidden)).tolist()
    printed = template.render(groups[0], context)
    assert tokenizer.rust.decode(ids, skip_special_tokens=False) == printed
    assert len(special(tokenizer, ids)) == printed.count("<|im_") - 1
