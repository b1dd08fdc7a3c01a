"""Writes the tables of alarms into docs/alarms.md, between its two marks.

python -m scripts.pages.alarms
"""

from pathlib import Path

from rollmesh.runtime.alarms import RULES, Rule

PAGE = Path(__file__).parents[2] / "docs" / "alarms.md"
_BEGIN, _END = "<!-- alarms: generated -->\n", "<!-- alarms: end -->\n"


def page(text: str) -> str:
    """Returns the page with the tables as they are in the code.

    Args:
        text: The page as it is.
    """
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    steps = [rule for rule in RULES if rule.of_steps]
    mesh = [rule for rule in RULES if rule.of_mesh]
    tables = f"{_table('of a trainer', steps)}\n{_table('of the mesh', mesh)}"
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def _table(what: str, rules: list[Rule]) -> str:
    rows = "".join(f"| `{one.name}` | {one.when} | {one.remedy} |\n" for one in rules)
    return f"| alarm {what} | raised when | remedy |\n|---|---|---|\n{rows}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
