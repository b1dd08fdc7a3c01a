"""Models with two templates: one for requests with tools, and one for all others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollmesh.chat import (
    ChatModel,
    Conversation,
    Message,
    ModelFilesError,
    ToolCall,
    group_messages,
    make_context,
)
from rollmesh.chat.templates import Continuation, Finding, TemplateRefusedError, load_model
from tests.chat import families
from tests.chat.test_check import check

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{{ bos_token }}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Call as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = ToolCall("abcdefgh1", "f", '{"a": 1}')
SYSTEM, ASK, SAID = Message("system", "Be kind."), Message("user", "q"), Message("assistant", "a")
CALLED = Message("assistant", "", (CALL,))
GOT = Message("tool", "r", tool_call_id=CALL.id, name=CALL.name)


def in_config(folder: Path, named: dict[str, str]) -> None:
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": source} for name, source in named.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": listed}))


def in_files(folder: Path, named: dict[str, str]) -> None:
    (folder / "chat_template.jinja").unlink()
    for name, source in named.items():
        path = folder / "additional_chat_templates" / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        (folder / "chat_template.jinja" if name == "default" else path).write_text(source)


def two_places(folder: Path, named: dict[str, str]) -> None:
    in_config(folder, dict.fromkeys(named, "{{ 0 }}"))
    (folder / "chat_template.jinja").touch()
    in_files(folder, named)


Writes = Callable[[Path, dict[str, str]], None]


def model(folder: Path, writes: Writes, named: dict[str, str]) -> Path:
    families.write_source(PLAIN + WITH_TOOLS, folder, "<|im_end|>")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    writes(folder, named)
    return folder


@pytest.mark.parametrize("writes", [in_config, in_files, two_places])
def test_tools_choose_the_template_as_in_transformers(writes: Writes, tmp_path: Path) -> None:
    folder = model(tmp_path, writes, {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": "{{ 1 }}"})
    template, tokenizer = load_model(folder)
    found, theirs = Continuation(template, tokenizer), AutoTokenizer.from_pretrained(folder)
    assert Finding.IGNORES_TOOLS not in found.profile.findings
    for messages, tools in (
        ((SYSTEM, ASK, SAID, ASK), None),
        ((ASK,), None),
        ((SYSTEM, ASK, SAID, ASK), TOOLS),
        ((SYSTEM, ASK, CALLED, GOT), TOOLS),
        ((ASK, CALLED, GOT, SAID, ASK), TOOLS),
    ):
        context = make_context(json.dumps(tools).encode() if tools else b"", b"")
        groups = group_messages(messages)
        parts = [*found.token_ids(groups, 0, context), found.generation_prompt(groups, context)]
        text = theirs.apply_chat_template(
            [families.plain_message(one) for one in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert [id_ for part in parts for id_ in part.tolist()] == tokenizer.encode(text).tolist()


def test_calls_are_read_as_the_template_for_tools_prints_them(tmp_path: Path) -> None:
    folder = model(tmp_path, in_config, {"default": PLAIN, "tool_use": WITH_TOOLS})
    assert "tool calls            hermes" in check(folder).stdout
    conversation = Conversation(ChatModel.load(folder), tools=TOOLS)
    assert len(conversation.prompt([{"role": "user", "content": "q"}]))


def test_a_model_without_a_default_template_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path, in_config, {"tool_use": WITH_TOOLS, "rag": PLAIN})
    with pytest.raises(ModelFilesError, match="has chat templates rag, tool_use, and none is def"):
        load_model(folder)


def test_a_pair_of_which_one_cannot_be_continued_is_refused_with_its_reason(
    tmp_path: Path,
) -> None:
    folder = model(
        tmp_path, in_config, {"default": PLAIN, "tool_use": "{{ messages[-1].content }}"}
    )
    template, tokenizer = load_model(folder)
    with pytest.raises(TemplateRefusedError, match="the template for tools: the template does not"):
        Continuation(template, tokenizer)


def test_a_pair_that_ends_answers_differently_is_refused(tmp_path: Path) -> None:
    other = WITH_TOOLS.replace("<|im_end|>", "<|im_start|>end<|im_start|>")
    folder = model(tmp_path, in_config, {"default": PLAIN, "tool_use": other})
    template, tokenizer = load_model(folder)
    with pytest.raises(TemplateRefusedError, match="the template for tools ends answers with"):
        Continuation(template, tokenizer)
