"""The page about Harbor lists the agents that its relay takes, in the forms of the API it takes."""

import json
import os
from pathlib import Path

import pytest

from tests.harbor.serving import PYTHON, server_side
from tests.paths import ROOT
from tests.processes import run_to_end

NAMES = {
    "openai_chat_completions": "chat",
    "openai_responses": "Responses",
    "anthropic_messages": "Messages",
    "google_generate_content": "Google",
}
UNREGISTERED = {"terminus", "terminus-1"}  # names without an agent


@pytest.mark.long
async def test_the_page_lists_every_agent_and_whether_the_relay_takes_it(tmp_path: Path) -> None:
    environ = os.environ | server_side(tmp_path)
    script = Path(__file__).parent / "server_side" / "relayed.py"
    output, _ = await run_to_end(PYTHON, script, cwd=tmp_path, env=environ, limit_s=120)
    found = json.loads(output)
    page = (ROOT / "docs" / "harbor.md").read_text().partition("### All agents\n")[2]
    table, _, rest = page.partition("\nThe relay refuses ")
    rows = [[one.strip() for one in row.split("|")[1:3]] for row in table.splitlines()[5:] if row]
    forms = {name: ", ".join(NAMES[form] for form in taken) for name, taken in found.items()}
    assert rows == sorted([name, taken] for name, taken in forms.items() if taken)
    refused = sorted(
        name for name, taken in forms.items() if not taken and name not in UNREGISTERED
    )
    assert rest.partition(".")[0].replace(" and ", ", ").split(", ") == refused
