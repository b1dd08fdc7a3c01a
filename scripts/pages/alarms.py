"""Writes the alarms: the tables of docs/alarms.md, Prometheus' rules, and Grafana's board.

python -m scripts.pages.alarms
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmesh.runtime import ALARM_RULES, MESH_RULES, STEP_RULES, Rule

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "alarms.md"
PROMETHEUS = _ROOT / "docker" / "observability" / "alarms.yml"
BOARD = _ROOT / "docker" / "observability" / "grafana" / "dashboards" / "alarms.json"
_BEGIN, _END = "<!-- alarms: generated -->\n", "<!-- alarms: end -->\n"


def page(text: str) -> str:
    """Returns the page with the tables as they are in the code.

    Args:
        text: The page as it is.
    """
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = f"{_table('of a trainer', STEP_RULES)}\n{_table('of the mesh', MESH_RULES)}"
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def _table(what: str, rules: Sequence[Rule]) -> str:
    rows = "".join(f"| `{one.name}` | {one.when} | {one.remedy} |\n" for one in rules)
    return f"| alarm {what} | raised when | remedy |\n|---|---|---|\n{rows}"


def expression(rule: Rule) -> str:
    """Returns the condition of an alarm in Prometheus' language."""
    gauge = f'max by (name, where) (rollmesh_alarm{{name="{rule.name}"}}) > 0'
    return rule.prometheus or gauge


def prometheus() -> str:
    """Returns the rules of Prometheus. Strings of JSON are strings of YAML."""
    text = "# Made from the table of alarms by scripts/pages/alarms.py.\ngroups:\n"
    text += "  - name: rollmesh\n    rules:\n"
    for rule in ALARM_RULES:
        name = "".join(part.capitalize() for part in rule.name.split("_"))
        text += (
            f"      - alert: Rollmesh{name}\n"
            f"        expr: {json.dumps(expression(rule))}\n"
            "        for: 1m\n"
            "        labels: {severity: warning}\n"
            "        annotations:\n"
            f"          summary: {json.dumps(f'{rule.name}: {rule.when}')}\n"
            f"          description: {json.dumps(rule.remedy + '.')}\n"
        )
    return text


def board() -> str:
    """Returns the board of Grafana. A panel is empty while its alarm is not raised."""
    gauge = "max by (name, where) (rollmesh_alarm) > 0"
    panels = [_panel("Alarms of trainers, and of `rollmesh doctor`", "See docs/alarms.md.", gauge)]
    panels += [
        _panel(rule.name, f"Raised when {rule.when}. {rule.remedy}.", rule.prometheus)
        for rule in ALARM_RULES
        if "rollmesh_" in rule.prometheus
    ]
    for at, panel in enumerate(panels):
        panel["id"] = at + 1
        panel["gridPos"] = {"x": 8 * (at % 3), "y": 6 * (at // 3), "w": 8, "h": 6}
    found = {
        "uid": "rollmesh-alarms",
        "title": "rollmesh: alarms",
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": False,
        "panels": panels,
    }
    return json.dumps(found, indent=1) + "\n"


def _panel(title: str, description: str, expr: str) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "fieldConfig": {"defaults": {"noValue": "not raised"}, "overrides": []},
        "targets": [{"refId": "A", "expr": expr}],
    }


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    PROMETHEUS.write_text(prometheus(), "utf-8")
    BOARD.write_text(board(), "utf-8")
