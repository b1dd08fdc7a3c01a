"""`rollmesh template check`, as its users call it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat import families
from tests.paths import package_folder

TEMPLATES = package_folder("trl") / "chat_templates"


def check(model: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollmesh.cli", "template", "check", str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def model(tmp_path: Path, tokenizer_dir: Path) -> Path:
    for path in tokenizer_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_report_has_the_findings(model: Path) -> None:
    (model / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    done = check(model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("append-only except drops earlier reasoning")
    assert "<|im_end|>" in done.stdout
    assert "tool calls            hermes\nreasoning             think\n" in done.stdout


def test_the_report_says_where_calls_cannot_be_read_and_names_the_setting(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("tool_call>", "other_call>"))
    done = check(model)
    assert done.returncode == 0, done.stderr
    assert "tool calls            unknown\n" in done.stdout
    assert "Set tool_parser to one of: none (calls stay text), deepseek_v3, " in done.stdout


def test_a_refused_template_gives_its_reason(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    done = check(model)
    assert done.returncode == 1
    assert done.stdout.startswith("refused: the template does not print an answer")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2
    assert "tokenizer_config.json" in done.stderr


def test_the_report_says_where_a_template_allows_one_call(tmp_path: Path) -> None:
    families.write("llama3_1", tmp_path)
    shown = check(tmp_path).stdout
    assert "The template allows one tool call: an answer ends before a second." in shown
