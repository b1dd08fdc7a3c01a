"""The command of docs/verl.md."""

import shlex

from tests.docs.pages import blocks


def command() -> list[str]:
    """The overrides of the one command."""
    (text, *_) = (one.text for one in blocks("text") if one.page == "docs/verl.md")
    words = shlex.split(text.replace("\\\n", " "))
    return words[words.index("verl.trainer.main_ppo") + 1 :]
