"""The settings that the docs give for verl's command line, in verl 0.9.1's own configuration."""

import re
from pathlib import Path

from tests.docs.pages import blocks
from tests.paths import ROOT
from tests.trainers.processes import run_script

_SETTING = re.compile(r"\+?(actor_rollout_ref|rollmesh)\.[\w.]+=")
_MANAGER = "rollmesh.integrations.verl.manager"


async def test_verls_command_line_takes_the_settings_of_the_docs(tmp_path: Path) -> None:
    shown = [one.text for one in blocks("text") if one.page == "docs/trainers.md"]
    lines = [line.strip() for text in shown for line in text.splitlines()]
    overrides = [line for line in lines if line.startswith(("+", "actor_rollout_ref."))]
    found = await run_script("verl_overrides_run", tmp_path, overrides=overrides)
    assert found == {"manager": f"{_MANAGER}.AgentLoopManager", "router": "HOST:PORT"}


def test_settings_in_the_code_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text().splitlines()
    for module in (ROOT / "clients/rollmesh/integrations/verl").glob("*.py"):
        lines = [line.strip() for line in module.read_text().splitlines()]
        shown = [line for line in lines if _SETTING.match(line)]
        assert [line for line in shown if line not in page] == [], module
