"""Writes the tables of the record's columns into docs/record.md, between its two marks.

python -m scripts.pages.record
"""

from pathlib import Path
from typing import Any

from rollmesh.record import TABLES, Column

PAGE = Path(__file__).parents[2] / "docs" / "record.md"
_BEGIN, _END = "<!-- columns: generated -->\n", "<!-- columns: end -->\n"


def page(text: str) -> str:
    """Returns the page with the columns as they are in the code.

    Args:
        text: The page as it is.
    """
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = "\n".join(_table(name, columns) for name, columns in TABLES.items())
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def _table(name: str, columns: tuple[Column, ...]) -> str:
    rows = "".join(f"| `{one.name}` | {_type(one.type)} | {one.meaning} |\n" for one in columns)
    return f"| column of `{name}` | type | meaning |\n|---|---|---|\n{rows}"


def _type(found: Any) -> str:
    """Returns an Arrow type in words."""
    if hasattr(found, "value_type"):
        return f"list of {_type(found.value_type)}"
    if found.num_fields:
        inner = ", ".join(found.field(at).name for at in range(found.num_fields))
        return f"{{{inner}}}"
    return str(found)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
